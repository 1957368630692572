"""Grouped GEMMs of 8-bit operands for NVIDIA GPUs from compute capability 8.9, group sizes read on the device.

From 10.0 on tensor cores take 8-bit operands whichever way these lie, and multiply blocks of 32 by their scales
themselves. Blocks of 128 and tensors are scaled in float32. Hopper, which runs these kernels too, has its own in
`cuda/quantized_grouped_gemm.py`. Dimension key as in `linear/grouped_gemm.py`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import Config, Tiles
from expertmesh.core.kernels.formats import scale_bytes
from expertmesh.core.kernels.low_rank import LowRank
from expertmesh.core.kernels.triton.grouped_gemm import (
    RANK_STEP,
    add_low_rank,
    banded_tile,
    group_of_tile,
    matrix_tile,
    rows_of,
    steps_of,
    store_zero_rows,
    tile_of_weights,
    tiled,
    tiles_of_groups,
    weight_tile,
)

FORMATS = {jnp.dtype("float8_e4m3fn"): "e4m3", jnp.dtype("float8_e5m2"): "e5m2"}


@triton.jit
def _product(a, b):
    """Of two scales; finite if they are, so that a sum of 0 stays 0."""
    product = a * b
    return tl.where(product == float("inf"), 3.4028234663852886e38, product)


@triton.jit
def _add_product(
    acc, a, a_scale, b, b_scale,
    ALONG: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """acc + a @ b: in blocks of 32 the scales are [BM, BK / 32] and [BN, BK / 32], in those of 128 [BM] and [BN].

    SPLITS: acc is not the tensor cores' accumulator."""
    if ALONG == 32:
        return tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
    elif ALONG == 128:
        # One scale after the other: their product may overflow.
        return acc + tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
    elif SPLITS:
        # With this option, which is for Hopper, the compiler does not make one of sum and product.
        return acc + tl.dot(a, b, max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _rows_kernel(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, u, b, out,
    C: tl.constexpr, ZEROS_END: tl.constexpr, D: tl.constexpr, W: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, LHS_FORMAT: tl.constexpr, RHS_FORMAT: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, TRANSPOSED: tl.constexpr, FLATTEN: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r] (rhs [G, D, W], or [G, W, D] if TRANSPOSED) and `add_low_rank`'s; zeros in
    padding rows up to ZEROS_END.

    Scales of blocks of ALONG: of rows [C, D / ALONG], of weights [G, D / ALONG, W / ACROSS], or the last two the other
    way around if TRANSPOSED. ALONG is 0 where groups have one: [G] each.
    """
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (W + BN - 1) // BN
    steps = steps_of(D, BK, num_m) if ALONG == 32 else (D + BK - 1) // BK
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        # What lies beyond the last row or column is not stored: any scale will do.
        some_rows = tl.minimum(rows, C - 1).to(tl.int64)
        some_columns = tl.minimum(columns, W - 1)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, steps):
            a = matrix_tile(lhs, row, k * BK, C, D, BM, BK, "any")
            w = weight_tile(rhs, group, k, tile_n, D, W, TRANSPOSED, BN, BK)
            a_scale, w_scale = _scales_of_step(
                lhs_scale, rhs_scale, group, some_rows, some_columns, k,
                D, W, ALONG, ACROSS, TRANSPOSED, BK,
            )  # fmt: skip
            acc = _add_product(acc, a, a_scale, w, w_scale, ALONG, LHS_FORMAT, RHS_FORMAT, SPLITS)
        if ALONG == 0:
            acc *= _product(tl.load(lhs_scale + group), tl.load(rhs_scale + group))
        acc = add_low_rank(acc, u, b, rows, end, columns, group, R, W, TRANSPOSED, BR)
        where = out + rows.to(tl.int64)[:, None] * W + columns[None, :]
        live = (rows < end)[:, None] & (columns < W)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)
    store_zero_rows(out, tl.sum(size_G), ZEROS_END, W, BN, NUM_PROGRAMS)


@triton.jit
def _scales_of_step(
    lhs_scale, rhs_scale, group, rows, columns, k,
    D: tl.constexpr, W: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Those of rows and columns for the k-th BK of the contraction; of nothing, 2^-127 or 0, beyond its end."""
    if ALONG == 0:
        return None, None
    else:
        num_blocks: tl.constexpr = (D + ALONG - 1) // ALONG
        width: tl.constexpr = (W + ACROSS - 1) // ACROSS
        if ALONG == BK:
            block = k
            of_rows = lhs_scale + rows * num_blocks
            across = columns // ACROSS
        else:
            block = k * (BK // ALONG) + tl.arange(0, BK // ALONG)[None, :]
            of_rows = lhs_scale + rows[:, None] * num_blocks
            across = (columns // ACROSS)[:, None]
        of_weight = rhs_scale + group.to(tl.int64) * (num_blocks * width)
        of_columns = (across * num_blocks + block) if TRANSPOSED else (block * width + across)
        inside = block < num_blocks
        return (
            tl.load(of_rows + block, mask=inside, other=0),
            tl.load(of_weight + of_columns, mask=inside, other=0),
        )


@triton.jit
def _weights_kernel(
    lhs_tiles, lhs_scale, dy_tiles, dy_scale, group_sizes, lhs, dy, out,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    ALONG: tl.constexpr, LHS_FORMAT: tl.constexpr, DY_FORMAT: tl.constexpr, SPLITS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g, with scales [C / ALONG, K or N], or [G] if ALONG is 0.

    BK rows at a time: whole blocks of all rows, or from the group's first row on.
    """
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    num_m: tl.constexpr = (K + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), G * num_m * num_n, NUM_PROGRAMS):
        group, tile_m, tile_n, start, end = tile_of_weights(
            tile, size_G, end_G, index_G, num_m, num_n
        )
        first = start // BK * BK if ALONG else start
        columns_m = tile_m * BM + tl.arange(0, BM)
        columns_n = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        whole = (start - first + BK - 1) // BK  # chunks that hold no row of another group
        beyond = tl.maximum((end - first) // BK, whole)
        for chunk in tl.range(whole, beyond):
            row = first + chunk * BK
            a = matrix_tile(lhs_tiles, row, tile_m * BM, end, K, BK, BM, "none", True)
            b = matrix_tile(dy_tiles, row, tile_n * BN, end, N, BK, BN, "none")
            a_scale = _scales_of_rows(lhs_scale, columns_m, row, start, end, K, ALONG, BK)
            b_scale = _scales_of_rows(dy_scale, columns_n, row, start, end, N, ALONG, BK)
            acc = _add_product(acc, a, a_scale, b, b_scale, ALONG, LHS_FORMAT, DY_FORMAT, SPLITS)
        # Rows of other groups are not loaded: they may hold NaN.
        if (start > first) & (end > start):
            acc = _add_part(
                acc, lhs, lhs_scale, dy, dy_scale, columns_m, columns_n, first, start, end,
                K, N, ALONG, LHS_FORMAT, DY_FORMAT, SPLITS, BK,
            )  # fmt: skip
        if first + beyond * BK < end:
            acc = _add_part(
                acc, lhs, lhs_scale, dy, dy_scale, columns_m, columns_n, first + beyond * BK, start, end,
                K, N, ALONG, LHS_FORMAT, DY_FORMAT, SPLITS, BK,
            )  # fmt: skip
        if ALONG == 0:
            acc *= _product(tl.load(lhs_scale + group), tl.load(dy_scale + group))
        where = out + (group.to(tl.int64) * K + columns_m)[:, None] * N + columns_n[None, :]
        inside = (columns_m < K)[:, None] & (columns_n < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_part(
    acc, lhs, lhs_scale, dy, dy_scale, columns_m, columns_n, row, start, end,
    K: tl.constexpr, N: tl.constexpr, ALONG: tl.constexpr, LHS_FORMAT: tl.constexpr, DY_FORMAT: tl.constexpr,
    SPLITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + the product of those of BK rows from `row` on that lie in [start, end)."""
    rows = row + tl.arange(0, BK)
    live = (rows >= start) & (rows < end)
    a, b = rows_of(lhs, rows, live, columns_m, K), rows_of(dy, rows, live, columns_n, N)
    a_scale = _scales_of_rows(lhs_scale, columns_m, row, start, end, K, ALONG, BK)
    b_scale = _scales_of_rows(dy_scale, columns_n, row, start, end, N, ALONG, BK)
    return _add_product(acc, a.T, a_scale, b, b_scale, ALONG, LHS_FORMAT, DY_FORMAT, SPLITS)


@triton.jit
def _scales_of_rows(
    scale, columns, row, start, end, WIDTH: tl.constexpr, ALONG: tl.constexpr, BK: tl.constexpr
):
    """Those of the blocks of BK rows from `row` on, for each column; of nothing for blocks without rows in
    [start, end), whose scales may be NaN."""
    if ALONG == 0:
        return None
    else:
        if ALONG == BK:
            at = row // ALONG * WIDTH + columns
            inside = columns < WIDTH
        else:
            first = row + ALONG * tl.arange(0, BK // ALONG)[None, :]
            at = first // ALONG * WIDTH + columns[:, None]
            inside = (first < end) & (first + ALONG > start) & (columns < WIDTH)[:, None]
        return tl.load(scale + at, mask=inside, other=0)


def rows_warps(tiles: Tiles, low_rank) -> int:
    """The warps of a program; of four a thread's registers hold its results, and no place of a term's operands."""
    return 8 if low_rank else tiles.warps


def launch_rows(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, *,
    config: Config, block: tuple[int, ...], out_dtype, transposed: bool, clear_padding: bool,
    low_rank: LowRank | None = None, splits: bool = False,
):  # fmt: skip
    """Rows [C, D] times weights [G, D, W], or [G, W, D] if `transposed`, in blocks of `block`, or without if (); to
    which `low_rank`, of 16 bits, is added. `splits`: the tensor cores do not add products of steps."""
    (C, D), G, tiles = lhs.shape, group_sizes.shape[0], config.tiles
    W = rhs.shape[1] if transposed else rhs.shape[2]
    along, across = (block[::-1] if transposed else block) or (0, 1)
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return launcher.triton_call(
        tiled(lhs, (tiles.m, tiles.k), tiles), scale_bytes(lhs_scale),
        tiled(rhs, rhs_block, tiles), scale_bytes(rhs_scale), group_sizes, *(low_rank or (None, None)),
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        grid=(config.programs,), num_warps=rows_warps(tiles, low_rank), num_stages=tiles.stages,
        C=C, ZEROS_END=C * clear_padding, D=D, W=W, G=G, G_POW2=triton.next_power_of_2(G), ALONG=along, ACROSS=across,
        LHS_FORMAT=FORMATS[lhs.dtype], RHS_FORMAT=FORMATS[rhs.dtype], TRANSPOSED=transposed,
        R=low_rank.rank if low_rank else 0, BR=RANK_STEP,
        FLATTEN=tiles.flat and along != 128 and not splits and low_rank is None,
        NUM_PROGRAMS=config.programs, SPLITS=splits, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


def launch_weights(
    lhs, lhs_scale, dy, dy_scale, group_sizes, *, config: Config, along: int, out_dtype, splits: bool = False,
):  # fmt: skip
    """[C, K] and [C, N], with scales of blocks of `along` rows, or of groups if it is 0 -> [G, K, N].

    `splits`: as of `launch_rows`."""
    K, N, G, tiles = lhs.shape[1], dy.shape[1], group_sizes.shape[0], config.tiles
    return launcher.triton_call(
        tiled(lhs, (tiles.k, tiles.m), tiles), scale_bytes(lhs_scale),
        tiled(dy, (tiles.k, tiles.n), tiles), scale_bytes(dy_scale), group_sizes, lhs, dy,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(config.programs,), num_warps=tiles.warps, num_stages=tiles.stages,
        K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G), ALONG=along,
        LHS_FORMAT=FORMATS[lhs.dtype], DY_FORMAT=FORMATS[dy.dtype], SPLITS=splits,
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip
