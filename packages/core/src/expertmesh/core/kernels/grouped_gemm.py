"""Grouped GEMM for NVIDIA GPUs from compute capability 9.0: persistent, group sizes read on the device, TMA loads.

Forward and input gradient are one kernel: C rows in G groups times each group's weight; Hopper has one of its own for
them, in CUDA C++ (`grouped_gemm.cu`). The weight gradient contracts over the rows of a group. Every byte of the outputs
is written. Dimension key as in `ops/grouped_gemm.py`.

The TMA descriptors are parameters of the launch: a descriptor that the device makes needs scratch memory, and a launch
that allocates it cannot be part of a captured loop.
"""

import dataclasses
import pathlib
from math import prod

import jax
import jax.numpy as jnp
import jax_triton
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
from expertmesh.core.kernels.cuda_call import cuda_call, nvrtc
from expertmesh.core.kernels.gluon_call import gluon_call
from expertmesh.core.kernels.launch import target


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
def _rows_kernel(
    lhs_desc, rhs_desc, group_sizes, out,
    C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r] (rhs [G, K, N], or [G, N, K] if TRANSPOSED); zeros after the last group."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    tiles_G = (size_G + BM - 1) // BM
    last_tile_G = tl.cumsum(tiles_G, 0)
    num_live = tl.sum(size_G)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (N + BN - 1) // BN

    # Flattened with the loop over K: the next tile's loads run while this tile is stored.
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        # Tiles that run together share rows and columns, so that both stay in L2.
        band = tile // (GROUP_M * num_n)
        band_m = min(num_m - band * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * num_n)
        tile_m = band * GROUP_M + within % band_m
        tile_n = within // band_m
        group, row, end = _group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (K + BK - 1) // BK):
            a = lhs_desc.load([row, k * BK])
            if TRANSPOSED:
                b = rhs_desc.load([group, tile_n * BN, k * BK]).reshape(BN, BK).T
            else:
                b = rhs_desc.load([group, k * BK, tile_n * BN]).reshape(BK, BN)
            acc = tl.dot(a, b, acc)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        live = (rows < end)[:, None] & (columns < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)

    zeros = tl.zeros((16, BN), out.dtype.element_ty)
    for start in tl.range(num_live + tl.program_id(0) * 16, C, NUM_PROGRAMS * 16):
        rows = start + tl.arange(0, 16)
        for tile_n in tl.range(0, num_n):
            columns = tile_n * BN + tl.arange(0, BN)
            where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(where, zeros, mask=(rows < C)[:, None] & (columns < N)[None, :])


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
def _tile(tile, sizes, G: gl.constexpr, G_POW2: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr,
          BAND: gl.constexpr):  # fmt: skip
    """The group of a tile, the rows [start, end) that it sums, and the tile's row and column."""
    lane_G: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index_G = gl.arange(0, G_POW2, lane_G)
    size_G = gl.load(sizes + index_G, mask=index_G < G, other=0)
    group = tile // (NUM_M * NUM_N)
    end = gl.sum(gl.where(index_G <= group, size_G, 0), 0)
    start = gl.sum(gl.where(index_G < group, size_G, 0), 0)
    within = tile % (NUM_M * NUM_N)
    band = within // (BAND * NUM_N)
    band_m = gl.minimum(NUM_M - band * BAND, BAND)
    inner = within % (BAND * NUM_N)
    return group, start, end, band * BAND + inner % band_m, inner // band_m


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """For slots that are full and empty, results that are ready, and room for them that is free."""
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
    lhs_desc, dy_desc, sizes, a_smem, b_smem, full, empty,
    G: gl.constexpr, G_POW2: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role that loads: BK rows of both operands a step, as long as a slot is empty."""
    step = 0
    for tile in range(gl.program_id(0), G * NUM_M * NUM_N, NUM_PROGRAMS):
        _, start, end, tile_m, tile_n = _tile(tile, sizes, G, G_POW2, NUM_M, NUM_N, BAND)
        for first in range(start, end, BK):
            # The descriptors hold windows of BK rows: what lies beyond a window is TMA's zeros. The last one of a group
            # ends where the group ends, unless no window does.
            window = gl.maximum(gl.minimum(end - first, BK) + first - BK, 0)
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), lhs_desc.nbytes_per_cta + dy_desc.nbytes_per_cta)
            at = full.index(slot)
            tma.async_load(lhs_desc, [window, first - window, tile_m * BM], at, a_smem.index(slot))
            tma.async_load(dy_desc, [window, first - window, tile_n * BN], at, b_smem.index(slot))
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
def _hand_over(left, right, out_smem, ready, free):
    """The halves of a tile's columns to the role that stores."""
    mbarrier.wait(free, 1)
    out_smem.store(left.to(out_smem.dtype))
    mbarrier.arrive(ready)
    mbarrier.wait(free, 0)
    out_smem.store(right.to(out_smem.dtype))
    mbarrier.arrive(ready)


@gluon.jit
def _hand_over_whole(acc, out_smem, ready, free):
    left, right = _in_two(acc)
    _hand_over(left, right, out_smem, ready, free)


@gluon.jit
def _multiply_rows(
    sizes, a_smem, b_smem, out_smem, full, empty, ready, free, HALF: gl.constexpr,
    G: gl.constexpr, G_POW2: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two roles that multiply: BM / 2 of a tile's rows; hands its result over in two halves."""
    BH: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    step = 0
    for tile in range(gl.program_id(0), G * NUM_M * NUM_N, NUM_PROGRAMS):
        _, start, end, _, _ = _tile(tile, sizes, G, G_POW2, NUM_M, NUM_N, BAND)
        acc = gl.zeros((BH, BN), gl.float32, mma)
        for first in range(start, end, BK):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = a_smem.index(slot).reshape((BK, BM)).slice(HALF * BH, BH, dim=1)
            b = b_smem.index(slot).reshape((BK, BN))
            if end < BK:  # the rows of the next group, which may hold NaN, are in the window too
                _clear_rows(a, end - first, BK, BH)
                _clear_rows(b, end - first, BK, BN)
                fence_async_shared()
            acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
            # One product stays under way; the slot of the one before it is free.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if first > start:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        if end > start:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        _hand_over_whole(acc, out_smem, ready, free)


@gluon.jit
def _store_part(
    smem, ready, free, phase, out, row, end, column, W: gl.constexpr, ROWS: gl.constexpr
):
    """Part of a result [C, W] from shared memory to where it belongs, but for the rows from `end` on."""
    HEIGHT: gl.constexpr = smem.shape[0]
    WIDTH: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [2, 1], [1, 0])
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mbarrier.wait(ready, phase)
    for first in gl.static_range(0, HEIGHT, ROWS):
        values = smem.slice(first, ROWS).load(layout)
        rows = row + first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        where = out + rows.to(gl.int64)[:, None] * W + columns[None, :]
        gl.store(where, values, mask=(rows < end)[:, None] & (columns < W)[None, :])
    mbarrier.arrive(free)


@gluon.jit
def _store_tiles(
    sizes, out, smem0, smem1, ready, free, K: gl.constexpr, N: gl.constexpr,
    G: gl.constexpr, G_POW2: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The role that stores, while the next tile is multiplied."""
    ROWS: gl.constexpr = 32 // (out.dtype.element_ty.primitive_bitwidth // 8)
    # A step is half of a tile's columns; were the halves unrolled, their addresses would not fit into registers.
    steps = 2 * ((G * NUM_M * NUM_N - gl.program_id(0) + NUM_PROGRAMS - 1) // NUM_PROGRAMS)
    for step in range(0, steps):
        tile = gl.program_id(0) + step // 2 * NUM_PROGRAMS
        group, _, _, tile_m, tile_n = _tile(tile, sizes, G, G_POW2, NUM_M, NUM_N, BAND)
        mine = out + group.to(gl.int64) * K * N
        row = tile_m * BM
        column = tile_n * BN + step % 2 * (BN // 2)
        _store_part(smem0, ready.index(0), free.index(0), step & 1, mine, row, K, column, N, ROWS)
        row += BM // 2
        _store_part(smem1, ready.index(1), free.index(1), step & 1, mine, row, K, column, N, ROWS)


@gluon.jit
def _weights_hopper_kernel(
    lhs_desc, dy_desc, sizes, out,
    K: gl.constexpr, N: gl.constexpr, G: gl.constexpr, G_POW2: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g: one role loads, two multiply, one stores."""
    NUM_M: gl.constexpr = (K + BM - 1) // BM
    NUM_N: gl.constexpr = (N + BN - 1) // BN
    part: gl.constexpr = [BM // 2, BN // 2]
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(part, dtype)
    a_smem = gl.allocate_shared_memory(lhs_desc.dtype, [STAGES, 1, BK, BM], lhs_desc.layout)
    b_smem = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, 1, BK, BN], dy_desc.layout)
    smem0 = gl.allocate_shared_memory(dtype, part, layout)
    smem1 = gl.allocate_shared_memory(dtype, part, layout)
    full, empty, ready, free = _barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply_rows, (sizes, a_smem, b_smem, smem0, full, empty, ready.index(0), free.index(0), 0,
                              G, G_POW2, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, BAND, STAGES)),
            (_multiply_rows, (sizes, a_smem, b_smem, smem1, full, empty, ready.index(1), free.index(1), 1,
                              G, G_POW2, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, BAND, STAGES)),
            (_store_tiles, (sizes, out, smem0, smem1, ready, free, K, N,
                            G, G_POW2, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BAND)),
            (_load_rows, (lhs_desc, dy_desc, sizes, a_smem, b_smem, full, empty,
                          G, G_POW2, NUM_M, NUM_N, NUM_PROGRAMS, BM, BN, BK, BAND, STAGES)),
        ],
        [4, 2, 1],  # warps of the roles after the first
        [200, 88, 88],  # and their registers
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the kernel in CUDA C++ runs.

    Attributes:
      rows: at least and at most so many in a tile of a large group, in steps of `grain`.
      cost: of a tile's step, beside that of its rows, in rows.
      band: tiles of rows that run together.
      box: rows of one TMA load.
      registers: of the role that loads, and of those that multiply.
    """

    rows: tuple[int, int]
    grain: int
    cost: int
    band: int
    box: int
    registers: tuple[int, int]


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
ROWS_HOPPER = RowTiles(rows=(128, 256), grain=16, cost=60, band=8, box=32, registers=(40, 232))
# NVIDIA H200, 2026-11-21: docs/dev/performance-log.md says what was measured.
ROWS = Tiles(m=128, n=256, k=64, warps=8, stages=4, group_m=16)
WEIGHTS = Tiles(m=128, n=256, k=64, warps=8, stages=3)
WEIGHTS_HOPPER = Tiles(m=128, n=256, k=64, warps=4, stages=4, group_m=8)
SHARED_BYTES = 227 * 1024  # of one program
MOST_GROUPS = 1024  # whose places fit into shared memory
# From this contraction on the end of a tile costs little, and Triton's tiles, which are all alike, keep step and share
# more in L2.
LONG_CONTRACTION = 8192


def rows(lhs, rhs, group_sizes, *, out_dtype):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]."""
    K, N = lhs.shape[2], prod(rhs.shape[2:])
    launch = _rows_launch(K, group_sizes)
    out = launch(
        lhs[0], rhs.reshape(-1, K, N), group_sizes[0], out_dtype=out_dtype, transposed=False
    )
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *, out_dtype):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]."""
    C, N = dy.shape[1], prod(dy.shape[2:])
    flat = rhs.reshape(rhs.shape[0], rhs.shape[1], N)
    launch = _rows_launch(N, group_sizes)
    out = launch(dy.reshape(C, N), flat, group_sizes[0], out_dtype=out_dtype, transposed=True)
    return out[None]


def _rows_launch(contraction: int, group_sizes):
    """The instructions of the kernel in CUDA C++ are Hopper's alone."""
    suited = contraction < LONG_CONTRACTION and group_sizes.shape[1] <= MOST_GROUPS
    return launch_rows_hopper if suited and _capability() == 90 and nvrtc() else launch_rows


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    del num_experts
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    # wgmma is Hopper's alone, and its windows need as many rows as a step.
    hopper = _capability() == 90 and C >= WEIGHTS_HOPPER.k
    launch = launch_weights_hopper if hopper else launch_weights
    out = launch(lhs[0], dy.reshape(C, N), group_sizes[0], out_dtype=out_dtype)
    return out.reshape(-1, K, *dy.shape[2:])


def launch_rows(lhs, rhs, group_sizes, *, out_dtype, transposed, tiles: Tiles = ROWS):
    (C, K), G = lhs.shape, group_sizes.shape[0]
    N = rhs.shape[1] if transposed else rhs.shape[2]
    tiles = _fit(tiles, N, out_dtype)
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return jax_triton.triton_call(
        _descriptor(lhs, (tiles.m, tiles.k)), _descriptor(rhs, rhs_block), group_sizes,
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        grid=(_num_programs(),),
        num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        NUM_PROGRAMS=_num_programs(), BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
        **target(),
    )  # fmt: skip


def launch_rows_hopper(
    lhs, rhs, group_sizes, *, out_dtype, transposed, tiles: RowTiles = ROWS_HOPPER
):
    (C, K), G = lhs.shape, group_sizes.shape[0]
    N = rhs.shape[1] if transposed else rhs.shape[2]
    return cuda_call(
        _descriptor(lhs, (tiles.box, 64)), _descriptor(rhs, (1, 64, 64)), group_sizes.astype(jnp.int32),
        source=rows_source(lhs.dtype, out_dtype, transposed, tiles), name="grouped_gemm_rows",
        scalars=(C, triton.cdiv(K, 64), N, G),
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        programs=_num_programs() // 2 * 2, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def rows_source(dtype, out_dtype, transposed: bool, tiles: RowTiles = ROWS_HOPPER) -> str:
    """The kernel in CUDA C++ for operands of `dtype`."""
    half, out_dtype = jnp.dtype(dtype) == jnp.float16, jnp.dtype(out_dtype)
    counts = range(tiles.grain, tiles.rows[1] + 1, tiles.grain)
    defined = dict(
        TRANSPOSED=int(transposed), WIDE=int(out_dtype.itemsize == 4), OUT_HALF=int(out_dtype == jnp.float16),
        MIN_ROWS=tiles.rows[0], MAX_ROWS=tiles.rows[1], GRAIN=tiles.grain, TILE_COST=tiles.cost, BAND=tiles.band,
        BOX_ROWS=tiles.box, SHARED=SHARED_BYTES,
        REGISTERS_LESS=tiles.registers[0], REGISTERS_MORE=tiles.registers[1],
    )  # fmt: skip
    source = pathlib.Path(__file__).with_suffix(".cu").read_text()
    instructions = "".join(_wgmma(rows, half, transposed) for rows in counts)
    cases = "".join(
        f"case {rows // tiles.grain}: multiply_steps<{rows}>(d, ring, result, steps); break;\n"
        for rows in counts
    )
    source = source.replace("INSTRUCTIONS\n", instructions, 1).replace("CASES\n", cases, 1)
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + source


def _wgmma(rows: int, half: bool, transposed: bool) -> str:
    """`multiply` in CUDA C++: 64 columns of a weight by `rows` rows, 16 of the contraction."""
    kind, count = "f16" if half else "bf16", rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
template <> __device__ __forceinline__ void multiply<{rows}>(float (&d)[128], u64 columns, u64 rows, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} {{{registers}}},"
               " %{count}, %{count + 1}, p, 1, 1, {int(not transposed)}, 0;\\n}}"
               : {sums} : "l"(columns), "l"(rows), "r"(accumulate));
}}
"""


def launch_weights(lhs, dy, group_sizes, *, out_dtype, tiles: Tiles = WEIGHTS):
    (C, K), N, G = lhs.shape, dy.shape[1], group_sizes.shape[0]
    tiles = _fit(tiles, N, out_dtype)
    return jax_triton.triton_call(
        _descriptor(lhs, (tiles.k, tiles.m)), _descriptor(dy, (tiles.k, tiles.n)), group_sizes,
        lhs, dy,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(_num_programs(),),
        num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G),
        NUM_PROGRAMS=_num_programs(), BM=tiles.m, BN=tiles.n, BK=tiles.k,
        **target(),
    )  # fmt: skip


def launch_weights_hopper(lhs, dy, group_sizes, *, out_dtype, tiles: Tiles = WEIGHTS_HOPPER):
    K, N, G = lhs.shape[1], dy.shape[1], group_sizes.shape[0]
    tiles = _fit_hopper(tiles, N, out_dtype)
    return gluon_call(
        _windows(lhs, tiles.k, tiles.m), _windows(dy, tiles.k, tiles.n), group_sizes,
        kernel=_weights_hopper_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        programs=_num_programs(), NUM_PROGRAMS=_num_programs(), capability=_capability(),
        K=K, N=N, G=G, G_POW2=max(32, triton.next_power_of_2(G)),
        BM=tiles.m, BN=tiles.n, BK=tiles.k, BAND=tiles.group_m, STAGES=tiles.stages,
    )  # fmt: skip


def _fit_hopper(tiles: Tiles, width: int, out_dtype) -> Tiles:
    """Narrow outputs take narrow tiles; float32 ones, staged in shared memory, leave less of it for loads."""
    if width <= 128:
        tiles = dataclasses.replace(tiles, n=128)
    if jnp.dtype(out_dtype).itemsize == 4:
        tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3))
    return tiles


def _windows(x, rows: int, columns: int):
    """`x` [C, N] as a window of `rows` rows from each row on: TMA loads no row beyond the window."""
    C, N = x.shape
    block = (1, rows, columns)
    dtype = gl.float16 if x.dtype == jnp.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return jax_triton.TensorDescriptor(x, (C - rows + 1, rows, N), (N, N, 1), block, layout)


_descriptor = jax_triton.TensorDescriptor.from_array


def _fit(tiles: Tiles, width: int, out_dtype) -> Tiles:
    """Narrow outputs take narrow tiles; float32 outputs leave less shared memory for stages."""
    if width <= 128:
        tiles = dataclasses.replace(tiles, n=128)
    if jnp.dtype(out_dtype).itemsize == 4 and tiles.n == 256:
        tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3), n=128)
    return tiles


def _gpu():
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def _num_programs() -> int:
    """One program per multiprocessor; an H100's where there is no GPU, as when compiling ahead of time."""
    gpu = _gpu()
    return gpu.core_count if gpu else 132


def _capability() -> int:
    """Ten times that of the GPU; an H100's where there is none."""
    return round((_jax.compute_capability() or 9.0) * 10)
