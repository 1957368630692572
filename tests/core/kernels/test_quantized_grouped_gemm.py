"""The kernels of the quantized grouped GEMMs on a GPU, against float64 loops over dequantized numbers.

Those for later GPUs run on Hopper too.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import (
    E4M3,
    E5M2,
    KINDS,
    error_of,
    paired,
    quantized,
    run_twice,
)
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

# Rows, contraction, width, groups, padding rows; no size is a multiple of a tile.
FEW, MANY = (1000, 512, 784, 5, 137), (2000, 384, 1152, 40, 100)
SMALL = 300, 160, 288, 3, 41  # for Triton's interpreter
CASES = [
    *((kind, MANY) for kind in KINDS if "e5m2" not in kind),
    *((kind, FEW) for kind in KINDS if kind != "blocks of 32"),  # 784 does not consist of them
    *((kind, SMALL) for kind in KINDS if "e5m2" not in kind),
]


def _sizes(rng, C, G, dead, multiple=1):
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32) // multiple * multiple
    sizes[1] = 0  # an empty group
    return sizes, np.cumsum(sizes) - sizes


def _poisoned(x, first):
    """NaN from row `first` on, which must reach nothing."""
    x = x.copy()
    x[:, first:] = np.nan
    return x


def _blocks(along, forward=True):
    """Of the rows and of the weight."""
    if not along:
        return (), ()
    of_weight = {32: (1, 32, 1) if forward else (1, 1, 32), 128: (1, 128, 128)}[along]
    return (1, 1, along), of_weight


pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("capability")]


@pytest.mark.parametrize(
    "which, kind, shape",
    [("fprop", *case) for case in CASES]
    + [("dgrad", *case) for case in CASES if case[1] != FEW]
    + [("fprop, split", *case) for case in CASES if case[0] == "tensors"],
    ids=str,
)
def test_rows(which, kind, shape):
    C, K, N, G, dead = shape
    along, dtypes, _ = KINDS[kind]
    rng = np.random.default_rng(C)
    sizes, starts = _sizes(rng, C, G, dead)
    forward, splits = which != "dgrad", "split" in which
    of_rows, of_weight = _blocks(along, forward)
    x, x_scale, x_wide = quantized(rng, (1, C, K if forward else N), of_rows, dtypes[0], (1, G))
    w, w_scale, w_wide = quantized(rng, (G, K, N), of_weight, dtypes[1], (G,))
    want = np.zeros((C, N if forward else K))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows, weight = slice(start, start + size), w_wide[g] if forward else w_wide[g].T
        factor = 1 if along else float(x_scale[0, g]) * float(w_scale[g])
        want[rows] = x_wide[0, rows] @ weight * factor
    live = sizes.sum()
    got = run_twice(
        (grouped_gemm_op if forward else grouped_gemm_dgrad_op),
        (
            _poisoned(x, live),
            _poisoned(x_scale, live) if along else x_scale,
            w,
            w_scale,
            sizes[None],
        ),
        blocks=(of_rows, of_weight),
        splits=splits,
        clear_padding=True,
    )[0]
    assert relative_error(got, want) < error_of(kind, forward and not splits)
    assert not got[live:].any()


# A long contraction of numbers of one sign, of which the tensor cores lose the most.
@pytest.mark.parametrize("along", [0, 128])
@pytest.mark.parametrize("which", ["fprop, split", "dgrad", "wgrad"])
def test_a_long_sum_loses_no_more_than_one_of_blocks(which, along):
    C, K, N = (2048, 128, 128) if which == "wgrad" else (64, 2048, 128)
    rng = np.random.default_rng(0)
    row, down, square = ((1, 1, 128), (1, 128, 1), (1, 128, 128)) if along else ((), (), ())
    first, second, blocks, product, op = {
        "fprop, split": ((1, C, K), (1, K, N), (row, square), "crk,ckn->crn", grouped_gemm_op),
        "dgrad": ((1, C, K), (1, N, K), (row, square), "crk,cnk->crn", grouped_gemm_dgrad_op),
        "wgrad": ((1, C, K), (1, C, N), (down, down), "crk,crn->ckn", grouped_gemm_wgrad_op),
    }[which]
    operands, wide = [], []
    for shape, block in zip((first, second), blocks, strict=True):
        x = np.asarray(jnp.asarray(rng.uniform(0.5, 4, shape), jnp.float32).astype(E4M3))
        of_groups = (1,) if shape is second and which != "wgrad" else (1, 1)
        counts = [-(-n // b) for n, b in zip(shape, block, strict=True)] if along else of_groups
        operands += [x, np.ones(counts, np.float32)]
        wide.append(x.astype(np.float64))
    options = dict(num_experts=1) if which == "wgrad" else {}
    sizes, splits = np.array([[C]], np.int32), "split" in which and not along
    got = run_twice(op, (*operands, sizes), blocks=blocks, splits=splits, **options)
    # Each product is cut to 13 bits of its sum: of 128 in a row 3.1e-4 is lost, of 2048 3.5e-2 (NVIDIA H200).
    assert relative_error(got, np.einsum(product, *wide)) < 4e-4


TOKENS = [
    (*of, kind, out)
    for of in (("fprop", FEW), ("fprop", MANY), ("fprop", SMALL), ("dgrad", MANY))
    for kind in ("blocks of 128", "blocks of 128, e5m2")
    for out in ("bfloat16", "float32")
]
# Written first, for the kernels of all rows.
TOKENS += [(which, MANY, "blocks of 32", "bfloat16") for which in ("fprop", "dgrad")]


@pytest.mark.parametrize("which, shape, kind, out", TOKENS, ids=str)
def test_rows_where_their_tokens_are(which, shape, kind, out):
    """Some rows hold no token, which NaN in the last one shows; rows past the groups are of that one."""
    C, K, N, G, dead = shape
    along, dtypes, error = KINDS[kind]
    rng = np.random.default_rng(C + 1)
    sizes, starts = _sizes(rng, C, G, dead)
    live, forward, T = sizes.sum(), which == "fprop", 90
    of_rows, of_weight = _blocks(along, forward)
    x, x_scale, x_wide = quantized(rng, (1, T, K if forward else N), of_rows, dtypes[0])
    w, w_scale, w_wide = quantized(rng, (G, K, N), of_weight, dtypes[1])
    source = rng.integers(0, T - 1, C).astype(np.int32)
    source[5::7], source[live:] = -1, T - 1
    rows = np.where(source[:, None] >= 0, x_wide[0, source], 0)
    want = np.zeros((C, N if forward else K))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        of_group = slice(start, start + size)
        want[of_group] = rows[of_group] @ (w_wide[g] if forward else w_wide[g].T)
    op = grouped_gemm_op if forward else grouped_gemm_dgrad_op

    def gemm(tokens, weight, sizes, source, **options):
        row_map = RowMap(jnp.zeros((1, T), jnp.int32), source)
        return op(Moved(tokens, row_map), weight, sizes, **options)

    operands = _poisoned(x, T - 1), _poisoned(x_scale, T - 1), w, w_scale, sizes[None], source[None]
    options = dict(blocks=(of_rows, of_weight), clear_padding=True)
    got = run_twice(gemm, operands, out, **options)[0].astype(np.float64)
    assert relative_error(got, want) < error + 2e-3 * (out == "bfloat16")
    assert not got[live:].any() and not got[source < 0].any()


# Columns of one operand that end within a tile of 128 and of 256, groups that begin at any row, and whole ones.
WIDE_GROUPS = (
    (700, 784, 272, 7, 41),
    (3000, 256, 512, 3, 24),
    (90, 128, 256, 2, 10),
    (300, 128, 1600, 3, 20),
)
OF_TOKENS = [
    (shape, moved, out)
    for shape in WIDE_GROUPS
    for moved, out in (
        ("lhs", "bfloat16"),
        ("lhs", "float32"),
        ("dy", "bfloat16"),
        ("dy", "float16"),
    )
] + [(WIDE_GROUPS[0], "dy", "float32")]  # no kernel has these where their tokens are


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("shape, moved, out", OF_TOKENS, ids=str)
def test_weight_gradient_of_tokens(shape, moved, out, multiple):
    """Rows of tokens with one scale, some of them none, and others in groups; NaN in what no row is, and in a group."""
    C, K, N, G, dead = shape
    rng = np.random.default_rng(C)
    sizes, starts = _sizes(rng, C, G, dead, multiple)
    live, T = sizes.sum(), 90
    of_lhs, of_dy = (E4M3, E5M2)
    width, of_tokens, other_width, of_other = K, of_lhs, N, of_dy
    if moved == "dy":
        width, of_tokens, other_width, of_other = N, of_dy, K, of_lhs
    x, _, x_wide = quantized(rng, (1, T, width), (), of_tokens, (1, 1))
    y, y_scale, y_wide = quantized(rng, (1, C, other_width), (), of_other, (1, G))
    source = rng.integers(0, T - 1, C).astype(np.int32)
    source[5::7], source[live:] = -1, T - 1
    y = y.copy()
    x_scale, broken = np.full((1, G), 0.3, np.float32), int(np.argmax(sizes))
    y[0, starts[broken]] = np.nan
    row_map = RowMap(jnp.zeros((1, T), jnp.int32), jnp.asarray(source[None]))

    def gemm(tokens, rows, sizes, **options):
        rows, tokens = (dataclasses.replace(q, group_sizes=sizes) for q in (rows, tokens))
        operands = Moved(tokens, row_map), rows
        options |= dict(num_experts=G)
        return grouped_gemm_wgrad_op(*operands[:: 1 if moved == "lhs" else -1], sizes, **options)

    operands = _poisoned(x, T - 1), x_scale, _poisoned(y, live), y_scale, sizes[None]
    got = run_twice(gemm, operands, out, blocks=((), ())).astype(np.float64)
    rows = np.where(source[:, None] >= 0, x_wide[0, source], 0) * float(x_scale[0, 0])
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        of_group = slice(start, start + size)
        want = rows[of_group].T @ (y_wide[0, of_group] * float(y_scale[0, g]))
        want = want if moved == "lhs" else want.T
        if g == broken:
            assert np.isnan(got[g]).any()
        elif size:
            assert relative_error(got[g], want) < (2e-4 if out == "float32" else 5e-3)
        else:
            assert not got[g].any()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_that_are_not_cleared_change_no_other(kind):
    C, K, N, G, dead = MANY
    along, dtypes, _ = KINDS[kind]
    rng = np.random.default_rng(0)
    sizes, _ = _sizes(rng, C, G, dead)
    of_rows, of_weight = _blocks(along)
    x, x_scale, _ = quantized(rng, (1, C, K), of_rows, dtypes[0], (1, G))
    w, w_scale, _ = quantized(rng, (G, K, N), of_weight, dtypes[1], (G,))
    operands = [jnp.asarray(a) for a in (x, x_scale, w, w_scale, sizes[None])]
    operands = paired(operands, (of_rows, of_weight))
    options = dict(out_dtype=jnp.dtype("bfloat16"), implementation="triton")
    op, live = grouped_gemm_op, sizes.sum()
    written, left = (op(*operands, clear_padding=clear, **options) for clear in (True, False))
    np.testing.assert_array_equal(*(np.asarray(y[0, :live], np.float32) for y in (written, left)))


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("G", [8, 200])  # groups of many rows, and of few
@pytest.mark.parametrize("kind", ["tensors", "tensors, e5m2"])
def test_rows_of_several_rounds_of_tiles(kind, G, out):
    """Each tile is multiplied by the scales of its own group, while the one before it is still stored."""
    C, K, N = 12000, 160, 784
    _, dtypes, _ = KINDS[kind]
    error = error_of(kind, True)
    rng = np.random.default_rng(G)
    sizes, starts = _sizes(rng, C, G, 60)
    x, x_scale, x_wide = quantized(rng, (1, C, K), (), dtypes[0], (1, G))
    w, w_scale, w_wide = quantized(rng, (G, K, N), (), dtypes[1], (G,))
    live = sizes.sum()
    operands = _poisoned(x, live), x_scale, w, w_scale, sizes[None]
    options = dict(blocks=((), ()), out_dtype=np.dtype(out), clear_padding=True)
    got = run_twice(grouped_gemm_op, operands, **options)[0]
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        want = x_wide[0, rows] @ w_wide[g] * (float(x_scale[0, g]) * float(w_scale[g]))
        assert relative_error(got[rows], want) < max(error, 4e-3 if out == "bfloat16" else 0)
    assert not got[live:].any()


def test_zeros_stay_zeros_where_the_product_of_scales_is_not_finite():
    rng = np.random.default_rng(0)
    x, _, _ = quantized(rng, (1, 300, 256), (), E4M3, (1, 2))
    w, _, _ = quantized(rng, (2, 256, 128), (), E4M3, (2,))
    x = x.copy()
    x[0, 7] = 0
    operands = x, np.full((1, 2), 1e30, np.float32), w, np.full(2, 1e20, np.float32)
    sizes = np.array([[131, 140]], np.int32)
    options = dict(blocks=((), ()), clear_padding=True)
    got = run_twice(grouped_gemm_op, (*operands, sizes), **options)[0]
    assert not got[7].any()
    assert not np.isnan(got).any()


@pytest.mark.parametrize("kind, shape", CASES, ids=str)
def test_weight_gradients(kind, shape):
    C, K, N, G, dead = shape
    along, dtypes, error = KINDS[kind]
    rng = np.random.default_rng(C)
    # Few groups start with a block, as they must; where many do not, that does no harm.
    sizes, starts = _sizes(rng, C, G, dead, along if along and shape == FEW else 1)
    block = (1, along, 1) if along else ()
    x, x_scale, x_wide = quantized(rng, (1, C, K), block, dtypes[1], (1, G))
    dy, dy_scale, dy_wide = quantized(rng, (1, C, N), block, dtypes[0], (1, G))
    want = np.zeros((G, K, N))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        factor = 1 if along else float(x_scale[0, g]) * float(dy_scale[0, g])
        want[g] = x_wide[0, rows].T @ dy_wide[0, rows] * factor
    live = sizes.sum()
    if along:
        x_scale, dy_scale = (_poisoned(scale, -(-live // along)) for scale in (x_scale, dy_scale))
    got = run_twice(
        grouped_gemm_wgrad_op,
        (_poisoned(x, live), x_scale, _poisoned(dy, live), dy_scale, sizes[None]),
        num_experts=G,
        blocks=(block, block),
    )
    assert relative_error(got, want) < error
    assert not got[1].any(), "the empty group has a gradient"


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [0, 1, 1440])
@pytest.mark.parametrize("along", [0, 128])
def test_weight_gradients_of_many_groups(along, num_rows, out):
    """Of most groups few rows or none, in blocks that several share; their table leaves less room for loads."""
    C, K, N, G = 1500, 160, 272, 600
    rng = np.random.default_rng(num_rows)
    sizes = rng.multinomial(num_rows, rng.dirichlet([0.05] * G)).astype(np.int32)
    block = (1, along, 1) if along else ()
    x, x_scale, x_wide = quantized(rng, (1, C, K), block, E4M3, (1, G))
    dy, dy_scale, dy_wide = quantized(rng, (1, C, N), block, E5M2, (1, G))
    want = np.zeros((G, K, N))
    for g, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        factor = 1 if along else float(x_scale[0, g]) * float(dy_scale[0, g])
        want[g] = x_wide[0, start : start + size].T @ dy_wide[0, start : start + size] * factor
    got = run_twice(
        grouped_gemm_wgrad_op,
        (_poisoned(x, num_rows), x_scale, _poisoned(dy, num_rows), dy_scale, sizes[None]),
        num_experts=G,
        blocks=(block, block),
        out_dtype=np.dtype(out),
    )
    assert not got[sizes == 0].any(), "groups without rows have gradients"
    for g in np.flatnonzero(sizes):
        assert relative_error(got[g], want[g]) < (1e-2 if out == "bfloat16" else 1e-3)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("G", [8, 100])  # groups of many steps, and of one
def test_weight_gradients_of_several_rounds_of_tiles(G, out):
    """A result leaves in pieces during the next tile, which has enough steps for them or not."""
    C, K, N = 6000, 784, 1296
    rng = np.random.default_rng(G)
    sizes, starts = _sizes(rng, C, G, 60)
    x, x_scale, x_wide = quantized(rng, (1, C, K), (), E4M3, (1, G))
    dy, dy_scale, dy_wide = quantized(rng, (1, C, N), (), E5M2, (1, G))
    live = sizes.sum()
    got = run_twice(
        grouped_gemm_wgrad_op,
        (_poisoned(x, live), x_scale, _poisoned(dy, live), dy_scale, sizes[None]),
        num_experts=G,
        blocks=((), ()),
        out_dtype=np.dtype(out),
    )
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        want = x_wide[0, rows].T @ dy_wide[0, rows] * (float(x_scale[0, g]) * float(dy_scale[0, g]))
        assert relative_error(got[g], want) < (4e-3 if out == "bfloat16" else 2e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_groups_gradient(value):
    """Of groups that begin and end anywhere, many within one instruction's rows."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 40, 60).astype(np.int32)
    ends, G = np.cumsum(sizes), len(sizes)
    x, x_scale, _ = quantized(rng, (1, ends[-1], 160), (), E5M2, (1, G))
    dy, dy_scale, _ = quantized(rng, (1, ends[-1], 272), (), E4M3, (1, G))
    x = x.copy()
    hit = [7, 8, 31]
    for g in hit:
        x[0, ends[g] - sizes[g] : ends[g]] = value
    operands = x, x_scale, dy, dy_scale, sizes[None]
    got = run_twice(grouped_gemm_wgrad_op, operands, num_experts=G, blocks=((), ()))
    assert not np.isfinite(got[hit]).any()
    assert np.isfinite(np.delete(got, hit, axis=0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    rng = np.random.default_rng(0)
    x, x_scale, _ = quantized(rng, (1, 300, 256), (1, 1, 128), E5M2)
    w, w_scale, _ = quantized(rng, (2, 256, 128), (1, 128, 128), E4M3)
    x = x.copy()
    x[0, 130, 7] = value
    sizes = np.array([[131, 140]], np.int32)
    options = {"blocks": ((1, 1, 128), (1, 128, 128)), "clear_padding": True}
    got = run_twice(grouped_gemm_op, (x, x_scale, w, w_scale, sizes), **options)[0]
    assert not np.isfinite(got[130]).any()
    assert np.isfinite(np.delete(got, 130, axis=0)).all()
