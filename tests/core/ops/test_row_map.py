"""move_rows and move_values against matrices of zeros and ones, in NumPy, for maps that no plan makes too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.core import RowMap, move_rows, move_values
from expertmesh.core.ops.row_map import holds_token
from expertmesh.core.testing import magnitudes, relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def places(rng, P, S, K, N):
    """Pairs (place of the source, row of the result) of each group, about two thirds of what there is room for."""
    count = 2 * min(S * K, N) // 3
    return [
        np.stack([rng.permutation(S * K)[:count], rng.permutation(N)[:count]], 1) for _ in range(P)
    ]


def map_of(pairs, S, K, N):
    """RowMap(int32[P, S, K], int32[P, N]); without K where it is None."""
    row = np.full((len(pairs), S * (K or 1)), -1, np.int32)
    source = np.full((len(pairs), N), -1, np.int32)
    for p, group in enumerate(pairs):
        row[p, group[:, 0]], source[p, group[:, 1]] = group[:, 1], group[:, 0]
    row = row if K is None else row.reshape(-1, S, K)
    return RowMap(jnp.asarray(row), jnp.asarray(source))


def matrix(pairs, weights, S, K, N):
    """[N, S]: what multiplies the source's rows; weights of the pairs."""
    out = np.zeros((N, S))
    for (place, n), weight in zip(pairs, weights, strict=True):
        out[n, place // K] += weight
    return out


SIZES = st.sampled_from(
    [(2, 7, 3, 30), (1, 9, 2, 11), (2, 8, None, 8), (3, 5, 1, 9), (1, 4, 11, 40), (1, 3, None, 0)]
)


@settings(max_examples=40, deadline=None)
@given(
    size=SIZES,
    back=st.booleans(),
    weighted=st.booleans(),
    grouped=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_matrices(size, back, weighted, grouped, dtype, seed):
    P, S, K, N = size
    rng = np.random.default_rng(seed)
    pairs = places(rng, P, S, K or 1, N)
    row_map = map_of(pairs, S, K, N)
    row_map = row_map.inverse if back else row_map
    x = magnitudes(rng, (P, N if back else S, 5), dtype)
    d_out = magnitudes(rng, (P, S if back else N, 5), dtype)
    weights = rng.normal(size=row_map.source.shape).astype(np.float32)
    weights = np.where(row_map.source < 0, np.nan, weights) if weighted else None

    operands = jax.tree.map(jnp.asarray, (x, row_map, weights, d_out))
    if not grouped:
        operands = jax.tree.map(lambda a: a[0], operands)
    x_, map_, weights_, d_ = operands
    out, pull = jax.vjp(lambda x, weights: move_rows(x, map_, weights), x_, weights_)
    got = out, *pull(d_)
    for p in range(P if grouped else 1):
        at = pairs[p][:, 0] if back else pairs[p][:, 1]
        w = np.ones(len(at)) if weights is None else weights[p].reshape(-1)[at].astype(np.float64)
        dense = matrix(pairs[p], w, S, K or 1, N)
        dense = dense.T if back else dense
        x_p, d_p = x[p].astype(np.float64), d_out[p].astype(np.float64)
        one = [None if a is None else np.asarray(a[p] if grouped else a) for a in got]
        tolerance = 2e-6 if dtype == "float32" else 6e-3
        assert out.dtype == got[1].dtype == x.dtype
        assert relative_error(one[0], dense @ x_p) < tolerance
        assert relative_error(one[1], dense.T @ d_p) < tolerance
        assert not np.asarray(one[0], np.float64)[~dense.any(axis=1)].any()  # not only small: 0
        if weighted:
            all_dots = d_p @ x_p.T  # of each row of the result with each of the source
            want = np.zeros(one[2].size)
            for (place, n), i in zip(pairs[p], at, strict=True):
                s = place // (K or 1)
                want[i] = all_dots[s, n] if back else all_dots[n, s]
            assert relative_error(one[2].reshape(-1), want) < 1e-5
            assert not one[2].reshape(-1)[np.setdiff1d(np.arange(want.size), at)].any()


@settings(max_examples=20, deadline=None)
@given(size=SIZES, back=st.booleans(), seed=st.integers(0, 1000))
def test_numbers_of_places_and_their_gradient(size, back, seed):
    P, S, K, N = size
    rng = np.random.default_rng(seed)
    pairs = places(rng, P, S, K or 1, N)
    row_map = map_of(pairs, S, K, N)
    row_map = row_map.inverse if back else row_map
    values = rng.normal(size=row_map.row.shape).astype(np.float32)
    d_out = rng.normal(size=row_map.source.shape).astype(np.float32)
    out, pull = jax.vjp(lambda values: move_values(values, row_map), values)
    (d_values,) = pull(jnp.asarray(d_out))
    want, d_want = np.zeros_like(d_out), np.zeros_like(values)
    for p, group in enumerate(pairs):
        there, here = group.T if back else group.T[::-1]
        want[p].reshape(-1)[there] = values[p].reshape(-1)[here]
        d_want[p].reshape(-1)[here] = d_out[p].reshape(-1)[there]
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(d_values, d_want)
    np.testing.assert_array_equal(holds_token(row_map.source), move_values(values * 0 + 1, row_map))


def test_nan_without_a_place_reaches_nothing_and_gradients_are_gathers():
    """Rows, weights and cotangents of what has no place; a row may be given where there is none (index >= N)."""
    row_map = RowMap(jnp.asarray([[1, -1], [9, 0], [-1, -1]]), jnp.asarray([3, 0, -1]))
    x = jnp.ones((3, 2)).at[2].set(jnp.nan)
    weights = jnp.asarray([1.0, 2.0, jnp.nan])

    def run(x, weights, d_out):
        out, pull = jax.vjp(lambda x, w: move_rows(x, row_map, w), x, weights)
        return out, *pull(d_out)

    out, d_x, d_weights = run(x, weights, jnp.ones((3, 2)).at[2].set(jnp.nan))
    assert out[:, 0].tolist() == [1, 2, 0]
    assert d_x[:, 0].tolist() == [2, 1, 0]
    assert d_weights.tolist() == [2, 2, 0]
    text = str(jax.make_jaxpr(run)(x, weights, x))
    assert "gather" in text and "scatter" not in text


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, m, w: move_rows(x[:-1], m), ValueError, r"x.shape=\(2, 4\), map: \(3,\)"),
        (lambda x, m, w: move_rows(x, m.inverse), ValueError, r"map: \(5,\)"),
        (lambda x, m, w: move_rows(x[0], m), ValueError, r"x.shape=\(4,\)"),
        (lambda x, m, w: move_rows(x, m, w[:-1]), ValueError, r"weights.shape=\(4,\), map: \(5,\)"),
        (lambda x, m, w: move_rows(x, m, w > 0), TypeError, "dtype=bool"),
        (lambda x, m, w: move_values(w, m), ValueError, r"values.shape=\(5,\), map: \(3, 2\)"),
    ],
)
def test_errors(call, error, words):
    row_map = RowMap(jnp.zeros((3, 2), jnp.int32), jnp.zeros(5, jnp.int32))
    with pytest.raises(error, match=f"^move_(rows|values): .*{words}"):
        call(jnp.ones((3, 4)), row_map, jnp.ones(5))
