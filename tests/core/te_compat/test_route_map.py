"""The router in dense form, against loops over the choices of the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.router import router_oracle
from expertmesh.core import RouterConfig, permute, plan_permute_map, route_map, unpermute

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

E = 12
CONFIG = RouterConfig(top_k=3, score_function="sigmoid", scaling_factor=2.5)


def operands(dtype):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 7, E)).astype(jnp.dtype(dtype))
    bias = rng.normal(size=E).astype(np.float32)
    return logits, bias, rng.random((2, 7)) < 0.7


def dense(logits, bias, mask):
    idx, weights = router_oracle.route(logits.astype(np.float64), CONFIG, bias, mask)
    probs, flags = np.zeros(logits.shape), np.zeros(logits.shape, bool)
    for i in np.ndindex(idx.shape):
        if idx[i] >= 0:
            probs[*i[:-1], idx[i]] = weights[i]
            flags[*i[:-1], idx[i]] = True
    return probs, flags


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_both_formats_equal_loops(dtype, tolerance):
    logits, bias, mask = operands(dtype)
    probs, flags = dense(logits, bias, mask)
    options = dict(expert_bias=jnp.asarray(bias), token_mask=jnp.asarray(mask))
    out = route_map(jnp.asarray(logits), CONFIG, **options)
    assert out.probs.dtype == dtype and not mask.all()
    np.testing.assert_allclose(np.asarray(out.probs, np.float64), probs, rtol=tolerance)
    np.testing.assert_array_equal(out.routing_map, flags)
    packed = route_map(jnp.asarray(logits), CONFIG, format="bitmap", **options).routing_map
    np.testing.assert_array_equal(packed, np.packbits(flags, axis=-1, bitorder="little"))


def test_gradient_and_permutation():
    """Rows by the map, weighted with probs, come back as each token times the sum of its weights."""
    logits, _, _ = operands("float32")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 4)).astype(np.float32))

    def total(logits):
        probs, routed = route_map(logits, CONFIG)
        plan = plan_permute_map(routed, top_k=CONFIG.top_k)
        return jnp.sum(unpermute(permute(x, plan), plan, probs) * x)

    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.asarray(logits))
    square = np.sum(np.asarray(x, np.float64) ** 2, axis=-1)
    np.testing.assert_allclose(value, np.sum(square) * CONFIG.scaling_factor, rtol=1e-5)
    # The weights of a token sum to a constant.
    np.testing.assert_allclose(gradient, np.zeros(logits.shape), atol=1e-5)


def test_a_weight_of_zero_is_routed():
    out = route_map(jnp.asarray([[0.0, -jnp.inf]]), RouterConfig(top_k=2))
    assert out.probs.tolist() == [[1, 0]] and out.routing_map.tolist() == [[True, True]]


def test_the_format_is_checked_first():
    with pytest.raises(ValueError, match="route_map: format must be one of bytemap, bitmap.*'csr'"):
        route_map(jnp.zeros((2, 2), int), CONFIG, format="csr")
