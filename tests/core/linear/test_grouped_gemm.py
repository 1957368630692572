"""grouped_gemm against loops over rows in float64: empty groups, blocks, participants, dtypes; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import covering
from expertmesh.core import grouped_gemm
from expertmesh.core.testing import magnitudes, relative_error


def data(sizes, rows, experts, k=5, n=(2, 3), seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.asarray(sizes, np.int32)
    lhs, rhs = magnitudes(rng, (len(sizes), rows, k)), magnitudes(rng, (experts, k, *n))
    bias, dy = rng.normal(size=(experts, *n)), rng.normal(size=(len(sizes), rows, *n))
    return lhs, rhs, sizes, bias.astype(np.float32), dy.astype(np.float32)


def oracle(lhs, rhs, sizes, bias, dy):
    """out and the three gradients, one row at a time."""
    lhs, rhs, bias, dy = (a.astype(np.float64) for a in (lhs, rhs, bias, dy))
    out, dlhs = np.zeros(dy.shape), np.zeros(lhs.shape)
    drhs, dbias = np.zeros(rhs.shape), np.zeros(bias.shape)
    P, G = sizes.shape
    for p in range(P):
        row = 0
        for g in range(G):
            expert = p % (len(rhs) // G) * G + g
            for _ in range(sizes[p, g]):
                out[p, row] = np.tensordot(lhs[p, row], rhs[expert], 1) + bias[expert]
                dlhs[p, row] = np.tensordot(rhs[expert], dy[p, row], dy.ndim - 2)
                drhs[expert] += np.multiply.outer(lhs[p, row], dy[p, row])
                dbias[expert] += dy[p, row]
                row += 1
    return out, dlhs, drhs, dbias


def value_and_gradients(lhs, rhs, sizes, bias, dy):
    out, pull = jax.vjp(lambda a, b, c: grouped_gemm(a, b, sizes, c), lhs, rhs, bias)
    return out, *pull(dy)


SIZES = {
    "one set": ([[3, 0, 4]], 10, 3),
    "all rows": ([[3, 0, 4]], 7, 3),
    "no rows": ([[0, 0, 0], [0, 0, 0]], 6, 3),
    "more than a block": ([[1, 300, 0, 140]], 500, 4),
    "two sets": ([[3, 2], [0, 5], [4, 0], [1, 1]], 6, 4),
    "one participant per set": ([[2], [0], [3], [1]], 3, 4),
}


@covering("name", SIZES, covers=["no rows", "more than a block", "two sets"])
def test_equals_loop(name):
    operands = data(*SIZES[name])
    for got, want in zip(jax.jit(value_and_gradients)(*operands), oracle(*operands), strict=True):
        assert relative_error(got, want) < 1e-6


def test_nan_stays_in_its_group():
    lhs, rhs, sizes, bias, dy = data([[3, 2, 2]], 9, 3)
    clean = value_and_gradients(lhs, rhs, sizes, bias, dy)
    lhs[0, 3] = np.nan
    out, dlhs, drhs, dbias = value_and_gradients(lhs, rhs, sizes, bias, dy)
    others = np.array([row for row in range(9) if row != 3])
    np.testing.assert_array_equal(out[:, others], clean[0][:, others])
    np.testing.assert_array_equal(dlhs, clean[1])
    np.testing.assert_array_equal(drhs[jnp.array([0, 2])], clean[2][jnp.array([0, 2])])
    np.testing.assert_array_equal(dbias, clean[3])


def test_without_participants_is_ragged_dot():
    lhs, rhs, sizes, *_ = data([[3, 0, 4]], 9, 3, n=(4,))
    got = grouped_gemm(lhs[0], rhs, sizes[0])
    want = jax.lax.ragged_dot(lhs[0], rhs, sizes[0])
    assert relative_error(got[:7], want[:7]) < 1e-6
    np.testing.assert_array_equal(got[7:], 0)


def test_out_dtype():
    lhs, rhs = jnp.ones((4, 257), jnp.bfloat16), jnp.ones((1, 257, 3), jnp.bfloat16)
    sizes = jnp.array([4])
    wide = grouped_gemm(lhs, rhs, sizes, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32 and grouped_gemm(lhs, rhs, sizes).dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide, np.full((4, 3), 257))


def test_gradients_of_float32_weights_are_not_rounded():
    """257 ones under bfloat16 rows."""
    lhs, rhs = jnp.ones((257, 2), jnp.bfloat16), jnp.ones((1, 2, 3), jnp.float32)
    loss = lambda rhs: grouped_gemm(lhs, rhs, jnp.array([257])).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.grad(loss)(rhs)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full((1, 2, 3), 257))


def test_products_of_nothing():
    """A contraction of length 0 is zeros, or the bias of each row's group; so are gradients of no rows."""
    lhs, rhs, sizes, bias, dy = data([[3, 0, 4]], 10, 3, k=0)
    for got, want in zip(
        value_and_gradients(lhs, rhs, sizes, bias, dy),
        oracle(lhs, rhs, sizes, bias, dy),
        strict=True,
    ):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-6)
    no_rows = data([[0, 0, 0]], 0, 3)
    for got, want in zip(value_and_gradients(*no_rows), oracle(*no_rows), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((2, 4, 5), (3, 5, 6), (2, 2)), ["multiple of the number of groups"]),
        (((2, 4, 5), (3, 7, 6), (2, 3)), ["transpose rhs"]),
        (((3, 4, 5), (4, 5, 6), (3, 2)), ["one P", "experts / groups"]),
        (((2, 4, 5), (3, 5), (2, 3)), ["[P, C, K]"]),
        (((4, 5), (4, 5, 6), (2,)), ["one group per expert", "add P"]),
        (((2, 4, 5), (3, 5, 6), (2, 3), (3, 5)), ["bias", "(3, 6)", "(3, 5)"]),
    ],
)
def test_errors(shapes, words):
    lhs, rhs, sizes, *bias = shapes
    with pytest.raises(ValueError) as info:
        grouped_gemm(
            jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(sizes, jnp.int32), *map(jnp.zeros, bias)
        )
    assert all(word in str(info.value) for word in ["grouped_gemm", *words])


def test_group_sizes_are_integers():
    with pytest.raises(
        TypeError, match="group_sizes must be an array of integers; got dtype=float32"
    ):
        grouped_gemm(jnp.zeros((4, 5)), jnp.zeros((2, 5, 6)), jnp.zeros(2))


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32"])
def test_sizes_of_any_width(dtype):
    """Their sums are those of 32 bits, in every pass."""
    sizes = np.array([100, 27, 73] if dtype.endswith("t8") else [100, 32700, 300])
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(sizes.sum(), 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, 8, 8)), jnp.float32)

    def passes(of):
        out, pull = jax.vjp(lambda x, w: grouped_gemm(x, w, jnp.asarray(sizes, of)), x, w)
        return out, *pull(jnp.ones_like(out))

    for got, want in zip(passes(dtype), passes("int32"), strict=True):
        np.testing.assert_array_equal(got, want)
