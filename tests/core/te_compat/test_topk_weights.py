"""Weights of experts and of choices, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import (
    from_routing_map,
    permute,
    plan_permute,
    plan_permute_map,
    probs_to_topk_weights,
    topk_weights_to_probs,
    unpermute,
)

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_ids_out_of_range_and_repeated_and_narrow(dtype):
    idx = jnp.asarray([[0, 0, -1], [-128, 2, 99]], dtype)
    weights = jnp.asarray([[1.0, 2, 4], [8, 16, 32]])
    probs = topk_weights_to_probs(weights, idx, num_experts=300)
    assert (probs[0, 0], probs[1, 2], probs[1, 99], probs.sum()) == (3, 16, 32, 51)
    np.testing.assert_array_equal(probs_to_topk_weights(probs, idx), [[3, 3, 0], [0, 16, 32]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_equal_loops(dtype):
    rng = np.random.default_rng(0)
    idx = rng.integers(-1, 6, (2, 7, 3)).astype(np.int32)
    probs, weights = (jnp.asarray(rng.normal(size=(2, 7, n)), dtype) for n in (5, 3))
    gathered, spread = np.zeros(idx.shape), np.zeros(probs.shape)
    for i in np.ndindex(idx.shape):
        if 0 <= idx[i] < 5:
            gathered[i] = probs[*i[:2], idx[i]]
            spread[*i[:2], idx[i]] += float(weights[i])
    got, pull = jax.vjp(lambda p: probs_to_topk_weights(p, idx), probs)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), gathered)
    (d_probs,) = pull(weights)
    np.testing.assert_allclose(np.asarray(d_probs, np.float64), spread, rtol=1e-2, atol=1e-6)
    out, pull = jax.vjp(lambda w: topk_weights_to_probs(w, idx, num_experts=5), weights)
    np.testing.assert_array_equal(out, d_probs)
    np.testing.assert_array_equal(pull(probs)[0], got)
    grads = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(probs_to_topk_weights(p, idx) ** 2)))(probs)
    assert "scatter" not in str(grads)


def test_nan_of_other_experts_stays_out():
    idx, probs = jnp.asarray([[1, -1]]), jnp.asarray([[jnp.nan, 2.0]])
    assert probs_to_topk_weights(probs, idx).tolist() == [[2, 0]]
    weights = jnp.asarray([[3.0, jnp.nan]])
    assert topk_weights_to_probs(weights, idx, num_experts=2).tolist() == [[0, 3]]


def test_both_forms_permute_alike():
    rng = np.random.default_rng(1)
    routed = jnp.asarray(rng.random((13, 5)) < 0.4)
    x, probs = (jnp.asarray(rng.normal(size=(13, n)), jnp.float32) for n in (3, 5))
    idx = from_routing_map(routed, 5, 5)
    by_idx = plan_permute(idx, num_experts=5, alignment=4)
    by_map = plan_permute_map(routed, alignment=4)
    rows = permute(x, by_map)
    np.testing.assert_array_equal(permute(x, by_idx), rows)
    np.testing.assert_array_equal(by_idx.group_sizes, by_map.group_sizes)
    out = unpermute(rows, by_idx, probs_to_topk_weights(probs, idx))
    np.testing.assert_allclose(out, unpermute(rows, by_map, probs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda m, i: probs_to_topk_weights(m * 1.0, m), TypeError, "dtype=bool"),
        (lambda m, i: probs_to_topk_weights(m * 1.0, i[0, 0]), ValueError, "shape=()"),
        (
            lambda m, i: topk_weights_to_probs(i * 1.0, i, num_experts=0),
            ValueError,
            "num_experts=0",
        ),
        (lambda m, i: probs_to_topk_weights(m, i), TypeError, "dtype=bool"),
        (lambda m, i: probs_to_topk_weights(m[1:] * 1.0, i), ValueError, "shape=(3, 3)"),
        (lambda m, i: topk_weights_to_probs(i, i, num_experts=3), TypeError, "dtype=int32"),
        (lambda m, i: topk_weights_to_probs(m * 1.0, i, num_experts=3), ValueError, "(4, 2)"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as caught:
        call(jnp.ones((4, 3), bool), jnp.zeros((4, 2), jnp.int32))
    assert words in str(caught.value)
