"""Grouped GEMM of rows through an index, for NVIDIA GPUs from compute capability 8.0.

As the forward and the input gradient of `grouped_gemm.py`, but a program copies its tile's rows by pointers, 128 bytes
of each a step. Dimension key as in `linear/gathered_gemm.py`; D the contraction, W the width of the result.
"""

import jax
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import Config
from expertmesh.core.kernels.choice.thin_gemm import ThinTiles
from expertmesh.core.kernels.low_rank import LowRank
from expertmesh.core.kernels.triton.grouped_gemm import (
    RANK_STEP,
    add_low_rank,
    banded_tile,
    group_of_tile,
    store_zero_rows,
    tiled,
    tiles_of_groups,
    weight_tile,
)


@triton.jit
def _add_product(
    acc, lhs, source, rhs, group, tile_n,
    T: tl.constexpr, D: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + the tile_n-th BN columns of lhs[source] @ rhs[group]; zeros are added where there is no such row."""
    there = ((source >= 0) & (source < T))[:, None]
    depth = tl.arange(0, BK)[None, :]
    at = lhs + source.to(tl.int64)[:, None] * D + depth
    for k in tl.range(0, (D + BK - 1) // BK):
        inside = there
        if D % BK != 0:
            inside = there & (k * BK + depth < D)
        a = tl.load(at + k * BK, mask=inside, other=0)
        w = weight_tile(rhs, group, k, tile_n, D, W, TRANSPOSED, BN, BK)
        acc = tl.dot(a, w, acc)
    return acc


@triton.jit
def _gathered_rows_kernel(
    lhs, index, rhs, group_sizes, u, b, out,
    T: tl.constexpr, ZEROS_END: tl.constexpr, D: tl.constexpr, W: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, TRANSPOSED: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[index[r]] @ rhs[group of r] (rhs [G, D, W], or [G, W, D] if TRANSPOSED), of lhs zeros where there
    is no such row, and `add_low_rank`'s; zeros in padding rows up to ZEROS_END."""
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (W + BN - 1) // BN

    # Not flattened: the index is read before the rows.
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        tile_m, tile_n = banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        acc = tl.zeros((BM, BN), tl.float32)
        # Before the places of the rows are in registers.
        acc = add_low_rank(
            acc, u, b, rows, end, tile_n * BN + tl.arange(0, BN), group, R, W, TRANSPOSED, BR
        )
        source = tl.load(index + rows, mask=rows < end, other=-1)
        acc = _add_product(acc, lhs, source, rhs, group, tile_n, T, D, W, TRANSPOSED, BN, BK)
        columns = tile_n * BN + tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * W + columns[None, :]
        live = (rows < end)[:, None] & (columns < W)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)
    store_zero_rows(out, tl.sum(size_G), ZEROS_END, W, BN, NUM_PROGRAMS)


def launch_rows(
    lhs, index, rhs, group_sizes, *,
    config: Config, out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None = None,
):  # fmt: skip
    """[T, D] at [C] x [G, D, W], or [G, W, D] if `transposed`, -> [C, W]; to which `low_rank` is added."""
    (C,), (T, D), G, tiles = index.shape, lhs.shape, group_sizes.shape[0], config.tiles
    W = rhs.shape[1] if transposed else rhs.shape[2]
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return launcher.triton_call(
        lhs, index, tiled(rhs, rhs_block, tiles), group_sizes, *(low_rank or (None, None)),
        kernel=_gathered_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        grid=(config.programs,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        T=T, ZEROS_END=C * clear_padding, D=D, W=W, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        R=low_rank.rank if low_rank else 0, BR=RANK_STEP,
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


@triton.jit
def _across_groups(turn, tiles_G, index_G, G_POW2: tl.constexpr):
    """The turn-th tile if each group's first ones are first, then the second ones, and so on; its number by groups."""
    low = 0
    high = tl.max(tiles_G)
    while low < high:  # the last round that begins at or before the turn
        middle = (low + high + 1) // 2
        before = tl.sum(tl.minimum(tiles_G, middle))
        low = tl.where(before <= turn, middle, low)
        high = tl.where(before <= turn, high, middle - 1)
    place = turn - tl.sum(tl.minimum(tiles_G, low))
    takes_part = tiles_G > low
    nth = tl.cumsum(takes_part.to(tl.int32), 0) - 1
    mine = takes_part & (nth == place)
    return tl.sum(tl.where(mine, tl.cumsum(tiles_G, 0) - tiles_G, 0)) + low


@triton.jit
def _thin_rows_kernel(
    lhs, index, rhs, group_sizes, out,
    T: tl.constexpr, ZEROS_END: tl.constexpr, D: tl.constexpr, W: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, NUM_TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `_gathered_rows_kernel` where the weights stay in L2: groups take turns, as their tokens are in one order, so
    that what they share of the tokens stays there too."""
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    turn = tl.program_id(0)
    if turn < tl.sum(tiles_G):
        tile_m = _across_groups(turn, tiles_G, index_G, G_POW2)
        group, row, end = group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        source = tl.load(index + rows, mask=rows < end, other=-1)
        acc = tl.zeros((BM, BN), tl.float32)
        acc = _add_product(acc, lhs, source, rhs, group, 0, T, D, W, TRANSPOSED, BN, BK)
        columns = tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * W + columns[None, :]
        live = (rows < end)[:, None] & (columns < W)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)
    store_zero_rows(out, tl.sum(size_G), ZEROS_END, W, BN, NUM_TILES)


def launch_thin_rows(
    lhs, index, rhs, group_sizes, *, tiles: ThinTiles, out_dtype, transposed: bool, clear_padding: bool
):  # fmt: skip
    """As `launch_rows`, of a width that one tile holds."""
    (C,), (T, D), G = index.shape, lhs.shape, group_sizes.shape[0]
    W = rhs.shape[1] if transposed else rhs.shape[2]
    num_tiles = C // tiles.m + G
    return launcher.triton_call(
        lhs, index, rhs, group_sizes,
        kernel=_thin_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        grid=(num_tiles,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        T=T, ZEROS_END=C * clear_padding, D=D, W=W, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        NUM_TILES=num_tiles, BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip
