"""Grouped GEMMs of 8-bit rows and a thin plain operand, for NVIDIA GPUs from compute capability 8.9.

Rows are read once, as they are, and widened in registers: the other operand, of few columns, is not quantized.
Dimension key: C rows, D their width, T the thin operand's width, G groups.
"""

import jax
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.thin_gemm import ThinTiles
from expertmesh.core.kernels.triton.grouped_gemm import (
    group_of_tile,
    matrix_tile,
    rows_of,
    store_zero_rows,
    tiles_of_groups,
    weight_tile,
)


@triton.jit
def _rows_kernel(
    x, scale, w, group_sizes, out,
    C: tl.constexpr, ZEROS_END: tl.constexpr, D: tl.constexpr, T: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    ALONG: tl.constexpr, TRANSPOSED: tl.constexpr, NUM_TILES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[r] = dequantize(x[r]) @ w[group of r] (w [G, D, T], or [G, T, D] if TRANSPOSED); zeros in padding rows up to
    ZEROS_END. Scales of blocks of ALONG [C, D / ALONG]; [G] if ALONG is 0."""
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    tile_n = tl.program_id(1)
    if tl.program_id(0) < tl.sum(tiles_G):
        tile = tl.program_id(0)
        group, row, end = group_of_tile(tile, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        some_rows = tl.minimum(rows, C - 1).to(tl.int64)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (D + BK - 1) // BK):
            a = matrix_tile(x, row, k * BK, C, D, BM, BK, "any")
            b = weight_tile(w, group, k, tile_n, D, T, TRANSPOSED, BN, BK)
            if ALONG == 0:
                acc = tl.dot(a.to(b.dtype), b, acc)
            else:
                of_rows = tl.load(scale + some_rows * (D // ALONG) + k * BK // ALONG)
                acc += tl.dot(a.to(b.dtype), b) * of_rows[:, None]
        if ALONG == 0:
            acc *= tl.load(scale + group)
        columns = tile_n * BN + tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * T + columns[None, :]
        live = (rows < end)[:, None] & (columns < T)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live)
    if tile_n == 0:
        store_zero_rows(out, tl.sum(size_G), ZEROS_END, T, BN, NUM_TILES)


@triton.jit
def _weights_kernel(
    x, scale, thin, group_sizes, out,
    D: tl.constexpr, T: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    ALONG: tl.constexpr, THIN_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of dequantize(x[r])^T thin[r] over the rows r of group g, [G, D, T], or [G, T, D] if THIN_FIRST.

    Computed as thin^T x: then no tile of x is transposed. In another order of the statements registers spill on Hopper.
    """
    num_n: tl.constexpr = (D + BN - 1) // BN
    group = tl.program_id(0) // num_n
    chunk = tl.program_id(0) % num_n
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end = tl.sum(tl.where(index_G <= group, size_G, 0))
    size = tl.sum(tl.where(index_G == group, size_G, 0))
    first = end - size
    columns_m = tl.program_id(1) * BM + tl.arange(0, BM)
    columns_n = chunk * BN + tl.arange(0, BN)
    block = chunk * BN // ALONG if ALONG else 0  # the columns' scales
    dtype: tl.constexpr = thin.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, size // BK):
        row = first + step * BK
        a = matrix_tile(thin, row, tl.program_id(1) * BM, end, T, BK, BM, "none")
        b = matrix_tile(x, row, chunk * BN, end, D, BK, BN, "none")
        if ALONG == 0:
            b = b.to(dtype)
            acc = tl.dot(a.T, b, acc)
        else:  # all rows are of the group: their scales are read without a mask
            of_rows = matrix_tile(scale, row, block, end, D // ALONG, BK, 1, "none")
            acc = tl.dot(a.T, (b.to(tl.float32) * of_rows).to(dtype), acc)
    if size % BK != 0:  # rows of the next group are not loaded: they may hold NaN
        rows = first + size // BK * BK + tl.arange(0, BK)
        live = rows < end
        a, b = rows_of(thin, rows, live, columns_m, T), rows_of(x, rows, live, columns_n, D)
        if ALONG == 0:
            b = b.to(dtype)
            acc = tl.dot(a.T, b, acc)
        else:
            of_rows = rows_of(scale, rows, live, block + tl.arange(0, 1), D // ALONG)
            acc = tl.dot(a.T, (b.to(tl.float32) * of_rows).to(dtype), acc)
    if ALONG == 0:
        acc *= tl.load(scale + group)
    inside = (columns_m < T)[:, None] & (columns_n < D)[None, :]
    if THIN_FIRST:
        where = (group.to(tl.int64) * T + columns_m)[:, None] * D + columns_n[None, :]
    else:
        where = (group.to(tl.int64) * D + columns_n)[None, :] * T + columns_m[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=inside)


def launch_rows(
    x, scale, w, group_sizes, *, tiles: ThinTiles, along: int, out_dtype, transposed: bool,
    clear_padding: bool,
):  # fmt: skip
    """[C, D] with its scales, times [G, D, T], or [G, T, D] if `transposed`, -> [C, T]."""
    (C, D), G = x.shape, group_sizes.shape[0]
    T = w.shape[1 if transposed else 2]
    num_tiles = C // tiles.m + G
    return launcher.triton_call(
        x, scale, w, group_sizes,
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, T), out_dtype),
        grid=(num_tiles, triton.cdiv(T, tiles.n)), num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, ZEROS_END=C * clear_padding, D=D, T=T, G=G, G_POW2=triton.next_power_of_2(G), ALONG=along,
        TRANSPOSED=transposed, NUM_TILES=num_tiles, BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip


def launch_weights(
    x, scale, thin, group_sizes, *, tiles: ThinTiles, along: int, out_dtype, thin_first: bool
):
    """[C, D] with its scales and [C, T] -> [G, D, T], or [G, T, D] if `thin_first`."""
    D, T, G = x.shape[1], thin.shape[1], group_sizes.shape[0]
    shape = (T, D) if thin_first else (D, T)
    return launcher.triton_call(
        x, scale, thin, group_sizes,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, *shape), out_dtype),
        grid=(G * triton.cdiv(D, tiles.n), triton.cdiv(T, tiles.m)),
        num_warps=tiles.warps, num_stages=tiles.stages,
        D=D, T=T, G=G, G_POW2=triton.next_power_of_2(G), ALONG=along, THIN_FIRST=thin_first,
        BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip
