"""Grouped GEMM for NVIDIA GPUs from compute capability 9.0: persistent, group sizes read on the device, TMA loads.

Forward and input gradient are one kernel: C rows in G groups times each group's weight; Hopper has one of its own for
them, in CUDA C++ (`grouped_gemm.cu`). The weight gradient contracts over the rows of a group. Every byte of the outputs
is written, but for rows after the last group without `zero_rest`. Dimension key as in `ops/grouped_gemm.py`.

The TMA descriptors are parameters of the launch: a descriptor that the device makes needs scratch memory, and a launch
that allocates it cannot be part of a captured loop.
"""

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.cluster_order import cluster_order
from expertmesh.core.kernels.cuda_call import WGMMA_TYPES, cuda_call, nvrtc, source_text, wgmma
from expertmesh.core.kernels.gluon_call import gluon_call


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile, and how it is run."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8


@triton.jit
def _group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM: tl.constexpr):
    """The group of the tile_m-th tile of rows, its first row, and the end of its group."""
    group = tl.sum((last_tile_G <= tile_m).to(tl.int32))
    mine_G = index_G == group
    end = tl.sum(tl.where(mine_G, end_G, 0))
    size = tl.sum(tl.where(mine_G, size_G, 0))
    first_tile = tl.sum(tl.where(mine_G, last_tile_G - tiles_G, 0))
    return group, end - size + (tile_m - first_tile) * BM, end


@triton.jit
def _tiles_of_groups(group_sizes, G: tl.constexpr, G_POW2: tl.constexpr, BM: tl.constexpr):
    """Of each group its index, its rows, where they end, its tiles of up to BM rows, and where those end."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    tiles_G = (size_G + BM - 1) // BM
    return index_G, size_G, end_G, tiles_G, tl.cumsum(tiles_G, 0)


@triton.jit
def _banded_tile(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: those that run together share rows and columns, so that both stay in L2."""
    band = tile // (GROUP_M * num_n)
    band_m = min(num_m - band * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * num_n)
    return band * GROUP_M + within % band_m, within // band_m


@triton.jit
def _store_zero_rows(
    out, first, END: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """Zeros in the rows of `out` from `first` on, up to END."""
    zeros = tl.zeros((16, BN), out.dtype.element_ty)
    for start in tl.range(first + tl.program_id(0) * 16, END, NUM_PROGRAMS * 16):
        rows = start + tl.arange(0, 16)
        for column in tl.range(0, N, BN):
            columns = column + tl.arange(0, BN)
            where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(where, zeros, mask=(rows < END)[:, None] & (columns < N)[None, :])


@triton.jit
def _weight_tile(
    rhs_desc, group, k, tile_n, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The k-th BK of the contraction by the tile_n-th BN of the width of a group's weight, [G, W, D] if TRANSPOSED."""
    if TRANSPOSED:
        return rhs_desc.load([group, tile_n * BN, k * BK]).reshape(BN, BK).T
    else:
        return rhs_desc.load([group, k * BK, tile_n * BN]).reshape(BK, BN)


@triton.jit
def _rows_kernel(
    lhs_desc, rhs_desc, group_sizes, out,
    ZEROS_END: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r] (rhs [G, K, N], or [G, N, K] if TRANSPOSED); zeros after the last group, up to
    row ZEROS_END."""
    index_G, size_G, end_G, tiles_G, last_tile_G = _tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_live = tl.sum(size_G)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (N + BN - 1) // BN

    # Flattened with the loop over K: the next tile's loads run while this tile is stored.
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = _banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = _group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (K + BK - 1) // BK):
            a = lhs_desc.load([row, k * BK])
            b = _weight_tile(rhs_desc, group, k, tile_n, TRANSPOSED, BN, BK)
            acc = tl.dot(a, b, acc)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        live = (rows < end)[:, None] & (columns < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live, eviction_policy="evict_first")

    _store_zero_rows(out, num_live, ZEROS_END, N, BN, NUM_PROGRAMS)


@triton.jit
def _weights_kernel(
    lhs_desc, dy_desc, group_sizes, lhs, dy, out,
    C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g; tiles of BM x BN, BK rows at a time."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    num_m: tl.constexpr = (K + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), G * num_m * num_n, NUM_PROGRAMS):
        group = tile // (num_m * num_n)
        within = tile % (num_m * num_n)
        tile_m = within % num_m
        tile_n = within // num_m
        end = tl.sum(tl.where(index_G == group, end_G, 0))
        size = tl.sum(tl.where(index_G == group, size_G, 0))
        first = end - size
        columns_m = tile_m * BM + tl.arange(0, BM)
        columns_n = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, size // BK):
            a = lhs_desc.load([first + step * BK, tile_m * BM])
            b = dy_desc.load([first + step * BK, tile_n * BN])
            acc = tl.dot(a.T, b, acc)
        if size % BK != 0:  # rows of the next group are not loaded: they may hold NaN
            rows = first + size // BK * BK + tl.arange(0, BK)
            live = (rows < end)[:, None]
            wide = rows.to(tl.int64)[:, None]
            a = tl.load(
                lhs + wide * K + columns_m[None, :], mask=live & (columns_m < K)[None, :], other=0
            )
            b = tl.load(
                dy + wide * N + columns_n[None, :], mask=live & (columns_n < N)[None, :], other=0
            )
            acc = tl.dot(a.T, b, acc)
        where = out + (group.to(tl.int64) * K + columns_m)[:, None] * N + columns_n[None, :]
        inside = (columns_m < K)[:, None] & (columns_n < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _order(sizes, table, G: gl.constexpr, G_POW2: gl.constexpr, BK: gl.constexpr):
    """Fills the `table` of groups by rank, larger ones first: group, first row, end, and steps of BK in groups before.

    Returns how many groups have rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [gl.num_warps(), 1], [1, 0])
    index_G = gl.arange(0, G_POW2, gl.SliceLayout(1, layout))
    size_G = gl.load(sizes + index_G, mask=index_G < G, other=-1)
    rank_G = gl.zeros_like(index_G)
    start_G = gl.zeros_like(index_G)
    steps_G = gl.zeros_like(index_G)
    live = 0
    for first in range(0, G_POW2, 32):
        other = first + gl.arange(0, 32, gl.SliceLayout(0, layout))
        size = gl.load(sizes + other, mask=other < G, other=-1)
        live += gl.sum((size > 0).to(gl.int32), 0)
        earlier = other[None, :] < index_G[:, None]
        larger = size[None, :] > size_G[:, None]
        ahead = larger | (earlier & (size[None, :] == size_G[:, None]))
        rank_G += gl.sum(ahead.to(gl.int32), 1)
        start_G += gl.sum(gl.where(earlier, size[None, :], 0), 1)
        steps_G += gl.sum(gl.where(earlier, ((size + BK - 1) // BK)[None, :], 0), 1)
    table.index(0).scatter(index_G, rank_G, 0)
    table.index(1).scatter(start_G, rank_G, 0)
    table.index(2).scatter(start_G + size_G, rank_G, 0)
    table.index(3).scatter(steps_G, rank_G, 0)
    return live


@gluon.jit
def _entry(table, ROW: gl.constexpr, rank):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(table.index(ROW).gather(gl.full([1], rank, gl.int32, lane), 0), 0)


@gluon.jit
def _count(num_tiles, NUM_PROGRAMS: gl.constexpr, SPLIT: gl.constexpr):
    """How many tiles, or halves, this program has of so many."""
    waves = num_tiles // NUM_PROGRAMS
    rest = num_tiles % NUM_PROGRAMS
    if SPLIT:
        rest = gl.where(2 * rest <= NUM_PROGRAMS, 2 * rest, rest)
    return waves + (_place(waves, NUM_PROGRAMS) < rest).to(gl.int32)


@gluon.jit
def _place(i, NUM_PROGRAMS: gl.constexpr):
    """This program's place in the i-th wave: each second one is in reverse, as tiles go by size."""
    return gl.where(i % 2 == 0, gl.program_id(0), NUM_PROGRAMS - 1 - gl.program_id(0))


@gluon.jit
def _ranked(i, num_tiles, NUM_TILES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, SPLIT: gl.constexpr):
    """The rank of the group of this program's i-th tile, the tile's number in it, and which halves of its columns:
    the first one and how many. If SPLIT, what is left for a last wave is halved where that wave has room."""
    first = i * NUM_PROGRAMS
    place = _place(i, NUM_PROGRAMS)
    halved = 0
    if SPLIT:
        halved = (2 * (num_tiles - first) <= NUM_PROGRAMS).to(gl.int32)
    tile = first + (place >> halved)
    return tile // NUM_TILES, tile % NUM_TILES, place & halved, 2 - halved


@gluon.jit
def _banded(within, NUM_M: gl.constexpr, NUM_N: gl.constexpr, BAND: gl.constexpr):
    """Row and column of a tile of a group: those that run together share operands."""
    band = within // (BAND * NUM_N)
    band_m = gl.minimum(NUM_M - band * BAND, BAND)
    inner = within % (BAND * NUM_N)
    return band * BAND + inner % band_m, inner // band_m


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """For slots that are full and empty, and for results that are ready and room for them that is free."""
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    ready = mbarrier.allocate_mbarrier(batch=2)
    free = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return full, empty, ready, free


@gluon.jit
def _load_rows(
    lhs_desc, dy_desc, table, num_tiles, a_smem, b_smem, full, empty,
    NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role that loads: BK rows of both operands a step, as long as a slot is empty."""
    BYTES: gl.constexpr = lhs_desc.nbytes_per_cta + dy_desc.nbytes_per_cta
    step = 0
    for i in range(0, _count(num_tiles, NUM_PROGRAMS, True)):
        rank, within, half, halves = _ranked(i, num_tiles, NUM_M * NUM_N, NUM_PROGRAMS, True)
        tile_m, tile_n = _banded(within, NUM_M, NUM_N, BAND)
        column = tile_n * BN + half * (BN // 2)
        start, end = _entry(table, 1, rank), _entry(table, 2, rank)
        for first in range(start, end, BK):
            # The descriptors hold windows of BK rows: what lies beyond a window is TMA's zeros. The last one of a group
            # ends where the group ends, unless no window does.
            window = gl.maximum(gl.minimum(end - first, BK) + first - BK, 0)
            slot = step % STAGES
            # The halves of the columns lie one after the other.
            b = b_smem.index(slot)._reinterpret(dy_desc.dtype, [2, 1, BK, BN // 2], dy_desc.layout)
            at = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            if halves == 2:
                mbarrier.expect(at, BYTES + dy_desc.nbytes_per_cta)
                tma.async_load(dy_desc, [window, first - window, column + BN // 2], at, b.index(1))
            else:
                mbarrier.expect(at, BYTES)
            tma.async_load(lhs_desc, [window, first - window, tile_m * BM], at, a_smem.index(slot))
            tma.async_load(dy_desc, [window, first - window, column], at, b.index(0))
            step += 1


@gluon.jit
def _clear_rows(smem, live, BK: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the rows from `live` on, whatever they hold."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))
    for column in gl.static_range(0, WIDTH, 64):
        part = smem.slice(column, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < live)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _in_two(x):
    """The halves of the columns."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _hand_over(count, x, out_smem, ready, free):
    """Columns of a result to the role that stores, in pieces that fit into `out_smem`; `count` were handed over.

    Returns how many then are.
    """
    if x.shape[1] == out_smem.shape[1]:
        mbarrier.wait(free, (count & 1) ^ 1)
        out_smem.store(x.to(out_smem.dtype))
        mbarrier.arrive(ready)
        return count + 1
    else:
        left, right = _in_two(x)
        count = _hand_over(count, left, out_smem, ready, free)
        return _hand_over(count, right, out_smem, ready, free)


@gluon.jit
def _multiply_rows(
    table, num_tiles, a_smem, b_smem, out_smem, full, empty, ready, free, HALF: gl.constexpr,
    NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two roles that multiply: BM / 2 of a tile's rows."""
    step = 0
    count = 0
    for i in range(0, _count(num_tiles, NUM_PROGRAMS, True)):
        rank, _, _, halves = _ranked(i, num_tiles, NUM_M * NUM_N, NUM_PROGRAMS, True)
        start, end = _entry(table, 1, rank), _entry(table, 2, rank)
        if halves == 2:
            count = _multiply_tile(start, end, step, count, a_smem, b_smem, out_smem, full, empty, ready, free,
                                   HALF, BM, BN, BK, STAGES)  # fmt: skip
        else:
            count = _multiply_tile(start, end, step, count, a_smem, b_smem, out_smem, full, empty, ready, free,
                                   HALF, BM, BN // 2, BK, STAGES)  # fmt: skip
        step += (end - start + BK - 1) // BK


@gluon.jit
def _multiply_tile(
    start, end, step, count, a_smem, b_smem, out_smem, full, empty, ready, free, HALF: gl.constexpr,
    BM: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A role's part of the sum over the rows [start, end) for WIDTH columns of a tile, from the `step`-th step on."""
    BH: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros((BH, WIDTH), gl.float32, mma)
    for first in range(start, end, BK):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        a = a_smem.index(slot).reshape((BK, BM)).slice(HALF * BH, BH, dim=1)
        b = b_smem.index(slot).slice(0, WIDTH, dim=1)
        if end < BK:  # the rows of the next group, which may hold NaN, are in the window too
            _clear_rows(a, end - first, BK, BH)
            _clear_rows(b, end - first, BK, WIDTH)
            fence_async_shared()
        acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
        # One product stays under way; the slot of the one before it is free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        if first > start:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return _hand_over(count, acc, out_smem, ready, free)


@gluon.jit
def _store_piece(
    turn, staged, ready, free, out, row, end, column, W: gl.constexpr, ROWS: gl.constexpr
):
    """What the two roles hand over in turn to its place in [C, W], but for the rows from `end` on."""
    HEIGHT: gl.constexpr = staged.shape[1]
    WIDTH: gl.constexpr = staged.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [2, 1], [1, 0])
    role = turn % 2
    row += role * HEIGHT
    here = out + row.to(gl.int64) * W + column
    lines = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    inside = (columns < W - column)[None, :]
    where = lines[:, None] * W + columns[None, :]
    smem = staged.index(role)
    mbarrier.wait(ready.index(role), turn // 2 & 1)
    for first in gl.static_range(0, HEIGHT, ROWS):
        values = smem.slice(first, ROWS).load(layout)
        live = (lines < end - row - first)[:, None]
        gl.store(here + (where + first * W), values, mask=live & inside)
    mbarrier.arrive(free.index(role))


@gluon.jit
def _store_tiles(
    table, num_tiles, live, out, staged, ready, free, K: gl.constexpr, N: gl.constexpr,
    G: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The role that stores, while the next tile is multiplied; first, while the first one is, the zeros of the groups
    without rows."""
    _store_zeros(table, live, out, K, N, G, NUM_PROGRAMS)
    ROWS: gl.constexpr = 32 // (out.dtype.element_ty.primitive_bitwidth // 8)
    PIECE: gl.constexpr = staged.shape[2]
    turn = 0
    for i in range(0, _count(num_tiles, NUM_PROGRAMS, SPLIT)):
        rank, within, half, halves = _ranked(i, num_tiles, NUM_M * NUM_N, NUM_PROGRAMS, SPLIT)
        tile_m, tile_n = _banded(within, NUM_M, NUM_N, BAND)
        mine = out + _entry(table, 0, rank).to(gl.int64) * K * N
        first = tile_n * BN + half * (BN // 2)
        # Were the pieces unrolled, their addresses would not fit into registers.
        for part in range(0, halves * (BN // PIECE)):
            column = first + part // 2 * PIECE
            _store_piece(turn, staged, ready, free, mine, tile_m * BM, K, column, N, ROWS)
            turn += 1


@gluon.jit
def _store_zeros(
    table, live, out, K: gl.constexpr, N: gl.constexpr, G: gl.constexpr, NUM_PROGRAMS: gl.constexpr
):
    """The gradients of groups without rows, those of the last ranks: 8 rows of 256 columns at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    NUM_K: gl.constexpr = (K + 7) // 8
    NUM_N: gl.constexpr = (N + 255) // 256
    for part in range(gl.program_id(0), (G - live) * NUM_K * NUM_N, NUM_PROGRAMS):
        group = _entry(table, 0, live + part // (NUM_K * NUM_N))
        rows = part // NUM_N % NUM_K * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
        columns = part % NUM_N * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
        where = out + (group.to(gl.int64) * K + rows)[:, None] * N + columns[None, :]
        zeros = gl.zeros((8, 256), out.dtype.element_ty, layout)
        gl.store(where, zeros, mask=(rows < K)[:, None] & (columns < N)[None, :])


@gluon.jit
def _weights_hopper_kernel(
    lhs_desc, dy_desc, sizes, out,
    K: gl.constexpr, N: gl.constexpr, G: gl.constexpr, G_POW2: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g: one role loads, two multiply, one stores."""
    NUM_M: gl.constexpr = (K + BM - 1) // BM
    NUM_N: gl.constexpr = (N + BN - 1) // BN
    a_smem = gl.allocate_shared_memory(lhs_desc.dtype, [STAGES, 1, BK, BM], lhs_desc.layout)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], dy_desc.dtype)
    b_smem = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, BK, BN], wide)
    staged = _staging(out.dtype.element_ty, BM, PIECE)
    table = _table(G_POW2)
    full, empty, ready, free = _barriers(STAGES)
    live = _order(sizes, table, G, G_POW2, BK)
    num_tiles = live * (NUM_M * NUM_N)
    gl.warp_specialize(
        [
            (_multiply_rows, (table, num_tiles, a_smem, b_smem, staged.index(0), full, empty,
                              ready.index(0), free.index(0), 0, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, STAGES)),
            (_multiply_rows, (table, num_tiles, a_smem, b_smem, staged.index(1), full, empty,
                              ready.index(1), free.index(1), 1, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, STAGES)),
            (_store_tiles, (table, num_tiles, live, out, staged, ready, free, K, N,
                            G, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BAND, True)),
            (_load_rows, (lhs_desc, dy_desc, table, num_tiles, a_smem, b_smem, full, empty,
                          NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, BAND, STAGES)),
        ],
        [4, 2, 1],  # warps of the roles after the first
        [200, 88, 88],  # and their registers
    )  # fmt: skip


@gluon.jit
def _staging(dtype: gl.constexpr, BM: gl.constexpr, PIECE: gl.constexpr):
    """Shared memory for PIECE columns of the results of both roles that multiply."""
    part: gl.constexpr = [BM // 2, PIECE]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(part, dtype)
    return gl.allocate_shared_memory(dtype, [2] + part, layout)


@gluon.jit
def _table(G_POW2: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [4, G_POW2], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the kernel in CUDA C++ runs.

    Attributes:
      boxes: of 64 columns, that a role multiplies by at most 256 / boxes rows.
      rows: at least and at most so many in a tile of a large group, in steps of `grain`.
      cost: of a tile's step, beside that of its rows, in rows.
      band: tiles of rows that run together.
      box: rows of one TMA load.
      registers: of the role that loads, and of those that multiply.
    """

    boxes: int
    rows: tuple[int, int]
    grain: int
    cost: int
    band: int
    box: int
    registers: tuple[int, int]


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
ROWS_HOPPER = RowTiles(
    boxes=1, rows=(128, 256), grain=8, cost=120, band=8, box=32, registers=(40, 232)
)
SMALL_GROUPS_HOPPER = dataclasses.replace(ROWS_HOPPER, boxes=2, rows=(128, 128), grain=32)
# NVIDIA H200, 2026-11-21 and 22: docs/dev/performance-log.md says what was measured.
ROWS = Tiles(m=128, n=256, k=64, warps=8, stages=3, group_m=8)
WEIGHTS = Tiles(m=128, n=256, k=64, warps=8, stages=3)
WEIGHTS_HOPPER = Tiles(m=128, n=256, k=64, warps=4, stages=4, group_m=8)
SHARED_BYTES = 227 * 1024  # of one program
BARRIER_BYTES = 1024  # at most, of Gluon's kernels
MOST_GROUPS = 1024  # whose places fit into shared memory
# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
MOST_PARTS = 2  # of a tile of the last round
MOST_TURNS = 4  # programs of a multiprocessor
LEAST_STEPS = 120  # of each, of 128 x 256 x 64, where there are several
# From these contractions on the end of a tile costs little, and Triton's tiles, which are all alike, keep step and
# share more in L2: from the first if there are less than so many tiles for each cluster, from the second anyway.
LONG_CONTRACTION, LONGEST_CONTRACTION, FEW_TILES = 8192, 20480, 4


def rows(lhs, rhs, group_sizes, *, out_dtype, zero_rest=True):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]."""
    K, N = lhs.shape[2], prod(rhs.shape[2:])
    launch = _rows_launch(lhs.shape[1], K, N, group_sizes)
    options = dict(out_dtype=out_dtype, transposed=False, zero_rest=zero_rest)
    out = launch(lhs[0], rhs.reshape(-1, K, N), group_sizes[0], **options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *, out_dtype, zero_rest=True):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]."""
    C, N = dy.shape[1], prod(dy.shape[2:])
    flat = rhs.reshape(rhs.shape[0], rhs.shape[1], N)
    launch = _rows_launch(C, N, flat.shape[1], group_sizes)
    options = dict(out_dtype=out_dtype, transposed=True, zero_rest=zero_rest)
    return launch(dy.reshape(C, N), flat, group_sizes[0], **options)[None]


def in_cuda(group_sizes) -> bool:
    """Whether rows of so many groups can take the kernel in CUDA C++, whose instructions are Hopper's alone."""
    return group_sizes.shape[1] <= MOST_GROUPS and _capability() == 90 and nvrtc() is not None


def _rows_launch(rows: int, contraction: int, width: int, group_sizes):
    """The kernel in CUDA C++ where it is the faster one."""
    tiles = rows * width / ROWS_HOPPER.rows[1] ** 2 / (_num_programs() // 2)  # for each cluster
    suited = contraction < (LONG_CONTRACTION if tiles < FEW_TILES else LONGEST_CONTRACTION)
    return launch_rows_hopper if suited and in_cuda(group_sizes) else launch_rows


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    del num_experts
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    # wgmma is Hopper's alone, and its windows need as many rows as a step.
    hopper = _capability() == 90 and C >= WEIGHTS_HOPPER.k
    launch = launch_weights_hopper if hopper else launch_weights
    out = launch(lhs[0], dy.reshape(C, N), group_sizes[0], out_dtype=out_dtype)
    return out.reshape(-1, K, *dy.shape[2:])


def launch_rows(
    lhs, rhs, group_sizes, *, out_dtype, transposed, zero_rest=True, tiles: Tiles = ROWS
):
    (C, K), G = lhs.shape, group_sizes.shape[0]
    N = rhs.shape[1] if transposed else rhs.shape[2]
    tiles = _fit(tiles, N, out_dtype)
    programs = _num_programs(_num_steps((tiles.m, tiles.n, tiles.k), C, N, K))
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return launcher.triton_call(
        _descriptor(lhs, (tiles.m, tiles.k)), _descriptor(rhs, rhs_block), group_sizes,
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        grid=(programs,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        ZEROS_END=C * zero_rest, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        NUM_PROGRAMS=programs, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


def launch_rows_hopper(
    lhs, rhs, group_sizes, scales=(), *, out_dtype, transposed, zero_rest=True,
    tiles: RowTiles | None = None,
):  # fmt: skip
    """`scales`: of lhs and of rhs, [G] each, if they have 8 bits; then rhs is transposed."""
    (C, K), G = lhs.shape, group_sizes.shape[0]
    if tiles is None:
        tiles = SMALL_GROUPS_HOPPER if C <= G * SMALL_GROUPS_HOPPER.rows[1] else ROWS_HOPPER
    N = rhs.shape[1] if transposed else rhs.shape[2]
    line = 128 // lhs.dtype.itemsize
    programs = _num_programs(_num_steps((128, 256, line), C, N, K)) // 2 * 2
    # Several programs of a multiprocessor fill each other's last rounds, and lie where there is room.
    alone = programs <= _num_programs()
    parts = MOST_PARTS if alone else 1
    places = cluster_order(programs, SHARED_BYTES) if alone else ()
    return cuda_call(
        _descriptor(lhs, (tiles.box, line)), _descriptor(rhs, (1, 64, line)),
        group_sizes.astype(jnp.int32), *scales,
        source=rows_source((lhs.dtype, rhs.dtype), out_dtype, transposed, tiles, places), name="grouped_gemm_rows",
        scalars=(C * zero_rest, triton.cdiv(K, line), N, G, parts),
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        programs=programs, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def rows_source(
    dtypes, out_dtype, transposed: bool, tiles: RowTiles = ROWS_HOPPER, places: tuple[int, ...] = ()
) -> str:
    """The kernel in CUDA C++ for lhs and rhs of `dtypes`; `places`: of its clusters, else as they are launched."""
    (lhs, rhs), out_dtype = map(jnp.dtype, dtypes), jnp.dtype(out_dtype)
    scaled = lhs.itemsize == 1
    # Low tiles, of which there are few, take the instructions of the next multiple of 16 rows.
    least, most = tiles.rows
    heights = {
        rows: max(rows, -(-min(rows, least) // 16) * 16)
        for rows in range(tiles.grain, most + 1, tiles.grain)
    }
    defined: dict[str, object] = dict(
        SCALED=int(scaled), TRANSPOSED=int(transposed),
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16),
        BOXES=tiles.boxes, MIN_ROWS=tiles.rows[0], MAX_ROWS=tiles.rows[1], GRAIN=tiles.grain, TILE_COST=tiles.cost,
        BAND=tiles.band, BOX_ROWS=tiles.box, SHARED=SHARED_BYTES,
        REGISTERS_LESS=tiles.registers[0], REGISTERS_MORE=tiles.registers[1],
    )  # fmt: skip
    if places:
        defined["PLACES"] = ", ".join(map(str, places))
    # The columns of the weight are the rows of the instruction.
    kinds = ".".join(WGMMA_TYPES[dtype.name] for dtype in (rhs, lhs))
    depth, flags = (32, "1, 1") if scaled else (16, f"1, 1, {int(not transposed)}, 0")
    function = "template <> __device__ __forceinline__ void multiply<{}>"
    instructions = "".join(
        wgmma(function.format(n), f"m64n{n}k{depth}.f32.{kinds}", n // 2, flags)
        for n in sorted({*heights.values()})
    )
    cases = "".join(
        f"case {rows // tiles.grain}: multiply_steps<{height}>(d, ring, result, steps); break;\n"
        for rows, height in heights.items()
    )
    return source_text(
        "hopper.cuh", "grouped_gemm.cu", defined=defined, INSTRUCTIONS=instructions, CASES=cases
    )


def launch_weights(lhs, dy, group_sizes, *, out_dtype, tiles: Tiles = WEIGHTS):
    (C, K), N, G = lhs.shape, dy.shape[1], group_sizes.shape[0]
    tiles = _fit(tiles, N, out_dtype)
    return launcher.triton_call(
        _descriptor(lhs, (tiles.k, tiles.m)), _descriptor(dy, (tiles.k, tiles.n)), group_sizes,
        lhs, dy,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(_num_programs(),),
        num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G),
        NUM_PROGRAMS=_num_programs(), BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip


def launch_weights_hopper(lhs, dy, group_sizes, *, out_dtype, tiles: Tiles = WEIGHTS_HOPPER):
    K, N, G = lhs.shape[1], dy.shape[1], group_sizes.shape[0]
    tiles = _fit_hopper(tiles, N, G, out_dtype)
    programs = _num_programs(_num_steps((tiles.m, tiles.n, tiles.k), K, N, lhs.shape[0]))
    return gluon_call(
        _windows(lhs, tiles.k, tiles.m), _windows(dy, tiles.k, tiles.n // 2), group_sizes,
        kernel=_weights_hopper_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        programs=programs, NUM_PROGRAMS=programs, capability=_capability(),
        K=K, N=N, G=G, G_POW2=_table_width(G), PIECE=tiles.n // 2,
        BM=tiles.m, BN=tiles.n, BK=tiles.k, BAND=tiles.group_m, STAGES=tiles.stages,
    )  # fmt: skip


def _table_width(G: int) -> int:
    return max(32, triton.next_power_of_2(G))


def _fit_hopper(tiles: Tiles, width: int, G: int, out_dtype) -> Tiles:
    """Narrow outputs take narrow tiles; what results and groups take of shared memory is not there for loads."""
    if width <= 128:
        tiles = dataclasses.replace(tiles, n=128)
    staged = tiles.m * tiles.n // 2 * jnp.dtype(out_dtype).itemsize + 16 * _table_width(G)
    stages = (SHARED_BYTES - BARRIER_BYTES - staged) // ((tiles.m + tiles.n) * tiles.k * 2)
    return dataclasses.replace(tiles, stages=min(tiles.stages, stages))


def _windows(x, rows: int, columns: int):
    """`x` [C, N] as a window of `rows` rows from each row on: TMA loads no row beyond the window."""
    C, N = x.shape
    block = (1, rows, columns)
    dtype = gl.float16 if x.dtype == jnp.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    import jax_triton

    return jax_triton.TensorDescriptor(x, (C - rows + 1, rows, N), (N, N, 1), block, layout)


_descriptor = launcher.TensorMap.of


def _fit(tiles: Tiles, width: int, out_dtype) -> Tiles:
    """Narrow outputs take narrow tiles; float32 outputs leave less shared memory for stages."""
    if width <= 128:
        tiles = dataclasses.replace(tiles, n=128)
    if jnp.dtype(out_dtype).itemsize == 4 and tiles.n == 256:
        tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3), n=128)
    return tiles


def _num_programs(num_steps: int = 0) -> int:
    """One program per multiprocessor; among other devices up to four, one after the other, if each has work enough.

    Each has its share of the tiles from the start. If a collective holds its multiprocessor it begins late, and
    everything waits for it: the smaller the shares, the shorter. Without a GPU, as when compiling ahead of time, the
    multiprocessors are an H100's.

    Args:
      num_steps: of all tiles together, at most; see `_num_steps`.
    """
    gpu = _jax.local_gpu()
    cores = gpu.core_count if gpu else 132
    alone = jax.sharding.get_abstract_mesh().size <= 1
    turns = 1 if alone else num_steps // (cores * LEAST_STEPS)
    return cores * max(1, min(turns, MOST_TURNS))


def _num_steps(tiles, num_rows: int, num_columns: int, contraction: int) -> int:
    """Of tiles of so many rows and columns in all."""
    m, n, k = tiles
    return triton.cdiv(num_rows, m) * triton.cdiv(num_columns, n) * triton.cdiv(contraction, k)


def _capability() -> int:
    """Ten times that of the GPU; an H100's where there is none."""
    return round((_jax.compute_capability() or 9.0) * 10)
