"""Quantization to 8 bits, and back, for NVIDIA GPUs: numbers are read once, data and scales are written once.

Bit for bit the reference of `quantization/quantize.py`: magnitudes are compared as integers, quotients are rounded as
IEEE 754 says (div.rn), products keep subnormal numbers (no ftz), and the hardware's conversion rounds to nearest, ties
to even, saturates, and writes NaN as 0x7F. A scale per tensor or group from its own amax takes a pass more: one finds
the amax.

An array is seen as [A, M, B, N]: blocks along M and N, B between them; a row of the array is SPLIT of M's.
"""

import os
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.quantize import (
    Rows,
    Tiles,
    choose_panel,
    choose_scaled,
)
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.formats import (
    largest_bits,
    result_types,
    scale_bytes,
    scaling,
    stored_scale,
)
from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.scales import reciprocal, tensor_scales

# Triton's types by the names of JAX's: those between two quantizations, and those of 8 bits.
TYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
}


@triton.jit
def without_subnormal(x):
    """Zeros of their sign in place of subnormal numbers."""
    return tl.inline_asm_elementwise(
        "mul.ftz.f32 $0, $1, 0f3F800000;", "=f,f", [x], tl.float32, True, 1
    )


@triton.jit
def power_of_2(biased):
    """2^(biased - 127) for 0 .. 254, NaN for 255."""
    bits = tl.where(biased == 0, 0x00400000, biased << 23)
    return tl.where(biased == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _excess(magnitudes, LARGEST: tl.constexpr):
    """The biased exponent of the least power of two that is at least amax / largest."""
    above = (magnitudes & 0x7FFFFF) > (LARGEST & 0x7FFFFF)
    return (magnitudes >> 23) - (LARGEST >> 23) + 127 + above.to(tl.int32)


@triton.jit
def block_scales(
    magnitudes, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr
):  # fmt: skip
    """(multiplier, scale as stored) of blocks whose amax has these bits.

    LARGEST and FLOOR are bits of the format's largest number and of the least amax; LIMIT bounds a multiplier.
    """
    INF: tl.constexpr = 0x7F800000
    if SCALE == "float8_e8m0fnu":
        byte = tl.minimum(tl.maximum(_excess(magnitudes, LARGEST), 0), 254)
        byte = tl.where(magnitudes == INF, 254, byte)
        byte = tl.where(magnitudes > INF, 255, byte)
        return power_of_2(tl.where(byte == 255, 255, 254 - byte)), byte.to(tl.uint8)
    else:
        magnitudes = tl.maximum(magnitudes, FLOOR)
        is_regular = (magnitudes > 0) & (magnitudes < INF)
        if SCALE == "power_of_2":
            biased = tl.minimum(254 - _excess(magnitudes, LARGEST), 254)
            biased = tl.where(is_regular, biased, 127)
            return power_of_2(biased), power_of_2(254 - biased)
        else:
            tl.static_assert(SCALE == "float32")
            is_normal = is_regular & (magnitudes > 0x7FFFFF)
            amax = tl.where(is_normal, magnitudes, 0x3F800000).to(tl.float32, bitcast=True)
            largest = tl.full(amax.shape, LARGEST, tl.int32).to(tl.float32, bitcast=True)
            quotient = tl.minimum(tl.div_rn(largest, amax), LIMIT)
            quotient = tl.where(is_normal, quotient, LIMIT)
            multiplier = tl.where(is_regular, quotient, 1.0)
            return multiplier, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), multiplier)


@triton.jit
def magnitudes_of(wide):
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# Triton's interpreter has no machine instructions.
BY_INSTRUCTION = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def rounded(wide, dtype: tl.constexpr):
    """float32 as `dtype`, to nearest, ties to even; in 8 bits saturated.

    Numbers are converted two at a time. To bfloat16 a scalar conversion has an eighth of the rate; to 8 bits Triton
    goes by way of float16 below 9.0, which it truncates to.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [wide], tl.bfloat16, True, 2
        )
    elif BY_INSTRUCTION and dtype.primitive_bitwidth == 8:
        CONVERT: tl.constexpr = (
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
            if dtype == tl.float8e4nv
            else "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;"
        )
        bits = tl.inline_asm_elementwise(CONVERT, "=h,f,f", [wide], tl.int8, True, 2)
        return bits.to(dtype, bitcast=True)
    else:
        return wide.to(dtype)


@triton.jit
def count_live(sizes, G: tl.constexpr, G_POW2: tl.constexpr):
    index_G = tl.arange(0, G_POW2)
    return tl.sum(tl.load(sizes + index_G, mask=index_G < G, other=0))


@triton.jit
def quantized_tile(
    wide, BM: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """(data [TM, TN], scale [TM / BM, TN / BN]) of float32[TM, TN] in blocks of BM x BN."""
    TM: tl.constexpr = wide.shape[0]
    TN: tl.constexpr = wide.shape[1]
    blocks = wide.reshape(TM // BM, BM, TN // BN, BN)
    amax = tl.max(tl.max(magnitudes_of(blocks), 3), 1)
    multiplier, scale = block_scales(amax, SCALE, LARGEST, LIMIT, FLOOR)
    scaled = blocks * multiplier[:, None, :, None]
    return rounded(scaled.reshape(TM, TN), dtype), scale


@triton.jit
def store_scale(
    pointer, scale, a, m, i, n,
    M: tl.constexpr, B: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The scales of the tile whose first element is [a, m, i, n], into [A, ceil(M / BM), B, ceil(N / BN)]."""
    NUM_M: tl.constexpr = (M + BM - 1) // BM
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    rows = m // BM + tl.arange(0, scale.shape[0])[:, None]
    columns = n // BN + tl.arange(0, scale.shape[1])[None, :]
    at = ((a * NUM_M + rows).to(tl.int64) * B + i) * NUM_N + columns
    tl.store(pointer + at, scale, mask=(rows < NUM_M) & (columns < NUM_N))


@triton.jit
def _tile(M: tl.constexpr, B: tl.constexpr, N: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr):
    """A program's tile of [A, M, B, N]: where it begins, its rows, which elements exist, and their offsets."""
    NUM_M: tl.constexpr = (M + TM - 1) // TM
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    tile = tl.program_id(0)
    n = tile % NUM_N * TN
    i = tile // NUM_N % B
    m = tile // (NUM_N * B) % NUM_M * TM
    a = tile // (NUM_N * B * NUM_M)
    rows = m + tl.arange(0, TM)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    at = ((a.to(tl.int64) * M + rows) * B + i) * N + columns
    return a, m, i, n, rows, inside, at


@triton.jit
def _blocks_kernel(
    x, sizes, data, scale,
    M: tl.constexpr, B: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, SPLIT: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Blocks of BM x BN, each with its scale; with G groups, padding rows count as zeros."""
    a, m, i, n, rows, inside, at = _tile(M, B, N, TM, TN)
    live = inside
    if G:
        live = live & (rows < count_live(sizes, G, G_POW2) * SPLIT)
    wide = tl.load(x + at, mask=live, other=0).to(tl.float32)
    dtype: tl.constexpr = data.dtype.element_ty
    q, stored = quantized_tile(wide, BM, BN, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    tl.store(data + at, q, mask=inside)
    store_scale(scale, stored, a, m, i, n, M, B, N, BM, BN)


@triton.jit
def store_along_rows(
    pointer, q, at, inside, m, n, end, M: tl.constexpr, TRANSPOSED: tl.constexpr, EVICT: tl.constexpr = ""
):  # fmt: skip
    """The tile at [m, n] of the copy in blocks along the rows, up to column `end`: [M, N], or TRANSPOSED, [N, M]."""
    if TRANSPOSED:
        rows = m + tl.arange(0, q.shape[0])[None, :]
        columns = n + tl.arange(0, q.shape[1])[:, None]
        there = columns.to(tl.int64) * M + rows
        is_inside = (rows < M) & (columns < end)
        tl.store(pointer + there, tl.trans(q), mask=is_inside, eviction_policy=EVICT)
    else:
        tl.store(pointer + at, q, mask=inside, eviction_policy=EVICT)


@triton.jit
def in_panels(
    tile, M: tl.constexpr, N: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, PANEL: tl.constexpr
):
    """(m, n): where a tile of [M, N] begins.

    Tiles follow one another along a row of PANEL tiles, then down the rows, then panel by panel: what rows at an index
    share of a panel is read while L2 has it. Where a panel is as wide as a row, a tile's number is divided once.
    """
    NUM_M: tl.constexpr = (M + TM - 1) // TM
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    tl.static_assert(NUM_N % PANEL == 0)
    first = 0  # column of tiles
    if PANEL != NUM_N:
        first = tile // (NUM_M * PANEL) * PANEL
        tile = tile % (NUM_M * PANEL)
    return tile // PANEL * TM, (first + tile % PANEL) * TN


@triton.jit
def _both_kernel(
    x, index, sizes, data, scale, data_rows, scale_rows,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, PANEL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[M, N] in blocks of 1 x BLOCK, and again in blocks of BLOCK x 1, [N, M] if TRANSPOSED; otherwise as
    `_blocks_kernel`. Rows are those of x at the index [M], zeros where it is negative, unless it is None; their scales
    then lie with the rows contiguous, as tiles below each other follow one another."""
    EVICT: tl.constexpr = "evict_first" if index is not None else ""
    m, n = in_panels(tl.program_id(0), M, N, TM, TN, PANEL)
    rows = m + tl.arange(0, TM)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    live = inside
    if G:
        live = live & (rows < count_live(sizes, G, G_POW2) * SPLIT)
    at = rows.to(tl.int64) * N + columns
    from_at = at
    if index is not None:
        row = tl.load(index + rows, mask=rows < M, other=-1)
        live = live & (row >= 0)
        from_at = row.to(tl.int64) * N + columns
    wide = tl.load(x + from_at, mask=live, other=0).to(tl.float32)
    dtype: tl.constexpr = data.dtype.element_ty
    q, stored = quantized_tile(wide, 1, BLOCK, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    tl.store(data + at, q, mask=inside, eviction_policy=EVICT)
    if index is None:
        store_scale(scale, stored, 0, m, 0, n, M, 1, N, 1, BLOCK)
    else:
        store_scale(scale, tl.trans(stored), 0, n, 0, m, N, 1, M, BLOCK, 1)
    q, stored = quantized_tile(wide, BLOCK, 1, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    store_along_rows(data_rows, q, at, inside, m, n, N, M, TRANSPOSED, EVICT)
    store_scale(scale_rows, stored, 0, m, 0, n, M, 1, N, BLOCK, 1)


@triton.jit
def _converted_again(wide, dtype: tl.constexpr):
    """The bits of `rounded(wide, dtype)`, by conversions of their own.

    Where one conversion's result leaves both whole and byte by byte, ptxas 12.9 stores bytes that nothing wrote. Only
    the select keeps the compiler from making one of the two; it does not know that a grid has one dimension.
    """
    return rounded(tl.where(tl.program_id(1) == 0, wide, 0), dtype)


@triton.jit
def _dequantize_kernel(
    data, scale, out,
    M: tl.constexpr, B: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """data * scale of blocks of BM x BN, scales as `_blocks_kernel` stores them; subnormal products are zeros."""
    a, m, i, n, rows, inside, at = _tile(M, B, N, TM, TN)
    wide = tl.load(data + at, mask=inside).to(tl.float32)
    BLOCKS_M: tl.constexpr = (M + BM - 1) // BM
    BLOCKS_N: tl.constexpr = (N + BN - 1) // BN
    block_rows = m // BM + tl.arange(0, TM // BM)[:, None]
    block_columns = n // BN + tl.arange(0, TN // BN)[None, :]
    block_at = ((a * BLOCKS_M + block_rows).to(tl.int64) * B + i) * BLOCKS_N + block_columns
    exists = (block_rows < BLOCKS_M) & (block_columns < BLOCKS_N)
    factor = tl.load(scale + block_at, mask=exists, other=0)
    if scale.dtype.element_ty == tl.uint8:
        factor = power_of_2(factor.to(tl.int32))
    blocks = wide.reshape(TM // BM, BM, TN // BN, BN) * factor[:, None, :, None]
    product = blocks.reshape(TM, TN)
    product = tl.where(tl.abs(product) < 2.0**-126, product * 0, product)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _groups_of(rows, ends, G: tl.constexpr, STEPS: tl.constexpr):
    """The group of each row: how many of G groups end at or before it, by bisection."""
    groups = tl.zeros_like(rows)
    for step in tl.static_range(STEPS):
        more = groups + (1 << (STEPS - 1 - step))
        end = tl.load(ends + more - 1, mask=more <= G, other=0x7FFFFFFF)
        groups = tl.where(end <= rows, more, groups)
    return groups


FLOAT32_LARGEST = tl.constexpr(numerics.largest("float32"))


@triton.jit
def _scales_of(amaxes, a, SPLITS: tl.constexpr, LARGEST: tl.constexpr):
    """(multiplier, scale), [1] each, of tensor a, whose amax is the largest of its `amaxes`, int32[_, SPLITS]."""
    parts = tl.load(amaxes + a * SPLITS + tl.arange(0, SPLITS)[None, :])
    return block_scales(tl.max(parts, 1), "float32", LARGEST, FLOAT32_LARGEST, 0)


@triton.jit
def _scaled_kernel(
    x, index, multiplier, amaxes, ends, data, amax, data_rows, scale,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, STEPS: tl.constexpr, CLEARS: tl.constexpr,
    SPLITS: tl.constexpr, LARGEST: tl.constexpr, COPIES: tl.constexpr, COPIES_POW2: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """data = x * multiplier of [A, M, N], the amax of each row of a tile, int32[A, M, ceil(N / TN)], and the data again
    as [A, N, M].

    The multiplier is [A], or with G groups of the rows of M (A = 1), which end at `ends`, [G]; padding rows count as
    zeros, or, unless it CLEARS them, may be left as they are. Where it is None, it is made of `amaxes`, int32[A,
    SPLITS], parts of the amax, and so is the scale, [A], or of one tensor [COPIES]. Rows are those of x at the index
    [M] (A = 1), zeros where it is negative, unless it is None. Without what is None.

    What is written begins with the last rows: L2 has them of the kernel before, and the first ones for the GEMM behind.
    """
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    EVICT: tl.constexpr = "evict_first" if index is not None else ""
    TILES: tl.constexpr = (M + TM - 1) // TM * ((N + TN - 1) // TN)
    WRITES: tl.constexpr = (data is not None) or (data_rows is not None)
    tile = tl.program_id(0)
    if WRITES:
        tile = tl.num_programs(0) - 1 - tile
    a = tile // TILES
    m, n = in_panels(tile % TILES, M, N, TM, TN, PANEL)
    if scale is not None:
        if tile % TILES == TILES - 1:  # the first program of a tensor
            _, of_a = _scales_of(amaxes, a, SPLITS, LARGEST)
            copy = tl.arange(0, COPIES_POW2)
            tl.store(scale + a + copy, tl.sum(of_a, 0), mask=copy < COPIES)
    if not CLEARS:
        if m >= tl.load(ends + G - 1):
            return
    row_TM = m + tl.arange(0, TM)
    rows = row_TM[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    live = inside
    if G:
        if not WRITES:
            live = live & (rows < tl.load(ends + G - 1))
        else:
            group_TM = _groups_of(row_TM, ends, G, STEPS)
            live = live & (group_TM < G)[:, None]
    at = (a.to(tl.int64) * M + rows) * N + columns
    from_at = at
    if index is not None:
        from_TM = tl.load(index + row_TM, mask=row_TM < M, other=-1)
        live = live & (from_TM >= 0)[:, None]
        from_at = from_TM.to(tl.int64)[:, None] * N + columns
    wide = tl.load(x + from_at, mask=live, other=0).to(tl.float32)
    if WRITES:
        if multiplier is None:
            factor, _ = _scales_of(amaxes, a, SPLITS, LARGEST)
            factor = factor[:, None]
        elif G:
            factor = tl.load(multiplier + group_TM, mask=group_TM < G, other=0)[:, None]
        else:
            factor = tl.load(multiplier + a)
        if data is not None:
            q = rounded(wide * factor, data.dtype.element_ty)
            tl.store(data + at, q, mask=inside, eviction_policy=EVICT)
        if data_rows is not None:
            again = _converted_again(wide * factor, data_rows.dtype.element_ty)
            matrix = data_rows + a.to(tl.int64) * (M * N)
            store_along_rows(matrix, again, at, inside, m, n, N, M, True, EVICT)
    if amax is not None:
        part = (a.to(tl.int64) * M + row_TM) * NUM_N + n // TN
        tl.store(amax + part, tl.max(magnitudes_of(wide), 1), mask=row_TM < M)


@triton.jit
def _group_amax_kernel(
    parts, ends, amax,
    M: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, BY_PART: tl.constexpr,
):  # fmt: skip
    """amax[g, i]: the largest of parts [M, PARTS], or [PARTS, M] if BY_PART, in the rows of group g, BLOCK of them in
    SPLITS * BLOCK."""
    group = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(ends + group), M)
    most = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(start + split * BLOCK, end, SPLITS * BLOCK):
        rows = first + tl.arange(0, BLOCK)
        live = rows < end
        at = rows.to(tl.int64) * (1 if BY_PART else PARTS)
        for part in tl.range(PARTS):
            here = parts + at + part.to(tl.int64) * (M if BY_PART else 1)
            most = tl.maximum(most, tl.load(here, mask=live, other=0))
    tl.store(amax + tl.program_id(0), tl.max(most, 0))


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
ROWS = Tiles(elements=4096, columns=1024, warps=4)
COLUMNS = Tiles(elements=8192, columns=64, warps=4)
SQUARE = Tiles(elements=16384, columns=128, warps=8)
# NVIDIA H200, 2026-11-22
WIDE_ROWS = Tiles(elements=4096, columns=1024, warps=4)
WIDE_COLUMNS = Tiles(elements=8192, columns=256, warps=4)
# Of one group 16 programs read 512 rows at a time: 256 groups fill a GPU, and one that has all rows is no long wait.
GROUP_SPLITS, GROUP_ROWS = 16, 512


def quantize(x, multiplier, key, *, format, block, batch_dims, amax_axes=(), origin=()):
    """The leaves of what the reference of `quantization/quantize.py` gives."""
    del key, origin
    if block:
        return blocks(x, None, format, block)
    leading, inner = x.shape[:batch_dims], x.shape[batch_dims:]
    shape = (prod(leading), prod(inner[:-1]), prod(inner[-1:]))

    def found(parts):
        return _amax_of_tensors(parts, leading, amax_axes)

    return by_tensor(x, multiplier, shape, found, format)


def by_tensor(
    x, multiplier, shape, found, format, *, parts=None, ends=None, index=None, twice=False, clear_padding=True
):  # fmt: skip
    """A scale per tensor or group: (data, scale), or by a given multiplier (data, scale, amax).

    Then, if `twice`, the data as the weight gradient reads them (A = 1).

    Args:
      multiplier: None: of the amax.
      shape: (A, M, N) of what is quantized: `x`, or its rows at the index.
      found: from int32[A, rows, parts of a row] to the amax of each tensor or group.
      parts: what `found` is given, where what made the rows has found it.
      ends: int32[G] of the groups; None without.
      index: int32[1, M], rows of `x` [1, rows, ...], with a multiplier; see `_scaled_kernel`.
      clear_padding: whether the data of padding rows, behind the last group, are zeros, or undefined.
    """
    options = dict(ends=ends, index=index, twice=twice, clear_padding=clear_padding)
    if multiplier is not None:
        finds_amax = parts is None
        data, *more = scaled(x, multiplier, shape, format.dtype, finds_amax=finds_amax, **options)
        parts = more.pop(0) if finds_amax else parts
        return data, reciprocal(multiplier), numerics.from_magnitude(found(parts)), *more
    if parts is None:
        (parts,) = scaled(x, None, shape, None, ends=ends, finds_amax=True)
    amax = found(parts)
    if ends is not None:
        # A kernel would make a group's for each of its rows.
        multiplier, scale = tensor_scales(amax, format)
        data, *again = scaled(x, multiplier, shape, format.dtype, **options)
        return data, scale, *again
    data, *more = scaled(x, None, shape, format.dtype, amaxes=amax[..., None], **options)
    return data, more.pop().reshape(amax.shape), *more


def scaled(
    x, multiplier, shape, dtype, *,
    amaxes=None, copies=1, ends=None, index=None, finds_amax=False, twice=False, clear_padding=True,
):  # fmt: skip
    """(`x` times its multiplier in `dtype`, the amax of parts of rows, the former as the weight gradient reads them,
    the scale), without what is not wanted (dtype=None). The scale is that of `amaxes`, int32[..., parts] of tensors,
    which takes the place of a multiplier; of one tensor so many `copies`."""
    A, M, N = shape
    G = 0 if ends is None else ends.shape[0]
    config = choose_scaled(Rows(M, N, x.dtype, 0, current_device()), twice=twice)
    TN = config.tiles.columns if config.transposed else launcher.divisor(N, config.tiles.columns)
    TM = config.tiles.elements // TN
    like = x.shape if index is None else (1, M, *x.shape[2:])
    types = {
        "data": dtype is not None and (like, dtype),
        "amax": finds_amax and ((A, M, triton.cdiv(N, TN)), jnp.int32),
        "data_rows": config.transposed and ((A, N, M), dtype),
        "scale": amaxes is not None and ((A * copies,), jnp.float32),
    }
    wanted = {name: jax.ShapeDtypeStruct(*of) for name, of in types.items() if of}
    absent: dict[str, Any] = {name: None for name in types if name not in wanted}
    results = launcher.triton_call(
        x, index, multiplier, amaxes, ends,
        kernel=_scaled_kernel, out_type=tuple(wanted.values()), num_warps=config.tiles.warps,
        grid=(A * triton.cdiv(M, TM) * triton.cdiv(N, TN),),
        M=M, N=N, TM=TM, TN=TN, G=G, STEPS=G.bit_length(), CLEARS=clear_padding or not G,
        SPLITS=1 if amaxes is None else amaxes.shape[-1], LARGEST=largest_bits(dtype),
        COPIES=copies, COPIES_POW2=triton.next_power_of_2(copies),
        **panel_of(x, index, N, TN), **absent,
    )  # fmt: skip
    # What a collective takes must vary over its axes, and a custom call's results do not say that they do.
    made = dict(zip(wanted, _jax.match_varying((x, *results))[1:], strict=True))
    if config.transposed:
        made["data_rows"] = made["data_rows"][0].T.reshape(like)
    elif twice:
        made["data_rows"] = made["data"]
    return tuple(made[name] for name in types if name in made)


def panel_of(x, index, N: int, TN: int) -> dict:
    """How many tiles of TN columns are a panel: all N, or of rows of `x` [1, rows, ...] at an index, as chosen."""
    across = triton.cdiv(N, TN)
    if index is not None:
        return {"PANEL": choose_panel(x.shape[1], TN * x.dtype.itemsize, across)}
    return {"PANEL": across}


def group_amax(parts, ends, *, by_part: bool = False):
    """int32[G], the largest parts of rows in groups.

    Args:
      parts: int32[rows, parts of a row], or int32[parts of a row, rows] if `by_part`.
      ends: int32[G], of the groups.
    """
    num_rows, num_parts = parts.shape[::-1] if by_part else parts.shape
    G, SPLITS = ends.shape[0], GROUP_SPLITS
    amax = launcher.triton_call(
        parts, ends,
        kernel=_group_amax_kernel, out_type=jax.ShapeDtypeStruct((G, SPLITS), jnp.int32),
        grid=(G * SPLITS,), num_warps=4,
        M=num_rows, PARTS=num_parts, SPLITS=SPLITS, BLOCK=GROUP_ROWS, BY_PART=by_part,
    )  # fmt: skip
    amax = _jax.match_varying((parts, amax))[1]
    # Halves, not a reduction, which would be a launch of its own before the one that makes scales of it.
    while amax.shape[1] > 1:
        amax = jnp.maximum(*jnp.split(amax, 2, axis=1))
    return amax[:, 0]


def view(shape: tuple[int, ...], block: tuple[int, ...]):
    """((A, M, B, N), (BM, BN)) of an array with these blocks."""
    along, last = [dim for dim, b in enumerate(block) if b > 1], len(shape) - 1
    first = along[0] if along else last
    if first == last:
        return (1, prod(shape[:last]), 1, shape[last]), (1, block[last])
    ahead = prod(shape[:first])
    if along == [first]:
        return (ahead, shape[first], 1, prod(shape[first + 1 :])), (block[first], 1)
    if along == [first, last]:
        between = prod(shape[first + 1 : last])
        return (ahead, shape[first], between, shape[last]), (block[first], block[last])
    raise ValueError(f"quantize: two blocks must end in the last dimension; got {block}; transpose")


def blocks(x, sizes, format, block, tiles: Tiles | None = None):
    """(data, scale) of blocks; with the sizes of groups, int32[G], `x` is [1, C, ...]."""
    (A, M, B, N), (BM, BN) = view(x.shape, block)
    if tiles is None:
        tiles = ROWS if BM == 1 else COLUMNS if BN == 1 else SQUARE
    TM = BM
    TN = max(BN, tiles.elements // BM)
    if BM == 1:
        TN = max(BN, launcher.divisor(N, tiles.columns))
        TM = tiles.elements // TN
    counts = tuple(-(-n // b) for n, b in zip(x.shape, block, strict=True))
    data, scale = launcher.triton_call(
        x, sizes,
        kernel=_blocks_kernel, out_type=result_types(x.shape, counts, format), num_warps=tiles.warps,
        grid=(A * triton.cdiv(M, TM) * B * triton.cdiv(N, TN),),
        M=M, B=B, N=N, BM=BM, BN=BN, TM=TM, TN=TN,
        **scaling(x.dtype, format), **_groups(sizes, M, x),
    )  # fmt: skip
    return data, stored_scale(scale, format)


def dequantize_array(q, *, block):
    """As the reference of `quantization/quantize.py`, for blocks."""
    return dequantize(q.data, q.scale, block=block, dtype=q.dtype)


def dequantize(data, scale, *, block, dtype, tiles: Tiles | None = None):
    """`data * scale` in `dtype`."""
    (A, M, B, N), (BM, BN) = view(data.shape, block)
    tiles = tiles or (WIDE_ROWS if BM == 1 else WIDE_COLUMNS)
    TN = max(BN, launcher.divisor(N, tiles.columns))
    TM = max(BM, tiles.elements // TN)
    return launcher.triton_call(
        data, scale_bytes(scale),
        kernel=_dequantize_kernel, out_type=jax.ShapeDtypeStruct(data.shape, dtype),
        grid=(A * triton.cdiv(M, TM) * B * triton.cdiv(N, TN),), num_warps=tiles.warps,
        M=M, B=B, N=N, BM=BM, BN=BN, TM=TM, TN=TN,
    )  # fmt: skip


def launch_both(x, index, sizes, *, config, format, out_type):
    """Data and scales, in blocks along the columns and along the rows, of rows [1, C, ...].

    Args:
      index: int32[1, C], of the rows of `x`, zeros where it is negative; None: they are those of `x`.
      out_type: of the results. The first scales are [N / block, C] with an index, N the numbers of a row; the data
        along the rows are [N, C] if transposed.
    """
    (_, C, *rest), BLOCK, tiles = out_type[0].shape, format.block[1], config.tiles
    N, TN = prod(rest), max(BLOCK, tiles.columns)
    TM = max(BLOCK, tiles.elements // TN)
    return launcher.triton_call(
        x, index, sizes,
        kernel=_both_kernel, out_type=out_type, num_warps=tiles.warps,
        grid=(triton.cdiv(C, TM) * triton.cdiv(N, TN),),
        M=C, N=N, BLOCK=BLOCK, TM=TM, TN=TN, TRANSPOSED=config.transposed,
        **panel_of(x, index if tiles.panels else None, N, TN),
        **scaling(x.dtype, format), **_groups(sizes, C, x if index is None else index),
    )  # fmt: skip


def amax_of_matrices(x, batch_dims: int, amax_axes):
    """int32[*leading], the bits of the largest magnitude of each matrix of x [*leading, ...]."""
    leading, inner = x.shape[:batch_dims], x.shape[batch_dims:]
    shape = prod(leading), inner[0], prod(inner[1:])
    (parts,) = scaled(x, None, shape, None, finds_amax=True)
    return _amax_of_tensors(parts, leading, amax_axes)


def _amax_of_tensors(parts, leading: tuple[int, ...], amax_axes):
    """int32[*leading] of int32[A, rows, parts of a row]."""
    amax = jnp.max(parts, axis=(1, 2)).reshape(leading)
    return jax.lax.pmax(amax, amax_axes) if amax_axes else amax


def _groups(sizes, M: int, x) -> dict:
    """What the kernels know of groups: how many, and rows of M per row of the array."""
    G = 0 if sizes is None else sizes.shape[0]
    return {
        "G": G,
        "G_POW2": triton.next_power_of_2(G) if G else 0,
        "SPLIT": M // x.shape[1] if G else 1,
    }
