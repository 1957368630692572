"""A gated activation quantized in both directions for NVIDIA GPUs: h is read once, its activation is not written.

The activation, rounded to the dtype of h, then `kernels/quantize.py`: what the compiler and that kernel give, but for
the last bits of float32. Dimension key as in `ops/activate_quantize.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import quantize
from expertmesh.core.kernels.activation import _clamp, _load
from expertmesh.core.kernels.launch import divisor, target
from expertmesh.core.kernels.quantize import (
    _block_scales,
    _magnitudes,
    _num_live,
    _quantized_tile,
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
    return (_value(gate, FUNCTION) * up).to(h.dtype.element_ty)


@triton.jit
def _kernel(
    h, sizes, data, scale, data_rows, scale_rows,
    M: tl.constexpr, F: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, BOUND: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """act(h[:, 0]) * (h[:, 1] + OFFSET) [M, F] in blocks of 1 x BLOCK, and again in blocks of BLOCK x 1.

    A program has BLOCK rows, in PARTS: of all of them it keeps the activation alone.
    """
    NUM_N: tl.constexpr = (F + TN - 1) // TN
    TM: tl.constexpr = BLOCK // PARTS
    n = tl.program_id(0) % NUM_N * TN
    m = tl.program_id(0) // NUM_N * BLOCK
    columns = n + tl.arange(0, TN)[None, :]
    num_live = _num_live(sizes, G, G_POW2)
    dtype: tl.constexpr = data.dtype.element_ty
    most = tl.zeros((TM, TN), tl.int32)
    parts: tl.tuple = ()
    for part in tl.static_range(PARTS):
        rows = m + part * TM + tl.arange(0, TM)[:, None]
        inside = rows < M
        if F % TN != 0:
            inside = inside & (columns < F)
        at = rows.to(tl.int64) * F + columns
        live = inside & (rows < num_live)
        values = _activated(h, at + rows.to(tl.int64) * F, F, live, FUNCTION, BOUND, OFFSET)
        wide = values.to(tl.float32)
        q, stored = _quantized_tile(wide, 1, BLOCK, dtype, SCALE, LARGEST, LIMIT, FLOOR)
        tl.store(data + at, q, mask=inside)
        _store_scale(scale, stored, 0, m + part * TM, 0, n, M, 1, F, 1, BLOCK)
        most = tl.maximum(most, _magnitudes(wide))
        parts = parts + (values,)
    multiplier, stored = _block_scales(tl.max(most, 0), SCALE, LARGEST, LIMIT, FLOOR)
    _store_scale(scale_rows, stored[None, :], 0, m, 0, n, M, 1, F, BLOCK, 1)
    for part in tl.static_range(PARTS):
        rows = m + part * TM + tl.arange(0, TM)[:, None]
        inside = rows < M
        if F % TN != 0:
            inside = inside & (columns < F)
        q = (parts[part].to(tl.float32) * multiplier[None, :]).to(dtype)
        at = rows.to(tl.int64) * F + columns
        _store_along_rows(data_rows, q, at, inside, m + part * TM, n, M, F, TURNED)


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


def both(
    h,
    group_sizes,
    *,
    activation,
    format,
    blocks,
    amax_axes=(),
    origin=(),
    tiles: Tiles | None = None,
):
    """[1, C, 2, F] -> (data [1, C, F], scale) along F, and along the rows."""
    del blocks, amax_axes, origin  # a block lies within a shard
    (_, C, _, F), BLOCK, sizes = h.shape, format.block[1], group_sizes[0].astype(jnp.int32)
    tiles = tiles or (BOTH if BLOCK > 32 else BOTH_SMALL)
    TN = max(BLOCK, divisor(F, tiles.columns))
    shapes = [(1, C, triton.cdiv(F, BLOCK)), (1, triton.cdiv(C, BLOCK), F)]
    first, second = (quantize._results((1, C, F), shape, format) for shape in shapes)
    turned = quantize.is_turned(BLOCK)
    if turned:
        second = jax.ShapeDtypeStruct((F, C), format.dtype), second[1]
    G = sizes.shape[0]
    measured = (_jax.compute_capability() or 9.0) == 9.0  # elsewhere the compiler decides
    out = jax_triton.triton_call(
        h, sizes,
        kernel=_kernel, out_type=(*first, *second), num_warps=tiles.warps,
        backend_options={"maxnreg": tiles.registers} if measured else {},
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(F, TN),),
        M=C, F=F, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, TN=TN, PARTS=tiles.parts, TURNED=turned,
        FUNCTION=activation.function, BOUND=activation.limit, OFFSET=activation.up_offset,
        **quantize._scaling(h, format), **target(),
    )  # fmt: skip
    along_rows = out[2].T[None] if turned else out[2]
    return out[0], quantize._stored(out[1], format), along_rows, quantize._stored(out[3], format)
