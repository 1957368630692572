"""A gated activation, or its gradient, quantized in both directions for NVIDIA GPUs, and not written itself.

Either is rounded to the dtype of h, then as by `triton/quantize.py`: what the compiler, or `triton/activation.py`, and
that kernel give, but for the last bits of float32. Dimension key as in `quantization/activate_quantize.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.formats import scaling
from expertmesh.core.kernels.triton.activation import clamp, load, value_and_slope
from expertmesh.core.kernels.triton.quantize import (
    TYPES,
    block_scales,
    count_live,
    magnitudes_of,
    power_of_2,
    quantized_tile,
    rounded,
    store_along_rows,
    store_scale,
    without_subnormal,
)


@triton.jit
def _sigmoid(x):
    """Within two units of the last place; zero below -87."""
    wide = 1 + tl.exp2(-1.4426950408889634 * x)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [wide], tl.float32, True, 1
    )


@triton.jit
def _half(
    h, h_scale, row, half, n, there, F: tl.constexpr, TN: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """float32 of TN columns of a half of h, which may be bytes of a format, KEPT, in blocks along them, that stand for
    numbers of DTYPE; zeros in rows that are not there."""
    columns = n + tl.arange(0, TN)[None, :]
    live = there
    if F % TN != 0:
        live = there & (columns < F)
    line = 2 * row + half
    if h_scale is None:
        wide = load(h + line * F + columns, live)
    else:
        TM: tl.constexpr = row.shape[0]
        BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
        codes = tl.load(h + line * F + columns, mask=live, other=0).to(KEPT, bitcast=True)
        blocks = n // BLOCK + tl.arange(0, TN // BLOCK)[None, :]
        scale = tl.load(h_scale + line * BLOCKS + blocks, mask=there & (blocks < BLOCKS), other=0)
        if h_scale.dtype.element_ty == tl.uint8:
            scale = power_of_2(scale.to(tl.int32))
        parts = codes.to(tl.float32).reshape(TM, TN // BLOCK, BLOCK)
        wide = rounded(without_subnormal(parts * scale[:, :, None]), DTYPE).to(tl.float32)
        wide = tl.where(live, wide.reshape(TM, TN), 0.0)
    return wide


@triton.jit
def _activated(
    gate, up, weight, DTYPE: tl.constexpr, FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """The activation of parts of h, in its dtype; zeros where they are, as act(0) = 0."""
    gate, up = clamp(gate, up, BOUND)
    if OFFSET != 0:
        up = up + OFFSET
    value, _ = value_and_slope(gate, FUNCTION, _sigmoid)
    value = value * up
    if weight is not None:
        value = weight * value
    return rounded(value, DTYPE)


@triton.jit
def _gradient(
    h, h_scale, d_out, row, n, there, weight, half, F: tl.constexpr, TN: tl.constexpr,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The gradient of a part of one half of h, 0 the gate, in its dtype, and with the gate's the sums over columns of
    the weights'; zeros in rows that are not there, as d_out is 0."""
    raw_gate = _half(h, h_scale, row, 0, n, there, F, TN, BLOCK, KEPT, DTYPE)
    d_weight = tl.zeros((row.shape[0],), tl.float32)
    if half == 0:
        raw_up = _half(h, h_scale, row, 1, n, there, F, TN, BLOCK, KEPT, DTYPE)
        gate, up = clamp(raw_gate, raw_up, BOUND)
        value, slope = value_and_slope(gate, FUNCTION, _sigmoid)
        if weight is not None:
            d_weight = tl.sum(d_out * (value * (up + OFFSET)), 1)
            d_out = weight * d_out
        wide = d_out * slope * (up + OFFSET)
        if BOUND is not None:
            wide = tl.where(raw_gate > BOUND, 0.0, wide)
    else:
        gate, _ = clamp(raw_gate, raw_gate, BOUND)
        value, _ = value_and_slope(gate, FUNCTION, _sigmoid)
        if weight is not None:
            d_out = weight * d_out
        wide = d_out * value
        if BOUND is not None:
            raw_up = _half(h, h_scale, row, 1, n, there, F, TN, BLOCK, KEPT, DTYPE)
            wide = tl.where(tl.abs(raw_up) > BOUND, 0.0, wide)
    return rounded(wide, DTYPE), d_weight


@triton.jit
def _kernel(
    h, h_scale, d, weights, source, sizes, data, scale, data_rows, scale_rows, d_weights,
    M: tl.constexpr, F: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, HALVES: tl.constexpr,
    KEPT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """act(h[:, 0]) * (h[:, 1] + OFFSET) [M, F] in blocks of 1 x BLOCK, and again in blocks of BLOCK x 1; with its
    cotangent d [M, F] the gradient [M, 2, F] instead. With weights [M], either times them, zeros in rows whose source
    is negative, and the weights' gradient as its sums over TN columns, d_weights [F / TN, M].

    h is of DTYPE or, if it has scales, bytes of the format KEPT, in blocks of 1 x BLOCK.

    A program has BLOCK rows, in PARTS: of all of them it keeps the results alone. Of a gradient it has one of two
    HALVES, and the program beside it, which reads the same, the other.
    """
    NUM_N: tl.constexpr = (F + TN - 1) // TN
    TM: tl.constexpr = BLOCK // PARTS
    half = tl.program_id(0) % HALVES
    tile = tl.program_id(0) // HALVES
    n = tile % NUM_N * TN
    m = tile // NUM_N * BLOCK
    columns = n + tl.arange(0, TN)[None, :]
    num_live = count_live(sizes, G, G_POW2)
    dtype: tl.constexpr = data.dtype.element_ty
    most = tl.zeros((TM, TN), tl.int32)
    parts: tl.tuple = ()
    EXACT: tl.constexpr = F % TN == 0
    for part in tl.static_range(PARTS):
        rows = m + part * TM + tl.arange(0, TM)[:, None]
        inside = rows < M
        if not EXACT:
            inside = inside & (columns < F)
        row = rows.to(tl.int64)
        there = rows < tl.minimum(num_live, M)
        weight = None
        if weights is not None:
            there = tl.load(source + rows, mask=there, other=-1) >= 0
            weight = tl.load(weights + rows, mask=there, other=0)
        if d is None:
            gate = _half(h, h_scale, row, 0, n, there, F, TN, BLOCK, KEPT, DTYPE)
            up = _half(h, h_scale, row, 1, n, there, F, TN, BLOCK, KEPT, DTYPE)
            values = _activated(gate, up, weight, DTYPE, FUNCTION, BOUND, OFFSET)
        else:
            d_out = load(d + row * F + columns, inside & there)
            values, d_weight = _gradient(
                h, h_scale, d_out, row, n, there, weight, half, F, TN, BLOCK, KEPT, DTYPE, FUNCTION, BOUND, OFFSET
            )  # fmt: skip
            if (d_weights is not None) and (half == 0):
                of_rows = m + part * TM + tl.arange(0, TM)
                sums = d_weights + (tile % NUM_N).to(tl.int64) * M + of_rows
                tl.store(sums, d_weight, mask=of_rows < M)
        wide = values.to(tl.float32)
        q, stored = quantized_tile(wide, 1, BLOCK, dtype, SCALE, LARGEST, LIMIT, FLOOR)
        tl.store(data + (row * HALVES + half) * F + columns, q, mask=inside)
        store_scale(scale, stored, 0, m + part * TM, half, n, M, HALVES, F, 1, BLOCK)
        most = tl.maximum(most, magnitudes_of(wide))
        parts = parts + (values,)
    multiplier, stored = block_scales(tl.max(most, 0), SCALE, LARGEST, LIMIT, FLOOR)
    store_scale(scale_rows, stored[None, :], 0, m, half, n, M, HALVES, F, BLOCK, 1)
    for part in tl.static_range(PARTS):
        rows = m + part * TM + tl.arange(0, TM)[:, None]
        inside = rows < M
        if not EXACT:
            inside = inside & (columns < F)
        q = rounded(parts[part].to(tl.float32) * multiplier[None, :], dtype)
        at = (rows.to(tl.int64) * HALVES + half) * F + columns
        end = (half + 1) * F
        store_along_rows(data_rows, q, at, inside, m + part * TM, half * F + n, end, M, TRANSPOSED)


def launch(
    h, h_scale, d_out, weights, sizes, *, config: Config, activation, format, dtype, kept, out_type
):
    """The results of types `out_type`; with weights, (float32[C], int[C]) or (), the sums of the gradient's over tiles
    of columns, float32[tiles, C], too.

    Args:
      h, h_scale: h of `dtype` and None, or its bytes in the format `kept`, which then is not None, and its scales.
    """
    (_, C, _, F), BLOCK, G, tiles = h.shape, format.block[1], sizes.shape[0], config.tiles
    TN = max(BLOCK, launcher.divisor(F, tiles.columns))
    halves = 1 if d_out is None else 2
    absent: dict[str, Any] = {"d_weights": None}
    if weights and d_out is not None:
        absent = {}
        out_type = *out_type, jax.ShapeDtypeStruct((triton.cdiv(F, TN), C), jnp.float32)
    return launcher.triton_call(
        h, h_scale, d_out, *(weights or (None, None)), sizes,
        kernel=_kernel, out_type=out_type, num_warps=tiles.warps,
        backend_options={"maxnreg": config.registers} if config.registers else {},
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(F, TN) * halves,),
        M=C, F=F, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, TN=TN, PARTS=tiles.parts,
        TRANSPOSED=config.transposed, HALVES=halves, FUNCTION=activation.function, BOUND=activation.limit,
        OFFSET=activation.up_offset, KEPT=TYPES[(kept or format).dtype], DTYPE=TYPES[dtype.name],
        **absent, **scaling(dtype, format),
    )  # fmt: skip
