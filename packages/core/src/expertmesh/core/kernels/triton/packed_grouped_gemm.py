"""Grouped GEMMs of 4-bit operands for NVIDIA GPUs from compute capability 10.0, group sizes read on the device.

Two numbers lie in a byte, the first in the lower bits, along the contraction, which is each operand's last dimension.
Tensor cores multiply blocks of 16 by their scales; those of tensors, `total`, are multiplied in float32. Dimension key
as in `linear/grouped_gemm.py`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import Config
from expertmesh.core.kernels.low_rank import LowRank
from expertmesh.core.kernels.triton.grouped_gemm import (
    RANK_STEP,
    add_low_rank,
    banded_tile,
    group_of_tile,
    matrix_tile,
    steps_of,
    store_zero_rows,
    tile_of_weights,
    tiled,
    tiles_of_groups,
    weight_tile,
)
from expertmesh.core.quantization.quantized import bits_of

BLOCK = tl.constexpr(16)


@triton.jit
def _add_product(acc, a, a_scale, b, b_scale):
    """acc + a @ b: [BM, BK / 2] and [BK / 2, BN] bytes, scales [BM, BK / 16] and [BN, BK / 16]."""
    return tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)


@triton.jit
def _scales(scale, lines, k, LENGTH: tl.constexpr, BK: tl.constexpr):
    """Of the k-th BK of lines [_, LENGTH]; 0 beyond their end."""
    num_blocks: tl.constexpr = LENGTH // BLOCK
    block = k * (BK // BLOCK) + tl.arange(0, BK // BLOCK)[None, :]
    bits = tl.load(scale + lines[:, None] * num_blocks + block, mask=block < num_blocks, other=0)
    return bits.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _rows_kernel(
    lhs, lhs_scale, rhs, rhs_scale, total, group_sizes, u, b, out,
    C: tl.constexpr, ZEROS_END: tl.constexpr, D: tl.constexpr, W: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    ACROSS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, TRANSPOSED: tl.constexpr, FLATTEN: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r]^T * total[group of r] and `add_low_rank`'s; zeros in padding rows up to
    ZEROS_END.

    lhs is [C, D / 2], rhs [G, W, D / 2], their scales [C, D / 16] and [G, W / ACROSS, D / 16]; TRANSPOSED is b.
    """
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (W + BN - 1) // BN
    steps = steps_of(D, BK, num_m)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        # What lies beyond the last row or column is not stored: any scale will do.
        some_rows = tl.minimum(rows, C - 1).to(tl.int64)
        of_weight = (group.to(tl.int64) * W + tl.minimum(columns, W - 1)) // ACROSS
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, steps):
            a = matrix_tile(lhs, row, k * (BK // 2), C, D // 2, BM, BK // 2, "any")
            w = weight_tile(rhs, group, k, tile_n, D // 2, W, True, BN, BK // 2)
            a_scale = _scales(lhs_scale, some_rows, k, D, BK)
            w_scale = _scales(rhs_scale, of_weight, k, D, BK)
            acc = _add_product(acc, a, a_scale, w, w_scale)
        acc *= tl.load(total + group)
        acc = add_low_rank(acc, u, b, rows, end, columns, group, R, W, TRANSPOSED, BR)
        where = out + rows.to(tl.int64)[:, None] * W + columns[None, :]
        live = (rows < end)[:, None] & (columns < W)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)
    store_zero_rows(out, tl.sum(size_G), ZEROS_END, W, BN, NUM_PROGRAMS)


@triton.jit
def _weights_kernel(
    lhs, lhs_scale, dy, dy_scale, total, group_sizes, out,
    C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = lhs[:, rows of g] @ dy[:, rows of g]^T * total[g]: lhs [K, C / 2], dy [N, C / 2], scales [_, C / 16].

    BK rows at a time, in whole steps of all rows: those of other groups are zeros.
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
        columns_m = tile_m * BM + tl.arange(0, BM)
        columns_n = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(start // BK, tl.where(end > start, (end + BK - 1) // BK, start // BK)):
            a = _live_bytes(lhs, columns_m, step, start, end, K, C, BK)
            b = _live_bytes(dy, columns_n, step, start, end, N, C, BK)
            a_scale = _live_scales(lhs_scale, columns_m, step, start, end, K, C, BK)
            b_scale = _live_scales(dy_scale, columns_n, step, start, end, N, C, BK)
            acc = _add_product(acc, a, a_scale, b.T, b_scale)
        acc *= tl.load(total + group)
        where = out + (group.to(tl.int64) * K + columns_m)[:, None] * N + columns_n[None, :]
        inside = (columns_m < K)[:, None] & (columns_n < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _live_bytes(x, lines, step, start, end, WIDTH: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """[lines, BK / 2] of x [WIDTH, C / 2]: zeros in the half bytes of rows outside of [start, end)."""
    pair = step * (BK // 2) + tl.arange(0, BK // 2)
    low = (2 * pair >= start) & (2 * pair < end)
    high = (2 * pair + 1 >= start) & (2 * pair + 1 < end)
    inside = (lines < WIDTH)[:, None] & (low | high)[None, :]
    both = tl.load(x + lines.to(tl.int64)[:, None] * (C // 2) + pair[None, :], mask=inside, other=0)
    return both & (tl.where(low, 0x0F, 0) + tl.where(high, 0xF0, 0)).to(tl.uint8)[None, :]


@triton.jit
def _live_scales(
    scale, lines, step, start, end, WIDTH: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):
    """[lines, BK / 16]; 0 for blocks without rows in [start, end), whose scales may be NaN."""
    block = step * (BK // BLOCK) + tl.arange(0, BK // BLOCK)
    live = (block * BLOCK < end) & (block * BLOCK + BLOCK > start)
    at = lines.to(tl.int64)[:, None] * (C // BLOCK) + block[None, :]
    bits = tl.load(scale + at, mask=(lines < WIDTH)[:, None] & live[None, :], other=0)
    return bits.to(tl.float8e4nv, bitcast=True)


def packed(x):
    """float4_e2m1fn [..., D] -> bytes [..., D / 2]."""
    codes = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def launch_rows(
    lhs, lhs_scale, rhs, rhs_scale, total, group_sizes, *,
    config: Config, across: int, out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None = None,
):  # fmt: skip
    """Rows [C, D] times weights [G, W, D], whose blocks have `across` of W, -> [C, W]; to which `low_rank`, of 16 bits,
    is added, its second operand [G, W, R] if `transposed`."""
    (C, D), (G, W, _), tiles = lhs.shape, rhs.shape, config.tiles
    return launcher.triton_call(
        tiled(packed(lhs), (tiles.m, tiles.k // 2), tiles), bits_of(lhs_scale),
        tiled(packed(rhs), (1, tiles.n, tiles.k // 2), tiles), bits_of(rhs_scale),
        total, group_sizes, *(low_rank or (None, None)),
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        grid=(config.programs,), num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, ZEROS_END=C * clear_padding, D=D, W=W, G=G, G_POW2=triton.next_power_of_2(G), ACROSS=across,
        R=low_rank.rank if low_rank else 0, BR=RANK_STEP, TRANSPOSED=transposed,
        FLATTEN=tiles.flat and low_rank is None,
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


def launch_weights(lhs, lhs_scale, dy, dy_scale, total, group_sizes, *, config: Config, out_dtype):
    """[K, C] and [N, C], with scales of blocks along C -> [G, K, N]."""
    (K, C), N, G, tiles = lhs.shape, dy.shape[0], group_sizes.shape[0], config.tiles
    return launcher.triton_call(
        packed(lhs), bits_of(lhs_scale), packed(dy), bits_of(dy_scale), total, group_sizes,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(config.programs,), num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G),
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip
