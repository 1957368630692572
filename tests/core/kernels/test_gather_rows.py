"""The Triton kernel of gather_rows on a GPU, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.ops.gather_rows import copy_unsupported, gather_rows, sum_unsupported

# Groups, source rows, output rows, terms, features; rows that are no multiple of 16 bytes too.
SHAPES = [(1, 50, 70, 1, 512), (2, 33, 41, 2, 1001), (3, 130, 67, 8, 264), (1, 64, 9, 31, 2056)]


def _operands(P, S, N, K, D, dtype):
    """Rows of very different magnitude, weights without a row NaN, and a source row that no index names NaN."""
    rng = np.random.default_rng(S)
    src = rng.normal(size=(P, S, D)) * 2.0 ** rng.integers(-9, 9, (P, S, 1))
    index = rng.integers(-2, S + 2, (P, N, K))
    index[index == 1] = 2
    src[:, 1] = np.nan
    weight = np.where((index >= 0) & (index < S), rng.normal(size=index.shape), np.nan)
    return jnp.asarray(src, dtype), jnp.asarray(index, jnp.int32), jnp.asarray(weight, jnp.float32)


def _oracle(src, index, weight):
    src, weight = np.asarray(src, np.float64), np.asarray(weight, np.float64)
    out, most = (np.zeros((*index.shape[:2], src.shape[2])) for _ in range(2))
    for p, n, k in np.ndindex(index.shape):
        if 0 <= index[p, n, k] < src.shape[1]:
            term = weight[p, n, k] * src[p, index[p, n, k]]
            out[p, n] += term
            most[p, n] += abs(term)
    return out, most


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(sizes, dtype, weighted):
    src, index, weight = _operands(*sizes, dtype)
    given = (weight,) if weighted else ()
    assert (sum_unsupported if weighted else copy_unsupported)(src, index) is None
    run = jax.jit(gather_rows)
    out = run(src, index, *given)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(run(src, index, *given)))
    want, most = _oracle(src, np.asarray(index), weight if weighted else np.ones(index.shape))
    # A sum rounds to float32 after each term and to its dtype once.
    bound = sizes[3] * 2.0**-23 * most + float(jnp.finfo(dtype).eps) * abs(want)
    bound += float(jnp.finfo(dtype).smallest_subnormal)
    assert np.all(abs(np.asarray(out, np.float64) - want) <= bound)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2", "int32", "uint16"])
def test_copies_numbers_of_every_width_to_the_bit(dtype):
    rng = np.random.default_rng(0)
    bits = (
        rng.integers(0, 256, (1, 40, 2048), np.uint8) & 0xFB
    )  # no NaN: not every select keeps its bits
    src = jnp.asarray(bits.view(jnp.dtype(dtype)))
    index = jnp.asarray(rng.integers(-1, 41, (1, 99, 1)), jnp.int32)
    assert copy_unsupported(src, index) is None
    out = np.asarray(jax.jit(gather_rows)(src, index)).view(np.uint8)
    exists = (index[0] >= 0) & (index[0] < 40)
    want = np.where(exists, bits[0, np.clip(index[0, :, 0], 0, 39)], 0)
    np.testing.assert_array_equal(out[0], want)


@pytest.mark.parametrize(
    "shape, index, dtype, words",
    [
        ((1, 8, 64), (1, 9, 1), "float32", "512 bytes"),
        ((1, 8, 512), (1, 9, 33), "bfloat16", "at most 32"),
        ((1, 0, 512), (1, 9, 1), "bfloat16", "rows to read"),
        ((1, 8, 512), (1, 9, 2), "int32", "added"),
        ((1, 8, 512), (1, 9, 1), "float8_e8m0fnu", "zero"),
        ((1, 8, 512), (1, 9, 1), "float4_e2m1fn", "8, 16 or 32 bits"),
    ],
)
def test_what_the_kernel_refuses(shape, index, dtype, words):
    why = copy_unsupported if index[-1] == 1 else sum_unsupported
    assert words in why(*map(jax.ShapeDtypeStruct, (shape, index), (jnp.dtype(dtype), jnp.int32)))
