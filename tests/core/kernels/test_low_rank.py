"""Terms of low rank in the kernels of grouped GEMMs, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import KINDS, error_of, paired, quantized
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_low_rank_op,
    grouped_gemm_dgrad_op,
    grouped_gemm_low_rank_op,
    grouped_gemm_op,
)
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]

OPS = {"forward": grouped_gemm_low_rank_op, "input gradient": grouped_gemm_dgrad_low_rank_op}
WITHOUT = {"forward": grouped_gemm_op, "input gradient": grouped_gemm_dgrad_op}
RANKS = (3, 8, 16, 24, 32, 64, 100, 128)
# Rows, contraction, width, groups, padding rows; none is a multiple of a tile.
SHAPE = 1000, 512, 784, 5, 137
SMALL_GROUPS = 1200, 384, 1360, 20, 30  # on Hopper the tiles of small groups
LONG = 200, 8208, 144, 3, 20  # on Hopper the kernels of long contractions, where rows have 16 bits
FEW = 100, 80, 48, 4, 30  # for Triton's interpreter


def _groups(C, G, dead):
    rng = np.random.default_rng(C)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[1] = 0  # an empty group
    return rng, sizes


def _term(rng, which, shape, rank, live, dtype, scale=1.0):
    """u [1, C, rank], NaN in padding rows, and B [G, rank, W], or A [G, W, rank] of an input gradient."""
    C, _, W, G, _ = shape
    u = rng.normal(size=(1, C, rank)) * scale
    u[:, live:] = np.nan  # must reach nothing
    b = rng.normal(size=(G, rank, W) if which == "forward" else (G, W, rank))
    return [jnp.asarray(x, dtype) for x in (u, b)]


def _product(which, rows, weight, sizes):
    """Rows [C, D] times [G, D, W], or [G, W, D] of an input gradient, in float64; 0 in padding rows."""
    rows, weight = np.asarray(rows, np.float64), np.asarray(weight, np.float64)
    weight = weight if which == "forward" else np.swapaxes(weight, 1, 2)
    out = np.zeros((rows.shape[0], weight.shape[2]))
    first = 0
    for g, size in enumerate(sizes):
        out[first : first + size] = rows[first : first + size] @ weight[g]
        first += size
    return out


def _plain(which, shape, dtype):
    """Rows [1, C, D], NaN in padding rows, and the weight."""
    C, D, W, G, dead = shape
    rng, sizes = _groups(C, G, dead)
    rows = rng.normal(size=(1, C, D))
    rows[:, sizes.sum() :] = np.nan
    weight = rng.normal(size=(G, D, W) if which == "forward" else (G, W, D))
    return rng, sizes, jnp.asarray(rows, dtype), jnp.asarray(weight, dtype)


def _run(which, *operands, out_dtype="float32"):
    """Twice the same."""
    options = dict(implementation="triton", out_dtype=jnp.dtype(out_dtype), clear_padding=True)
    run = jax.jit(lambda *z: OPS[which](*z, **options)[0])
    got, again = (np.asarray(run(*operands), np.float64) for _ in range(2))
    np.testing.assert_array_equal(got, again)
    return got


def _check(got, product, term, live, error):
    """The term alone is right too: its error counts beside its own size."""
    assert relative_error(got, product + term) < error
    assert relative_error(got - product, term) < 3 * error
    assert not got[live:].any()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", [SHAPE, SMALL_GROUPS, LONG], ids=str)
@pytest.mark.parametrize("which", OPS)
def test_plain_rows(which, shape, rank):
    dtype = "float16" if rank == 16 else "bfloat16"
    rng, sizes, rows, weight = _plain(which, shape, dtype)
    live = sizes.sum()
    u, b = _term(rng, which, shape, rank, live, dtype, scale=(shape[1] / rank) ** 0.5)
    got = _run(which, rows, weight, jnp.asarray(sizes[None]), u, b)
    product, term = (_product(which, x[0], w, sizes) for x, w in ((rows, weight), (u, b)))
    _check(got, product, term, live, 2e-5)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("rank", [8, 40])
@pytest.mark.parametrize("which", OPS)
def test_few_plain_rows(which, rank):
    """By kernels of all GPUs."""
    rng, sizes, rows, weight = _plain(which, FEW, "float16")
    live = sizes.sum()
    u, b = _term(rng, which, FEW, rank, live, "float16")
    got = _run(which, rows, weight, jnp.asarray(sizes[None]), u, b)
    product, term = (_product(which, x[0], w, sizes) for x, w in ((rows, weight), (u, b)))
    _check(got, product, term, live, 2e-5)


@pytest.mark.parametrize("rank", [8, 40])
@pytest.mark.parametrize("which", OPS)
def test_moved_rows(which, rank):
    """The rows are read where they are, the term's not."""
    C, D, W, G, dead = shape = FEW
    rng, sizes, base, weight = _plain(which, shape, "float16")
    live = sizes.sum()
    base = jnp.nan_to_num(base)
    source = rng.permutation(C).astype(np.int32)
    source[live:] = -1
    source[3] = -1  # a row without a token
    row = np.zeros((C, 1), np.int32)
    row[source[source >= 0], 0] = np.flatnonzero(source >= 0)
    moved = Moved(base, RowMap(jnp.asarray(row[None]), jnp.asarray(source[None])))
    u, b = _term(rng, which, shape, rank, live, "float16")
    got = _run(which, moved, weight, jnp.asarray(sizes[None]), u, b)
    rows = np.where((source >= 0)[:, None], np.asarray(base[0], np.float64)[source], 0)
    product, term = (_product(which, x, w, sizes) for x, w in ((rows, weight), (u[0], b)))
    _check(got, product, term, live, 2e-5)


def _check_quantized(which, kind, shape, rank, dtype):
    along, dtypes, _ = KINDS[kind]
    C, D, W, G, dead = shape
    rng, sizes = _groups(C, G, dead)
    live, forward = sizes.sum(), which == "forward"
    of_weight = {0: (), 32: (1, 32, 1) if forward else (1, 1, 32), 128: (1, 128, 128)}[along]
    of_rows = (1, 1, along) if along else ()
    x, x_scale, x_wide = quantized(rng, (1, C, D), of_rows, dtypes[0], (1, G))
    shape_of_weight = (G, D, W) if forward else (G, W, D)
    w, w_scale, w_wide = quantized(rng, shape_of_weight, of_weight, dtypes[1], (G,))
    if (
        along != 32
    ):  # whose scales are bytes; a term in float16 must hold numbers of the result's size
        x_scale, x_wide = x_scale * np.float32(2**-10), x_wide * (2**-10 if along else 1)
    x = x.copy()
    x[:, live:] = np.nan
    product = _product(which, x_wide[0], w_wide, sizes)
    if along:
        x_scale = x_scale.copy()
        x_scale[:, live:] = np.nan
    else:
        factors = np.repeat(x_scale[0].astype(np.float64) * w_scale, sizes)
        product[:live] *= factors[:, None]
    size = np.sqrt(np.mean(product[:live] ** 2))
    u, b = _term(rng, which, shape, rank, live, dtype, scale=size / rank**0.5)
    operands = [jnp.asarray(z) for z in (x, x_scale, w, w_scale, sizes[None])]
    got = _run(which, *paired(operands, (of_rows, of_weight)), u, b)
    # Of float16 one kernel rounds the term to bfloat16.
    rounded = dtype == "float16" and along == 32
    error = 4e-3 if rounded else error_of(kind, forward)
    _check(got, product, _product(which, u[0], b, sizes), live, error)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", [SHAPE, SMALL_GROUPS], ids=str)
@pytest.mark.parametrize("kind", ["blocks of 128", "tensors"])
@pytest.mark.parametrize("which", OPS)
def test_quantized_rows(which, kind, shape, rank):
    _check_quantized(which, kind, shape, rank, "float16" if rank == 16 else "bfloat16")


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("rank", [8, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", OPS)
def test_few_quantized_rows(which, kind, rank):
    """By kernels of all GPUs."""
    _check_quantized(which, kind, (160, 160, 288, 3, 41), rank, "bfloat16")


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize("out", ["bfloat16", "float16"])
def test_results_of_16_bits_over_several_rounds_of_tiles(which, out):
    """The term of each tile is its own, while the one before it is still stored."""
    shape = 5000, 520, 4104, 6, 100
    rng, sizes, rows, weight = _plain(which, shape, out)
    live = sizes.sum()
    u, b = _term(rng, which, shape, 16, live, out, scale=5.0)
    got = _run(which, rows, weight, jnp.asarray(sizes[None]), u, b, out_dtype=out)
    want = sum(_product(which, x[0], w, sizes) for x, w in ((rows, weight), (u, b)))
    off, length = (np.linalg.norm(z[:live], axis=1) for z in (got - want, want))
    assert (off < float(jnp.finfo(out).eps) * length).all()
    assert not got[live:].any()


@pytest.mark.parametrize("which", OPS)
def test_a_term_of_zeros_changes_no_bit(which):
    rng, sizes, rows, weight = _plain(which, SHAPE, "bfloat16")
    u, b = _term(rng, which, SHAPE, 16, sizes.sum(), "bfloat16")
    options = dict(implementation="triton", out_dtype=jnp.dtype("bfloat16"), clear_padding=True)
    sizes = jnp.asarray(sizes[None])
    with_term = OPS[which](rows, weight, sizes, u, jnp.zeros_like(b), **options)
    alone = WITHOUT[which](rows, weight, sizes, **options)
    live = int(sizes.sum())
    got, want = (np.asarray(z[0, :live], np.float32) for z in (with_term, alone))
    np.testing.assert_array_equal(got, want)
