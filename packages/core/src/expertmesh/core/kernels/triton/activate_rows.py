"""Weighted activations of rows and their gradients for NVIDIA GPUs: h is read once, and only in rows with a token.

A device holds one participant, or writes zeros in the padding rows of each. Dimension key as in
`ops/activate_rows.py`; R rows, P times C.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.triton.activation import TILES, Tiles, clamp, load, value_and_slope
from expertmesh.core.kernels.triton.quantize import count_live, magnitudes_of


@triton.jit
def _rows_held(
    weights, source, group_sizes, R: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """A program's rows, which of them are written, which hold a token, their weights, [BR, 1] each; whether any is
    written."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    end = R
    if G > 0:
        end = tl.minimum(count_live(group_sizes, G, G_POW2), R)
    held = tl.load(source + rows, mask=rows < R, other=-1) >= 0
    weight = tl.load(weights + rows, mask=held, other=0)
    return rows, rows < end, held, weight, tl.program_id(0).to(tl.int64) * BR < end


@triton.jit
def _largest(most, magnitudes, columns, F: tl.constexpr, BF: tl.constexpr):
    """int32[BR, 1], the largest magnitude of each row so far."""
    if F % BF != 0:
        magnitudes = tl.where(columns < F, magnitudes, 0)
    return tl.maximum(most, tl.max(magnitudes, 1)[:, None])


@triton.jit
def _activate_rows_kernel(
    h, weights, source, group_sizes, out, amax, R: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    F: tl.constexpr, FUNCTION: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """out = weights * act(g) * (u + OFFSET); zeros in a group's rows that hold no token; and, unless it is None, the
    amax of each row, int32[R]."""
    rows, written, held, weight, any_written = _rows_held(
        weights, source, group_sizes, R, G, G_POW2, BR
    )
    if any_written:
        most = tl.zeros((BR, 1), tl.int32)
        for start in tl.range(0, F, BF):
            columns = start + tl.arange(0, BF)[None, :]
            at = rows * (2 * F) + columns
            inside = held & (columns < F)
            gate, up = clamp(load(h + at, inside), load(h + at + F, inside), LIMIT)
            value, _ = value_and_slope(gate, FUNCTION)
            value = tl.where(held, weight * (value * (up + OFFSET)), 0.0)
            value = value.to(out.dtype.element_ty)
            there = written & (columns < F)
            tl.store(out + rows * F + columns, value, mask=there)
            if amax is not None:
                most = _largest(most, magnitudes_of(value.to(tl.float32)), columns, F, BF)
        if amax is not None:
            tl.store(amax + rows, most, mask=written)


@triton.jit
def _activate_rows_grad_kernel(
    h, d_out, weights, source, group_sizes, d_h, d_weights, out, amax,
    R: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, F: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """d_gate = w d act'(g) (u + OFFSET), d_up = w d act(g), d_w = <d, act(g) (u + OFFSET)>, out as the value, and the
    amax of each row of d_h, int32[R]; of the last two those that are not None."""
    rows, written, held, weight, any_written = _rows_held(
        weights, source, group_sizes, R, G, G_POW2, BR
    )
    dots = tl.zeros((BR, 1), tl.float32)
    if any_written:
        most = tl.zeros((BR, 1), tl.int32)
        for start in tl.range(0, F, BF):
            columns = start + tl.arange(0, BF)[None, :]
            at = rows * (2 * F) + columns
            inside = held & (columns < F)
            raw_gate, raw_up = load(h + at, inside), load(h + at + F, inside)
            d = load(d_out + rows * F + columns, inside)
            gate, up = clamp(raw_gate, raw_up, LIMIT)
            value, slope = value_and_slope(gate, FUNCTION)
            product = value * (up + OFFSET)
            dots += tl.sum(d * product, 1)[:, None]
            d_gate = weight * d * slope * (up + OFFSET)
            d_up = weight * d * value
            if LIMIT is not None:
                d_gate = tl.where(raw_gate > LIMIT, 0.0, d_gate)
                d_up = tl.where(tl.abs(raw_up) > LIMIT, 0.0, d_up)
            there = written & (columns < F)
            d_gate = tl.where(held, d_gate, 0.0).to(d_h.dtype.element_ty)
            d_up = tl.where(held, d_up, 0.0).to(d_h.dtype.element_ty)
            tl.store(d_h + at, d_gate, mask=there)
            tl.store(d_h + at + F, d_up, mask=there)
            if out is not None:
                product = tl.where(held, weight * product, 0.0)
                tl.store(out + rows * F + columns, product.to(out.dtype.element_ty), mask=there)
            if amax is not None:
                of_gate = magnitudes_of(d_gate.to(tl.float32))
                of_both = tl.maximum(of_gate, magnitudes_of(d_up.to(tl.float32)))
                most = _largest(most, of_both, columns, F, BF)
        if amax is not None:
            tl.store(amax + rows, most, mask=written)
    tl.store(d_weights + rows, tl.where(held, dots, 0.0), mask=rows < R)


def _options(h, group_sizes, activation, tiles: Tiles) -> dict:
    R, F = prod(h.shape[:-2]), h.shape[-1]
    G = prod(group_sizes.shape) if len(h) == 1 else 0
    # The erf of gelu_exact takes registers. So does any function on GPUs before Hopper, and on consumer Blackwell.
    spills = not current_device().reads_shared
    elements = tiles.elements // (2 if activation.function == "gelu_exact" and not spills else 1)
    BF = launcher.divisor(F, min(tiles.columns, elements))
    BR = elements // BF
    return dict(
        grid=(triton.cdiv(R, BR),), num_warps=tiles.warps * (2 if spills else 1),
        R=R, G=G, G_POW2=triton.next_power_of_2(max(G, 1)), F=F, BR=BR, BF=BF,
        FUNCTION=activation.function, LIMIT=activation.limit,
        OFFSET=activation.up_offset,
    )  # fmt: skip


# Of the threads of a lane, in all warps, at most, of a gradient with its amax: else the compiler aims at half as many,
# and spills.
REGISTERS = 8 * 208


def value(h, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """[P, C, 2, F], [P, C], [P, C], [P, G] -> [P, C, F]."""
    return _launch(
        _activate_rows_kernel, (h, weights, source, group_sizes), (_value_type(h), None),
        activation=activation, tiles=tiles,
    )[0]  # fmt: skip


def value_and_amax(h, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """As `value`, and the bits of the largest magnitude in each row, int32[P, C]; undefined in padding rows."""
    return _launch(
        _activate_rows_kernel, (h, weights, source, group_sizes), (_value_type(h), _amax_type(h)),
        activation=activation, tiles=tiles,
    )  # fmt: skip


def grad(h, d_out, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """[P, C, 2, F], [P, C, F], [P, C], [P, C], [P, G] -> [P, C, 2, F], float32[P, C], [P, C, F]."""
    return _grad(h, d_out, weights, source, group_sizes, (_value_type(h), None), activation, tiles)


def grad_and_amax(h, d_out, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """The first two of `grad`, and the bits of the largest magnitude in each row of the first, int32[P, C]; those are
    undefined in padding rows."""
    more = None, _amax_type(h)
    return _grad(h, d_out, weights, source, group_sizes, more, activation, tiles)


def _grad(h, d_out, weights, source, group_sizes, more: tuple, activation, tiles: Tiles):
    types = jax.ShapeDtypeStruct(h.shape, h.dtype), jax.ShapeDtypeStruct(h.shape[:-2], jnp.float32)
    operands = h, d_out, weights, source, group_sizes
    return _launch(
        _activate_rows_grad_kernel, operands, (*types, *more), activation=activation, tiles=tiles,
        bounded=more[1] is not None,
    )  # fmt: skip


def _value_type(h):
    return jax.ShapeDtypeStruct((*h.shape[:-2], h.shape[-1]), h.dtype)


def _amax_type(h):
    return jax.ShapeDtypeStruct(h.shape[:-2], jnp.int32)


def _launch(kernel, operands: tuple, out_type: tuple, *, activation, tiles: Tiles, bounded=False):
    """The results whose types are not None, which are the last parameters before the constants."""
    h, group_sizes = operands[0], operands[-1]
    names = kernel.arg_names[len(operands) :]
    absent: dict[str, Any] = {
        name: None for name, each in zip(names, out_type, strict=False) if each is None
    }
    options = _options(h, group_sizes, activation, tiles)
    registers = {"maxnreg": REGISTERS // options["num_warps"]} if bounded else {}
    return launcher.triton_call(
        *operands, kernel=kernel, out_type=tuple(filter(None, out_type)), backend_options=registers,
        **options, **absent,
    )  # fmt: skip
