"""Rows quantized along their features, quantized again along the rows, for NVIDIA GPUs: a byte is read for each number
and one is written. Bit for bit the kernels of `kernels/quantize.py` one after the other. For blocks of 128 Hopper's is
in CUDA C++ (`grouped_requantize.cu`).
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher, quantize
from expertmesh.core.kernels.quantize import (
    HopperTiles,
    _num_live,
    _power_of_2,
    _quantized_tile,
    _rounded,
    _store_along_rows,
    _store_scale,
)


@triton.jit
def _without_subnormal(x):
    """Zeros of their sign in place of subnormal numbers."""
    return tl.inline_asm_elementwise(
        "mul.ftz.f32 $0, $1, 0f3F800000;", "=f,f", [x], tl.float32, True, 1
    )


@triton.jit
def _requantize_kernel(
    data, scale, sizes, out, out_scale,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[M, N], as bytes, in blocks of 1 x BLOCK to blocks of BLOCK x 1, [N, M] if TURNED; between them in WIDE."""
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    BLOCKS_N: tl.constexpr = (N + BLOCK - 1) // BLOCK
    n = tl.program_id(0) % NUM_N * TN
    m = tl.program_id(0) // NUM_N * BLOCK
    rows = m + tl.arange(0, BLOCK)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    num_live = tl.minimum(_num_live(sizes, G, G_POW2), M)
    at, live = rows.to(tl.int64) * N + columns, inside & (rows < num_live)
    codes = tl.load(data + at, mask=live, other=0)
    narrow = codes.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    PART: tl.constexpr = min(TN, BLOCK)  # of a block
    blocks = n // BLOCK + tl.arange(0, TN // PART)[None, :]
    there = rows.to(tl.int64) * BLOCKS_N + blocks
    factor = tl.load(scale + there, mask=(rows < num_live) & (blocks < BLOCKS_N), other=0)
    if scale.dtype.element_ty == tl.uint8:
        factor = _power_of_2(factor.to(tl.int32))
    product = narrow.reshape(BLOCK, TN // PART, PART) * factor[:, :, None]
    wide = _rounded(_without_subnormal(product), WIDE).reshape(BLOCK, TN).to(tl.float32)
    q, stored = _quantized_tile(wide, BLOCK, 1, out.dtype.element_ty, SCALE, LARGEST, LIMIT, FLOOR)
    _store_along_rows(out, q, at, inside, m, n, N, M, TURNED)
    _store_scale(out_scale, stored, 0, m, 0, n, M, 1, N, BLOCK, 1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of a tile, whose rows are a block's, and its warps."""

    columns: int
    warps: int


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
LARGE = Tiles(columns=128, warps=4)
SMALL = Tiles(columns=128, warps=2)
HOPPER = HopperTiles(warps=8, programs=2)
_WIDE = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


def grouped_requantize(source, group_sizes, multiplier, key, *, format, zero_rest=True, **options):
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant; without
    `zero_rest` rows after the last group may be unwritten."""
    del multiplier, key, options  # a block lies within a shard
    data, scale, dtype = source.base.data, source.base.scale, source.base.dtype
    _, C, K = data.shape
    # Where nothing turns the two are as fast.
    on_hopper = quantize.is_turned(format.block[1]) and quantize.suits_hopper(C, K, dtype, format)
    run = partial(launch_hopper, zero_rest=zero_rest) if on_hopper else launch
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    data_bytes = jax.lax.bitcast_convert_type(data, jnp.uint8)
    sizes = group_sizes[0].astype(jnp.int32)
    out, out_scale = run(data_bytes, scale, sizes, format=format, dtype=jnp.dtype(dtype))
    out = out.T.reshape(data.shape) if quantize.is_turned(format.block[1]) else out
    return out, quantize._stored(out_scale, format)


def _results(data, format):
    (_, C, K), BLOCK = data.shape, format.block[1]
    shape = (K, C) if quantize.is_turned(BLOCK) else data.shape
    return quantize._results(shape, (1, triton.cdiv(C, BLOCK), K), format)


def launch_hopper(
    data, scale, sizes, *, format, dtype, zero_rest=True, tiles: HopperTiles = HOPPER
):
    _, C, K = data.shape
    return quantize.launch_hopper(
        data, scale, sizes,
        source=hopper_source(dtype, format=format, tiles=tiles),
        name="grouped_requantize", rows=C, columns=K, zero_rest=zero_rest, tiles=tiles,
        out_type=_results(data, format),
    )  # fmt: skip


def hopper_source(dtype, *, format, tiles: HopperTiles) -> quantize.HopperSource:
    """The kernel in CUDA C++ with `dtype` between the two formats."""
    file = "grouped_requantize.cu"
    return quantize.hopper_source(file, dtype, format, tiles, halves=1, slot=8)


def launch(data, scale, sizes, *, format, dtype, tiles: Tiles | None = None):
    (_, C, K), BLOCK, G = data.shape, format.block[1], sizes.shape[0]
    tiles = tiles or (LARGE if BLOCK > 32 else SMALL)
    TN = tiles.columns
    return launcher.triton_call(
        data, scale, sizes,
        kernel=_requantize_kernel, out_type=_results(data, format), num_warps=tiles.warps,
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(K, TN),),
        M=C, N=K, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, WIDE=_WIDE[dtype.name], TN=TN,
        TURNED=quantize.is_turned(BLOCK), **quantize._scaling(jax.ShapeDtypeStruct((), dtype), format),
    )  # fmt: skip
