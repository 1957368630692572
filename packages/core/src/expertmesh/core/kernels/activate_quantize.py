"""A gated activation, or its gradient, quantized in both directions for NVIDIA GPUs, and not written itself.

Either is rounded to the dtype of h, then as by `kernels/quantize.py`: what the compiler, or `kernels/activation.py`,
and that kernel give, but for the last bits of float32; both kernels here give the same bits. The one for Hopper is in
CUDA C++ (`activate_quantize.cu`). Dimension key as in `quantization/activate_quantize.py`.
"""

import dataclasses
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher, quantize
from expertmesh.core.kernels.activation import _clamp, _load, _value_and_slope
from expertmesh.core.kernels.quantize import (
    HopperSource,
    HopperTiles,
    _block_scales,
    _magnitudes,
    _num_live,
    _quantized_tile,
    _rounded,
    _store_along_rows,
    _store_scale,
)


@triton.jit
def _sigmoid(x):
    """Within two units of the last place; zero below -87."""
    wide = 1 + tl.exp2(-1.4426950408889634 * x)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [wide], tl.float32, True, 1
    )


@triton.jit
def _value(x, FUNCTION: tl.constexpr):
    """act(x)."""
    if FUNCTION == "silu":
        return x * _sigmoid(x)
    elif FUNCTION == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    elif FUNCTION == "gelu":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if FUNCTION == "relu":
            return positive
        else:
            tl.static_assert(FUNCTION == "squared_relu")
            return positive * positive


@triton.jit
def _activated(
    h, at, F: tl.constexpr, live, FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr
):
    """The activation of a part of h, in its dtype; zeros where nothing is live, as act(0) = 0."""
    gate, up = _clamp(_load(h + at, live), _load(h + at + F, live), BOUND)
    if OFFSET != 0:
        up = up + OFFSET
    return _rounded(_value(gate, FUNCTION) * up, h.dtype.element_ty)


@triton.jit
def _gradient(
    h, d, at, at_d, half, F: tl.constexpr, live, FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """The gradient of a part of one half of h, 0 the gate, in its dtype; zeros where nothing is live, as d is 0."""
    raw_gate, d_out = _load(h + at, live), _load(d + at_d, live)
    if half == 0:
        raw_up = _load(h + at + F, live)
        gate, up = _clamp(raw_gate, raw_up, BOUND)
        _, slope = _value_and_slope(gate, FUNCTION, _sigmoid)
        wide = d_out * slope * (up + OFFSET)
        if BOUND is not None:
            wide = tl.where(raw_gate > BOUND, 0.0, wide)
    else:
        gate, _ = _clamp(raw_gate, raw_gate, BOUND)
        value, _ = _value_and_slope(gate, FUNCTION, _sigmoid)
        wide = d_out * value
        if BOUND is not None:
            wide = tl.where(tl.abs(_load(h + at + F, live)) > BOUND, 0.0, wide)
    return _rounded(wide, h.dtype.element_ty)


@triton.jit
def _kernel(
    h, d, sizes, data, scale, data_rows, scale_rows,
    M: tl.constexpr, F: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, TURNED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """act(h[:, 0]) * (h[:, 1] + OFFSET) [M, F] in blocks of 1 x BLOCK, and again in blocks of BLOCK x 1; with its
    cotangent d [M, F] the gradient [M, 2, F] instead.

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
    num_live = _num_live(sizes, G, G_POW2)
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
        live = inside & (rows < num_live)
        in_h = row * (2 * F) + columns
        if d is None:
            values = _activated(h, in_h, F, live, FUNCTION, BOUND, OFFSET)
        else:
            values = _gradient(
                h, d, in_h, row * F + columns, half, F, live, FUNCTION, BOUND, OFFSET
            )
        wide = values.to(tl.float32)
        q, stored = _quantized_tile(wide, 1, BLOCK, dtype, SCALE, LARGEST, LIMIT, FLOOR)
        tl.store(data + (row * HALVES + half) * F + columns, q, mask=inside)
        _store_scale(scale, stored, 0, m + part * TM, half, n, M, HALVES, F, 1, BLOCK)
        most = tl.maximum(most, _magnitudes(wide))
        parts = parts + (values,)
    multiplier, stored = _block_scales(tl.max(most, 0), SCALE, LARGEST, LIMIT, FLOOR)
    _store_scale(scale_rows, stored[None, :], 0, m, half, n, M, HALVES, F, BLOCK, 1)
    for part in tl.static_range(PARTS):
        rows = m + part * TM + tl.arange(0, TM)[:, None]
        inside = rows < M
        if not EXACT:
            inside = inside & (columns < F)
        q = (parts[part].to(tl.float32) * multiplier[None, :]).to(dtype)
        at = (rows.to(tl.int64) * HALVES + half) * F + columns
        end = (half + 1) * F
        _store_along_rows(data_rows, q, at, inside, m + part * TM, half * F + n, end, M, TURNED)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of a tile, in how many parts its rows are read, its warps, and at most how many registers of a thread."""

    columns: int
    parts: int
    warps: int
    registers: int


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured. As many programs as possible share a
# multiprocessor: two and three.
BOTH = Tiles(columns=128, parts=2, warps=8, registers=128)
BOTH_SMALL = Tiles(columns=256, parts=1, warps=8, registers=80)
GRADIENT = Tiles(columns=128, parts=4, warps=8, registers=128)
GRADIENT_SMALL = Tiles(columns=128, parts=2, warps=8, registers=80)


# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
HOPPER = HopperTiles(warps=16, programs=1)
HOPPER_SMALL = HopperTiles(warps=4, programs=4)


def activate_quantize(source, group_sizes, multiplier, key, *, format, zero_rest=True, **options):
    """[1, C, 2, F] -> (data [1, C, F], scale) along F, and along the rows; with [1, C, F] -> of [1, C, 2, F]."""
    del multiplier, key, options  # a block lies within a shard
    h, d_out, activation = source.base, getattr(source, "d_out", None), source.activation
    (_, C, _, F), BLOCK, sizes = h.shape, format.block[1], group_sizes[0].astype(jnp.int32)
    halves = () if d_out is None else (2,)
    shape, turned = (1, C, *halves, F), quantize.is_turned(BLOCK)
    counts = (1, C, *halves, triton.cdiv(F, BLOCK)), (1, triton.cdiv(C, BLOCK), *halves, F)
    first, second = (quantize._results(shape, count, format) for count in counts)
    if turned:
        second = jax.ShapeDtypeStruct((prod(halves) * F, C), format.dtype), second[1]
    same = d_out is None or d_out.dtype == h.dtype
    on_hopper = same and quantize.suits_hopper(C, F, h.dtype, format)
    run = partial(launch_hopper, zero_rest=zero_rest) if on_hopper else launch
    data, scale, data_rows, scale_rows = run(
        h, d_out, sizes, activation=activation, format=format, out_type=(*first, *second)
    )
    data_rows = data_rows.T.reshape(shape) if turned else data_rows
    return data, quantize._stored(scale, format), data_rows, quantize._stored(scale_rows, format)


def launch(h, d_out, sizes, *, activation, format, out_type, tiles: Tiles | None = None):
    (_, C, _, F), BLOCK, G = h.shape, format.block[1], sizes.shape[0]
    tiles = tiles or _tiles(BLOCK, d_out is not None)
    TN = max(BLOCK, launcher.divisor(F, tiles.columns))
    halves = 1 if d_out is None else 2
    # Elsewhere, and of float32, the compiler decides.
    measured = (_jax.compute_capability() or 9.0) == 9.0 and h.dtype.itemsize == 2
    return launcher.triton_call(
        h, d_out, sizes,
        kernel=_kernel, out_type=out_type, num_warps=tiles.warps,
        backend_options={"maxnreg": tiles.registers} if measured else {},
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(F, TN) * halves,),
        M=C, F=F, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, TN=TN, PARTS=tiles.parts,
        TURNED=quantize.is_turned(BLOCK), HALVES=halves, FUNCTION=activation.function, BOUND=activation.limit,
        OFFSET=activation.up_offset, **quantize._scaling(h, format),
    )  # fmt: skip


def launch_hopper(
    h, d_out, sizes, *, activation, format, out_type, zero_rest=True,
    tiles: HopperTiles | None = None,
):  # fmt: skip
    (_, C, _, F), gradient = h.shape, d_out is not None
    tiles = tiles or (HOPPER if format.block[1] == 128 else HOPPER_SMALL)
    return quantize.launch_hopper(
        *((h, d_out) if gradient else (h,)), sizes,
        source=hopper_source(h.dtype, activation=activation, format=format, gradient=gradient, tiles=tiles),
        name="activate_quantize", rows=C, columns=F, zero_rest=zero_rest, tiles=tiles, out_type=out_type,
    )  # fmt: skip


def hopper_source(dtype, *, activation, format, gradient: bool, tiles: HopperTiles) -> HopperSource:
    """The kernel in CUDA C++ for h of `dtype`."""
    defined = dict(
        GRADIENT=int(gradient), FUNCTION=activation.function, UP_OFFSET=quantize.literal(activation.up_offset)
    )  # fmt: skip
    if activation.limit is not None:
        defined["BOUND"] = quantize.literal(activation.limit)
    file, slot = "activate_quantize.cu", 16 * (2 + gradient)
    return quantize.hopper_source(
        file, dtype, format, tiles, halves=1 + gradient, slot=slot, **defined
    )


def _tiles(block: int, gradient: bool) -> Tiles:
    if block <= 32:
        return GRADIENT_SMALL if gradient else BOTH_SMALL
    return GRADIENT if gradient else BOTH
