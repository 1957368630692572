"""Grouped GEMM for NVIDIA GPUs from compute capability 9.0: persistent, group sizes read on the device, TMA loads.

Forward and input gradient are one kernel: C rows in G groups times each group's weight; the weight gradient contracts
over the rows of a group. Every byte of the outputs is written. Dimension key as in `ops/grouped_gemm.py`.

The TMA descriptors are parameters of the launch: a descriptor that the device makes needs scratch memory, and a launch
that allocates it cannot be part of a captured loop.
"""

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


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


# NVIDIA H200, 2026-11-21: docs/dev/performance-log.md says what was measured.
ROWS = Tiles(m=128, n=256, k=64, warps=8, stages=4, group_m=16)
WEIGHTS = Tiles(m=128, n=256, k=64, warps=8, stages=3)


def rows(lhs, rhs, group_sizes, *, out_dtype):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]."""
    K, N = lhs.shape[2], prod(rhs.shape[2:])
    out = launch_rows(
        lhs[0], rhs.reshape(-1, K, N), group_sizes[0], out_dtype=out_dtype, transposed=False
    )
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *, out_dtype):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]."""
    C, N = dy.shape[1], prod(dy.shape[2:])
    flat = rhs.reshape(rhs.shape[0], rhs.shape[1], N)
    out = launch_rows(dy.reshape(C, N), flat, group_sizes[0], out_dtype=out_dtype, transposed=True)
    return out[None]


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    del num_experts
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    out = launch_weights(lhs[0], dy.reshape(C, N), group_sizes[0], out_dtype=out_dtype)
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
        **_target(),
    )  # fmt: skip


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
        **_target(),
    )  # fmt: skip


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


def _target() -> dict:
    return {} if _gpu() else {"compute_capability": 90}
