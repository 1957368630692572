"""The reference on GPUs that have no kernel for an op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.core import _jax, grouped_dense

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_constant_group_sizes_compile(h100_mesh, monkeypatch, recipe):
    """FP8 on an A100, which has no such kernels, with sizes that the compiler knows."""
    monkeypatch.setattr(_jax, "compute_capability", lambda: 8.0)
    sharding = NamedSharding(h100_mesh({"x": 1}), PartitionSpec())

    def step(x, kernel, dy):
        sizes = jnp.asarray(np.array([[128, 0, 128]], np.int32))
        y, pull = jax.vjp(lambda x, w: grouped_dense(x, w, sizes, recipe=recipe), x, kernel)
        return y, pull(dy)

    shapes = (1, 384, 256), (3, 256, 160), (1, 384, 160)
    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes]
    compiled = jax.jit(step).lower(*operands).compile()
    assert " while(" in compiled.as_text(), "a kernel, not the reference"
