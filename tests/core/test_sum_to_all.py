"""Large sums that are rounded afterwards: added in float32, rounded once, fewer bytes than an all-reduce of float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import gemm

TOKENS, K, N = 16, 1024, 1026


@pytest.mark.parametrize("axes, devices", [("a", 2), (("a", "b"), 8)], ids=str)
def test_weight_gradient(axes, devices):
    """To the bit what adding the devices' float32 parts and rounding gives."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.integers(-8, 9, (TOKENS, n)), jnp.bfloat16) for n in (K, N))
    w = jnp.zeros((K, N), jnp.bfloat16)

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    gradient = jax.jit(lambda x, w, dy: jax.vjp(lambda w: gemm(x, w), w)[1](dy)[0])
    given = place(x, axes), place(w), place(dy, axes)
    exact = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)  # integers: no order matters
    np.testing.assert_array_equal(gradient(*given), jnp.asarray(exact, jnp.bfloat16))
    # As it is lowered: XLA:CPU gathers in float32.
    text = gradient.lower(*given).as_text()
    (gathered,) = re.findall(r"stablehlo\.all_gather.*-> tensor<(\w+)>", text)
    assert gathered == f"{K}x{N}xbf16"
    (scattered,) = re.findall(r"stablehlo\.reduce_scatter[\s\S]*?-> tensor<(\w+)>", text)
    assert scattered == f"{K // devices}x{N}xf32" and "all_reduce" not in text
