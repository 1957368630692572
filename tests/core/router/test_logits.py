"""The router's logits and gradients against float64, as float32 operands and as sums of bfloat16 parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core.router import logits as ops
from expertmesh.core.testing import magnitudes, relative_error

pytestmark = pytest.mark.default_jax

T, D, E = (3, 14), 96, 20


def make(weight_dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(magnitudes(rng, (*T, D)), jnp.bfloat16)
    weight = jnp.asarray(magnitudes(rng, (D, E)), weight_dtype)
    return x, weight, jnp.asarray(rng.normal(size=(*T, E)), jnp.float32)


def exact(x, weight, d):
    x, weight, d = (np.asarray(a, np.float64) for a in (x, weight, d))
    return x @ weight, d @ weight.T, np.einsum("abd,abe->de", x, d)


def check(got, want, weight_dtype):
    """Logits are float32 all through; the cotangent and the weight may have been rounded to 16 bits."""
    logits, dx, dw = got
    assert logits.dtype == jnp.float32 and dx.dtype == jnp.bfloat16 and dw.dtype == weight_dtype
    assert relative_error(logits, want[0]) < 1e-6
    assert relative_error(dx, want[1]) < 2.0**-8
    assert relative_error(dw, want[2]) < (2.0**-8 if weight_dtype == "bfloat16" else 2.0**-16)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_exact(weight_dtype):
    x, weight, d = make(weight_dtype)
    want = exact(x, weight, d)
    logits, pull = jax.vjp(ops.router_logits, x, weight)
    check((logits, *pull(d)), want, weight_dtype)
    parts = (
        ops._logits_of_parts(x, weight, out_dtype=jnp.float32),
        ops._dgrad_of_parts(d, weight, out_dtype=jnp.bfloat16),
        ops._wgrad_of_parts(x, d, out_dtype=weight.dtype),
    )
    check(parts, want, weight_dtype)
    wide = ops._dgrad_of_parts(d, weight, out_dtype=jnp.float32)
    assert relative_error(wide, want[1]) < 2.0**-15


def test_bias():
    """In float32, its gradient in its own dtype; those of the operands as without it."""
    x, weight, d = make("float32")
    bias = jnp.asarray(np.random.default_rng(1).normal(size=E) * 100, jnp.bfloat16)
    want, pull = jax.vjp(ops.router_logits, x, weight)
    logits, pull_biased = jax.vjp(ops.router_logits, x, weight, bias)
    assert relative_error(logits, np.float64(want) + np.float64(bias)) < 1e-6
    *others, d_bias = pull_biased(d)
    for got, plain in zip(others, pull(d), strict=True):
        np.testing.assert_array_equal(got, plain)
    assert d_bias.dtype == jnp.bfloat16
    assert relative_error(d_bias, np.sum(np.float64(d), axis=(0, 1))) < 2.0**-8


def test_not_finite():
    """Infinity stays infinity, NaN in a token stays in its logits."""
    x, weight, _ = make("float32")
    x, weight = x.at[0, 0, 0].set(jnp.nan), weight.at[:, 3].set(jnp.inf)
    logits = np.asarray(ops._logits_of_parts(jnp.abs(x), weight, out_dtype=jnp.float32))
    assert np.isnan(logits[0, 0]).all() and np.isfinite(logits[1:, :, :3]).all()
    assert np.isposinf(logits[1:, :, 3]).all()


def test_errors():
    with pytest.raises(ValueError, match=r"weight \(95, 4\).*transpose"):
        ops.router_logits(jnp.zeros((3, 96)), jnp.zeros((95, 4)))
    with pytest.raises(ValueError, match=r"bias \(3,\), weight \(96, 4\)"):
        ops.router_logits(jnp.zeros((3, 96)), jnp.zeros((96, 4)), jnp.zeros(3))
