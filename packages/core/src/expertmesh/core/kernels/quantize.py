"""Quantization to 8 bits, and back, for NVIDIA GPUs: numbers are read once, data and scales are written once.

Bit for bit the reference of `quantization/quantize.py`: magnitudes are compared as integers, quotients are rounded as
IEEE 754 says (div.rn), products keep subnormal numbers (no ftz), and the hardware's conversion rounds to nearest, ties
to even, saturates, and writes NaN as 0x7F. A scale per tensor or group from its own amax takes a pass more: one finds
the amax.

An array is seen as [A, M, B, N]: blocks along M and N, B between them; a row of the array is SPLIT of M's.
"""

import dataclasses
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.cuda_call import cuda_call, nvrtc, source_text
from expertmesh.core.kernels.grouped_gemm import _num_programs, _num_steps
from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.scales import reciprocal, tensor_scales


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Elements and, at most, columns of a tile, and its warps."""

    elements: int
    columns: int
    warps: int


@triton.jit
def _power_of_2(biased):
    """2^(biased - 127) for 0 .. 254, NaN for 255."""
    bits = tl.where(biased == 0, 0x00400000, biased << 23)
    return tl.where(biased == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _excess(magnitudes, LARGEST: tl.constexpr):
    """The biased exponent of the least power of two that is at least amax / largest."""
    above = (magnitudes & 0x7FFFFF) > (LARGEST & 0x7FFFFF)
    return (magnitudes >> 23) - (LARGEST >> 23) + 127 + above.to(tl.int32)


@triton.jit
def _block_scales(
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
        return _power_of_2(tl.where(byte == 255, 255, 254 - byte)), byte.to(tl.uint8)
    else:
        magnitudes = tl.maximum(magnitudes, FLOOR)
        is_regular = (magnitudes > 0) & (magnitudes < INF)
        if SCALE == "power_of_2":
            biased = tl.minimum(254 - _excess(magnitudes, LARGEST), 254)
            biased = tl.where(is_regular, biased, 127)
            return _power_of_2(biased), _power_of_2(254 - biased)
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
def _magnitudes(wide):
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(wide, dtype: tl.constexpr):
    """`wide.to(dtype)`: to bfloat16 two at a time, which a scalar conversion does at an eighth of the rate."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [wide], tl.bfloat16, True, 2
        )
    else:
        return wide.to(dtype)


@triton.jit
def _num_live(sizes, G: tl.constexpr, G_POW2: tl.constexpr):
    index_G = tl.arange(0, G_POW2)
    return tl.sum(tl.load(sizes + index_G, mask=index_G < G, other=0))


@triton.jit
def _quantized_tile(
    wide, BM: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """(data [TM, TN], scale [TM / BM, TN / BN]) of float32[TM, TN] in blocks of BM x BN."""
    TM: tl.constexpr = wide.shape[0]
    TN: tl.constexpr = wide.shape[1]
    blocks = wide.reshape(TM // BM, BM, TN // BN, BN)
    amax = tl.max(tl.max(_magnitudes(blocks), 3), 1)
    multiplier, scale = _block_scales(amax, SCALE, LARGEST, LIMIT, FLOOR)
    scaled = blocks * multiplier[:, None, :, None]
    return scaled.reshape(TM, TN).to(dtype), scale


@triton.jit
def _store_scale(
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
    """Blocks of BM x BN, each with its scale; with G groups, the rows after the last one count as zeros."""
    a, m, i, n, rows, inside, at = _tile(M, B, N, TM, TN)
    live = inside
    if G:
        live = live & (rows < _num_live(sizes, G, G_POW2) * SPLIT)
    wide = tl.load(x + at, mask=live, other=0).to(tl.float32)
    dtype: tl.constexpr = data.dtype.element_ty
    q, stored = _quantized_tile(wide, BM, BN, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    tl.store(data + at, q, mask=inside)
    _store_scale(scale, stored, a, m, i, n, M, B, N, BM, BN)


@triton.jit
def _store_along_rows(pointer, q, at, inside, m, n, end, M: tl.constexpr, TURNED: tl.constexpr):
    """The tile at [m, n] of the copy in blocks along the rows, up to column `end`: [M, N], or TURNED, [N, M]."""
    if TURNED:
        rows = m + tl.arange(0, q.shape[0])[None, :]
        columns = n + tl.arange(0, q.shape[1])[:, None]
        there = columns.to(tl.int64) * M + rows
        tl.store(pointer + there, tl.trans(q), mask=(rows < M) & (columns < end))
    else:
        tl.store(pointer + at, q, mask=inside)


@triton.jit
def _both_kernel(
    x, sizes, data, scale, data_rows, scale_rows,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[M, N] in blocks of 1 x BLOCK, and again in blocks of BLOCK x 1, [N, M] if TURNED; otherwise as
    `_blocks_kernel`."""
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    n = tl.program_id(0) % NUM_N * TN
    m = tl.program_id(0) // NUM_N * TM
    rows = m + tl.arange(0, TM)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    live = inside
    if G:
        live = live & (rows < _num_live(sizes, G, G_POW2) * SPLIT)
    at = rows.to(tl.int64) * N + columns
    wide = tl.load(x + at, mask=live, other=0).to(tl.float32)
    dtype: tl.constexpr = data.dtype.element_ty
    q, stored = _quantized_tile(wide, 1, BLOCK, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    tl.store(data + at, q, mask=inside)
    _store_scale(scale, stored, 0, m, 0, n, M, 1, N, 1, BLOCK)
    q, stored = _quantized_tile(wide, BLOCK, 1, dtype, SCALE, LARGEST, LIMIT, FLOOR)
    _store_along_rows(data_rows, q, at, inside, m, n, N, M, TURNED)
    _store_scale(scale_rows, stored, 0, m, 0, n, M, 1, N, BLOCK, 1)


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
        factor = _power_of_2(factor.to(tl.int32))
    blocks = wide.reshape(TM // BM, BM, TN // BN, BN) * factor[:, None, :, None]
    product = blocks.reshape(TM, TN)
    product = tl.where(tl.abs(product) < 2.0**-126, product * 0, product)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_kernel(
    x, multiplier, sizes, data, amax, data_rows,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    SPLIT: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """data = x * multiplier of [A, M, N], the amax of each row of a tile, int32[A, M, ceil(N / TN)], and the data again
    as [N, M] (A = 1).

    The multiplier is [A], or with G groups of the rows of M (A = 1) [G]; rows after the last group count as zeros.
    Without what is None.
    """
    NUM_M: tl.constexpr = (M + TM - 1) // TM
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    tile = tl.program_id(0)
    n = tile % NUM_N * TN
    m = tile // NUM_N % NUM_M * TM
    a = tile // (NUM_N * NUM_M)
    row_TM = m + tl.arange(0, TM)
    rows = row_TM[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    live = inside
    if G:
        index_G = tl.arange(0, G_POW2)
        end_G = tl.cumsum(tl.load(sizes + index_G, mask=index_G < G, other=0), 0)
        ended = (end_G[None, :] * SPLIT <= rows) & (index_G < G)[None, :]
        group_TM = tl.sum(ended.to(tl.int32), 1)
        live = live & (group_TM < G)[:, None]
    at = (a.to(tl.int64) * M + rows) * N + columns
    wide = tl.load(x + at, mask=live, other=0).to(tl.float32)
    if data is not None:
        if G:
            factor = tl.load(multiplier + group_TM, mask=group_TM < G, other=0)[:, None]
        else:
            factor = tl.load(multiplier + a)
        q = (wide * factor).to(data.dtype.element_ty)
        tl.store(data + at, q, mask=inside)
        if data_rows is not None:
            # The same bits, converted again: where one conversion's result leaves both whole and byte by byte, ptxas
            # 12.9 stores bytes that nothing wrote. Only the select keeps the compiler from making one of the two.
            again = tl.where(live, wide * factor, 0).to(data.dtype.element_ty)
            _store_along_rows(data_rows, again, at, inside, m, n, N, M, True)
    if amax is not None:
        part = (a.to(tl.int64) * M + row_TM) * NUM_N + n // TN
        tl.store(amax + part, tl.max(_magnitudes(wide), 1), mask=row_TM < M)


# NVIDIA H200, 2026-11-21: docs/dev/performance-log.md says what was measured.
ROWS = Tiles(elements=4096, columns=1024, warps=4)
COLUMNS = Tiles(elements=8192, columns=64, warps=4)
SQUARE = Tiles(elements=16384, columns=128, warps=8)
BOTH = Tiles(elements=16384, columns=128, warps=8)
BOTH_SMALL = Tiles(elements=16384, columns=512, warps=8)
SCALED = Tiles(elements=8192, columns=1024, warps=8)
# NVIDIA H200, 2026-11-22
WIDE_ROWS = Tiles(elements=4096, columns=1024, warps=4)
WIDE_COLUMNS = Tiles(elements=8192, columns=256, warps=4)


def quantize(x, multiplier, key, *, format, block, batch_dims, amax_axes=(), origin=()):
    """The leaves of what the reference of `quantization/quantize.py` gives."""
    del key, origin
    if block:
        return blocks(x, None, format, block)
    lead, inner = x.shape[:batch_dims], x.shape[batch_dims:]
    shape = (prod(lead), prod(inner[:-1]), prod(inner[-1:]))

    def found(parts):
        amax = jnp.max(parts, axis=(1, 2)).reshape(lead)
        return jax.lax.pmax(amax, amax_axes) if amax_axes else amax

    return by_tensor(x, multiplier, None, shape, found, format)


def by_tensor(x, multiplier, sizes, shape, found, format, twice=False):
    """A scale per tensor or group: (data, scale), or by a given multiplier (data, scale, amax).

    Then, if `twice`, the data as the weight gradient reads them (A = 1).

    Args:
      multiplier: None: of the amax.
      sizes: int32[G] of the groups; None without.
      shape: (A, M, N) of `x`.
      found: from int32[A, M, parts of a row] to the amax of each tensor or group.
    """
    if multiplier is not None:
        data, parts, *again = scaled(x, multiplier, sizes, shape, format.dtype, True, twice)
        return data, reciprocal(multiplier), numerics.from_magnitude(found(parts)), *again
    amax = found(*scaled(x, None, sizes, shape, None, finds_amax=True))
    multiplier, scale = tensor_scales(amax, format)
    data, *again = scaled(x, multiplier, sizes, shape, format.dtype, twice=twice)
    return data, scale, *again


def scaled(x, multiplier, sizes, shape, dtype, finds_amax=False, twice=False):
    """(`x` times its multiplier in `dtype`, the amax of parts of rows, the former as the weight gradient reads them),
    without what is not wanted (dtype=None)."""
    A, M, N = shape
    turned = twice and is_turned(0)
    tiles = BOTH if turned else SCALED
    TN = tiles.columns if turned else launcher.divisor(N, tiles.columns)
    TM = tiles.elements // TN
    out = {}
    if dtype is not None:
        out["data"] = jax.ShapeDtypeStruct(x.shape, dtype)
    if finds_amax:
        out["amax"] = jax.ShapeDtypeStruct((A, M, triton.cdiv(N, TN)), jnp.int32)
    if turned:
        out["data_rows"] = jax.ShapeDtypeStruct((N, M), dtype)
    names = "data", "amax", "data_rows"
    absent: dict[str, Any] = {name: None for name in names if name not in out}
    results = launcher.triton_call(
        x, multiplier, sizes,
        kernel=_scaled_kernel, out_type=tuple(out.values()), num_warps=tiles.warps,
        grid=(A * triton.cdiv(M, TM) * triton.cdiv(N, TN),),
        M=M, N=N, TM=TM, TN=TN, **absent, **_groups(sizes, M, x),
    )  # fmt: skip
    # What a collective takes must vary over its axes, and a custom call's results do not say that they do.
    results = _jax.match_varying((x, *results))[1:]
    if turned:
        return *results[:-1], results[-1].T.reshape(x.shape)
    return (*results, results[0]) if twice else results


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
        kernel=_blocks_kernel, out_type=_results(x.shape, counts, format), num_warps=tiles.warps,
        grid=(A * triton.cdiv(M, TM) * B * triton.cdiv(N, TN),),
        M=M, B=B, N=N, BM=BM, BN=BN, TM=TM, TN=TN,
        **_scaling(x, format), **_groups(sizes, M, x),
    )  # fmt: skip
    return data, _stored(scale, format)


def dequantize_array(q, *, block):
    """As the reference of `quantization/quantize.py`, for blocks."""
    return dequantize(q.data, q.scale, block=block, dtype=q.dtype)


def dequantize(data, scale, *, block, dtype, tiles: Tiles | None = None):
    """`data * scale` in `dtype`."""
    (A, M, B, N), (BM, BN) = view(data.shape, block)
    tiles = tiles or (WIDE_ROWS if BM == 1 else WIDE_COLUMNS)
    TN = max(BN, launcher.divisor(N, tiles.columns))
    TM = max(BM, tiles.elements // TN)
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return launcher.triton_call(
        data, scale,
        kernel=_dequantize_kernel, out_type=jax.ShapeDtypeStruct(data.shape, dtype),
        grid=(A * triton.cdiv(M, TM) * B * triton.cdiv(N, TN),), num_warps=tiles.warps,
        M=M, B=B, N=N, BM=BM, BN=BN, TM=TM, TN=TN,
    )  # fmt: skip


def both(x, sizes, format, tiles: Tiles | None = None):
    """(data, scale) of blocks along the last dimension, and of blocks along the rows, of `x` [1, C, ...]."""
    (_, C, *rest), BLOCK = x.shape, format.block[1]
    N = prod(rest)
    tiles = tiles or (BOTH if BLOCK > 32 else BOTH_SMALL)
    TN = max(BLOCK, tiles.columns)
    TM = max(BLOCK, tiles.elements // TN)
    shapes = [(1, C, *rest[:-1], triton.cdiv(rest[-1], BLOCK)), (1, triton.cdiv(C, BLOCK), *rest)]
    first, second = [_results(x.shape, shape, format) for shape in shapes]
    turned = is_turned(BLOCK)
    if turned:
        second = jax.ShapeDtypeStruct((N, C), format.dtype), second[1]
    out = launcher.triton_call(
        x, sizes,
        kernel=_both_kernel, out_type=(*first, *second), num_warps=tiles.warps,
        grid=(triton.cdiv(C, TM) * triton.cdiv(N, TN),),
        M=C, N=N, BLOCK=BLOCK, TM=TM, TN=TN, TURNED=turned,
        **_scaling(x, format), **_groups(sizes, C, x),
    )  # fmt: skip
    along_rows = out[2].T.reshape(x.shape) if turned else out[2]
    return out[0], _stored(out[1], format), along_rows, _stored(out[3], format)


def is_turned(block: int) -> bool:
    """Whether the copy in blocks along the rows lies with its rows contiguous, as Hopper's tensor cores read it.

    The transpose after the kernel and the one before the weight gradient's are then none. Without blocks (0) too.
    """
    return block in (0, 128) and (_jax.compute_capability() or 9.0) == 9.0


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """Of kernels with `quantize.cuh`: the warps that share a block's rows, and programs of a multiprocessor."""

    warps: int
    programs: int


@dataclasses.dataclass(frozen=True)
class HopperSource:
    """Of such a kernel: its text, and bytes of shared memory."""

    text: str
    shared: int


def suits_hopper(rows: int, columns: int, dtype, format) -> bool:
    """Whether kernels in CUDA C++ take such numbers: of 16 bits, eight at a time."""
    return (
        (_jax.compute_capability() or 9.0) == 9.0
        and jnp.dtype(dtype).itemsize == 2
        and format.block[1] in (32, 128)
        and columns % 8 == 0
        and (rows % 16 == 0 or not is_turned(format.block[1]))
        and nvrtc() is not None
    )


def hopper_source(
    file: str, dtype, format, tiles: HopperTiles, *, halves: int, slot: int, **defined
) -> HopperSource:
    """The kernel of `file`; `halves`, `slot` and `defined` are macros of it and of `quantize.cuh`."""
    like, block = jax.ShapeDtypeStruct((), dtype), format.block[1]
    scaling, turned, columns = _scaling(like, format), is_turned(block), 128
    # Of what is read, of multipliers, and where a tile turns.
    read = block // (2 * tiles.warps) * tiles.warps * 32 * slot
    shared = read + (4 * halves + (block if turned else tiles.warps * halves * 2)) * columns
    defined |= dict(
        BLOCK=block, WARPS=tiles.warps, PER_SM=tiles.programs, HALVES=halves, SLOT=slot, SHARED=shared,
        HALF=int(like.dtype == jnp.float16), SCALE=f"scale_{format.scale}", LARGEST=scaling["LARGEST"],
        FLOOR=scaling["FLOOR"], LIMIT=literal(scaling["LIMIT"]),
        FORMAT='"e5m2"' if "e5m2" in format.dtype else '"e4m3"', TURNED=int(turned),
    )  # fmt: skip
    return HopperSource(source_text("quantize.cuh", file, defined=defined), shared)


def launch_hopper(
    *operands, source: HopperSource, name: str, rows: int, columns: int, zero_rest: bool, tiles: HopperTiles, out_type
):  # fmt: skip
    """The results of a kernel of such a source; the last operand is int32[G], the sizes of groups."""
    # 128 x 128 take as long as four steps of a GEMM.
    programs = _num_programs(_num_steps((128, 128, 1), rows, columns, 4)) * tiles.programs
    return cuda_call(
        *operands, source=source.text, name=name, scalars=(rows, rows * zero_rest, columns, operands[-1].shape[0]),
        out_type=out_type, programs=programs, warps=tiles.warps, shared=source.shared,
    )  # fmt: skip


def literal(number: float) -> str:
    """A float in CUDA C++."""
    return f"{float(number)!r}f"


def _results(shape, counts, format):
    """Types of data and scale as the kernels write them: bytes for the scales that Triton has no type of."""
    scale = jnp.uint8 if format.scale == "float8_e8m0fnu" else jnp.float32
    return jax.ShapeDtypeStruct(shape, format.dtype), jax.ShapeDtypeStruct(counts, scale)


def _stored(scale, format):
    if format.scale != "float8_e8m0fnu":
        return scale
    return jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)


def _scaling(x, format) -> dict:
    """What the kernels know of the format."""
    return {
        "SCALE": format.scale,
        "LARGEST": _bits(numerics.largest(format.dtype)),
        "LIMIT": numerics.largest(x.dtype),
        "FLOOR": _bits(format.amax_epsilon),
    }


def _groups(sizes, M: int, x) -> dict:
    """What the kernels know of groups: how many, and rows of M per row of the array."""
    G = 0 if sizes is None else sizes.shape[0]
    return {
        "G": G,
        "G_POW2": triton.next_power_of_2(G) if G else 0,
        "SPLIT": M // x.shape[1] if G else 1,
    }


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
