"""Programs with a symbolic batch, exported once and called with several sizes; what needs a size says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from expertmesh.core import (
    RouterConfig,
    dense,
    gemm,
    grouped_dense,
    grouped_gemm,
    plan_permute,
    route,
)

rng = np.random.default_rng(0)
W, EXPERTS = (np.asarray(rng.normal(size=s), np.float32) for s in ((16, 32), (3, 16, 32)))


def with_gradient(function):
    def both(x, *others):
        y, pull = jax.vjp(lambda x: function(x, *others), x)
        return y, *pull(jnp.ones_like(y))

    return both


FUNCTIONS = {
    "gemm": with_gradient(lambda x, sizes: gemm(x, W)),
    "dense": with_gradient(lambda x, sizes: dense(x, W, recipe="fp8_current")),
    "grouped_gemm": with_gradient(lambda x, sizes: grouped_gemm(x, EXPERTS, sizes)),
    "grouped_dense": with_gradient(
        lambda x, sizes: grouped_dense(x, EXPERTS, sizes, recipe="fp8_current")
    ),
    "route": lambda x, sizes: route(x, RouterConfig(top_k=2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_symbolic_batch(name):
    (batch,) = export.symbolic_shape("b")
    operands = jax.ShapeDtypeStruct((batch, 16), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    exported = export.export(jax.jit(FUNCTIONS[name]))(*operands)
    for rows in (6, 300):
        x = np.asarray(rng.normal(size=(rows, 16)), np.float32)
        sizes = np.array([rows // 2, 0, rows // 3], np.int32)
        for got, want in zip(exported.call(x, sizes), FUNCTIONS[name](x, sizes), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_needs_a_size_says_so():
    (batch,) = export.symbolic_shape("b")
    idx = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"plan_permute: .*sizes.*\(1, b, 2\).*export"):
        export.export(jax.jit(lambda idx: plan_permute(idx, num_experts=4)))(idx)
