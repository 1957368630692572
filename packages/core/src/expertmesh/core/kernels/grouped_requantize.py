"""Rows quantized along their features, quantized again along the rows, for NVIDIA GPUs: a byte is read for each number
and one is written. Bit for bit the kernels of `kernels/quantize.py` one after the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from expertmesh.core.kernels import quantize
from expertmesh.core.kernels.launch import target
from expertmesh.core.kernels.quantize import (
    _num_live,
    _power_of_2,
    _quantized_tile,
    _store_along_rows,
    _store_scale,
)


@triton.jit
def _requantize_kernel(
    data, scale, sizes, out, out_scale,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[M, N] in blocks of 1 x BLOCK to blocks of BLOCK x 1, [N, M] if TURNED; between them in the dtype WIDE."""
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
    narrow = tl.where(live, tl.load(data + at, mask=live).to(tl.float32), 0.0)
    blocks = n // BLOCK + tl.arange(0, TN // BLOCK)[None, :]
    there = rows.to(tl.int64) * BLOCKS_N + blocks
    factor = tl.load(scale + there, mask=(rows < num_live) & (blocks < BLOCKS_N), other=0)
    if scale.dtype.element_ty == tl.uint8:
        factor = _power_of_2(factor.to(tl.int32))
    product = narrow.reshape(BLOCK, TN // BLOCK, BLOCK) * factor[:, :, None]
    product = tl.where(tl.abs(product) < 2.0**-126, product * 0, product)
    wide = product.reshape(BLOCK, TN).to(WIDE).to(tl.float32)
    q, stored = _quantized_tile(wide, BLOCK, 1, out.dtype.element_ty, SCALE, LARGEST, LIMIT, FLOOR)
    _store_along_rows(out, q, at, inside, m, n, N, M, TURNED)
    _store_scale(out_scale, stored, 0, m, 0, n, M, 1, N, BLOCK, 1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of a tile, whose rows are a block's, and its warps."""

    columns: int
    warps: int


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
LARGE = Tiles(columns=128, warps=8)
SMALL = Tiles(columns=512, warps=8)
_WIDE = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


def grouped_requantize(
    data,
    scale,
    group_sizes,
    *,
    format,
    blocks,
    dtype,
    amax_axes=(),
    origin=(),
    tiles: Tiles | None = None,
):
    """As the reference of `ops/grouped_requantize.py`, for one participant."""
    del amax_axes, origin  # a block lies within a shard
    (_, C, K), BLOCK, sizes = data.shape, format.block[1], group_sizes[0].astype(jnp.int32)
    tiles = tiles or (LARGE if BLOCK > 32 else SMALL)
    TN, G = max(BLOCK, tiles.columns), sizes.shape[0]
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    turned = quantize.is_turned(BLOCK)
    shape = (K, C) if turned else data.shape
    types = quantize._results(shape, (1, triton.cdiv(C, BLOCK), K), format)
    out, out_scale = jax_triton.triton_call(
        data, scale, sizes,
        kernel=_requantize_kernel, out_type=types, num_warps=tiles.warps,
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(K, TN),),
        M=C, N=K, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, WIDE=_WIDE[dtype.name], TN=TN, TURNED=turned,
        **quantize._scaling(jax.ShapeDtypeStruct((), dtype), format), **target(),
    )  # fmt: skip
    out = out.T.reshape(data.shape) if turned else out
    return out, quantize._stored(out_scale, format)
