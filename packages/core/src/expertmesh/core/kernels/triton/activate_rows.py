"""Weighted activations of rows and their gradients for NVIDIA GPUs: h is read once, and only in rows with a token.

A device holds one participant, or writes zeros in the padding rows of each. Dimension key as in
`ops/activate_rows.py`; R rows, P times C.
"""

from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.triton.activation import TILES, Tiles, clamp, load, value_and_slope
from expertmesh.core.kernels.triton.quantize import count_live


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
def _activate_rows_kernel(
    h, weights, source, group_sizes, out, R: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    F: tl.constexpr, FUNCTION: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """out = weights * act(g) * (u + OFFSET); zeros in a group's rows that hold no token."""
    rows, written, held, weight, any_written = _rows_held(
        weights, source, group_sizes, R, G, G_POW2, BR
    )
    if any_written:
        for start in tl.range(0, F, BF):
            columns = start + tl.arange(0, BF)[None, :]
            at = rows * (2 * F) + columns
            inside = held & (columns < F)
            gate, up = clamp(load(h + at, inside), load(h + at + F, inside), LIMIT)
            value, _ = value_and_slope(gate, FUNCTION)
            value = tl.where(held, weight * (value * (up + OFFSET)), 0.0)
            there = written & (columns < F)
            tl.store(out + rows * F + columns, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _activate_rows_grad_kernel(
    h, d_out, weights, source, group_sizes, d_h, d_weights, out,
    R: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, F: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """d_gate = w d act'(g) (u + OFFSET), d_up = w d act(g), d_w = <d, act(g) (u + OFFSET)>, out as the value."""
    rows, written, held, weight, any_written = _rows_held(
        weights, source, group_sizes, R, G, G_POW2, BR
    )
    dots = tl.zeros((BR, 1), tl.float32)
    if any_written:
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
            d_gate, d_up = tl.where(held, d_gate, 0.0), tl.where(held, d_up, 0.0)
            tl.store(d_h + at, d_gate.to(d_h.dtype.element_ty), mask=there)
            tl.store(d_h + at + F, d_up.to(d_h.dtype.element_ty), mask=there)
            product = tl.where(held, weight * product, 0.0)
            tl.store(out + rows * F + columns, product.to(out.dtype.element_ty), mask=there)
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


def value(h, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """[P, C, 2, F], [P, C], [P, C], [P, G] -> [P, C, F]."""
    return launcher.triton_call(
        h, weights, source, group_sizes,
        kernel=_activate_rows_kernel,
        out_type=jax.ShapeDtypeStruct((*h.shape[:-2], h.shape[-1]), h.dtype),
        **_options(h, group_sizes, activation, tiles),
    )  # fmt: skip


def grad(h, d_out, weights, source, group_sizes, *, activation, tiles: Tiles = TILES):
    """[P, C, 2, F], [P, C, F], [P, C], [P, C], [P, G] -> [P, C, 2, F], float32[P, C], [P, C, F]."""
    return launcher.triton_call(
        h, d_out, weights, source, group_sizes,
        kernel=_activate_rows_grad_kernel,
        out_type=(
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            jax.ShapeDtypeStruct(weights.shape, jnp.float32),
            jax.ShapeDtypeStruct(d_out.shape, h.dtype),
        ),
        **_options(h, group_sizes, activation, tiles),
    )  # fmt: skip
