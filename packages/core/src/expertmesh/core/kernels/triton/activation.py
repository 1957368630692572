"""The gradient of gated activations for NVIDIA GPUs: each input is read once, each output written once.

There are no kernels for the values, or without a gate: XLA computes those at the speed of memory. Dimension key as in
`ops/activation.py`; R rows, the product of all dimensions before the 2.
"""

import dataclasses
from math import prod

import jax
import triton
import triton.language as tl
from triton.language.extra import libdevice

from expertmesh.core.kernels import launcher


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Elements of a half of h that a program reads, how many of them at most are of one row, and its warps."""

    elements: int
    columns: int
    warps: int


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr, SIGMOID: tl.constexpr = _sigmoid):
    """act(x) and act'(x)."""
    if FUNCTION == "silu" or FUNCTION == "quick_gelu":
        factor: tl.constexpr = 1.0 if FUNCTION == "silu" else 1.702
        gate = SIGMOID(factor * x)
        value = x * gate
        return value, gate + factor * value * (1 - gate)
    elif FUNCTION == "gelu":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        square = x * x
        gate = SIGMOID(1.5957691216057308 * x * (1 + 0.044715 * square))
        inner = 1.5957691216057308 * x * (1 + 0.134145 * square)
        return x * gate, gate * (1 + inner * (1 - gate))
    elif FUNCTION == "gelu_exact":
        below = 0.5 * libdevice.erfc(-0.7071067811865476 * x)
        return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if FUNCTION == "relu":
            return positive, (x > 0).to(tl.float32)
        else:
            tl.static_assert(FUNCTION == "squared_relu")
            return positive * positive, 2 * positive


@triton.jit
def load(pointer, inside):
    return tl.load(pointer, mask=inside, other=0).to(tl.float32)


@triton.jit
def clamp(gate, up, LIMIT: tl.constexpr):
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _gated_grad_kernel(
    h, d_out, d_h, R: tl.constexpr, F: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """d_gate = d_out * act'(g) * (u + OFFSET), d_up = d_out * act(g); zeros where they are clamped."""
    NUM_F: tl.constexpr = (F + BF - 1) // BF
    rows = (tl.program_id(0) // NUM_F).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    columns = tl.program_id(0) % NUM_F * BF + tl.arange(0, BF)[None, :]
    inside = rows < R
    if F % BF != 0:
        inside = inside & (columns < F)
    at = rows * (2 * F) + columns
    raw_gate, raw_up = load(h + at, inside), load(h + at + F, inside)
    d = load(d_out + rows * F + columns, inside)
    gate, up = clamp(raw_gate, raw_up, LIMIT)
    value, slope = value_and_slope(gate, FUNCTION)
    d_gate = d * slope * (up + OFFSET)
    d_up = d * value
    if LIMIT is not None:
        d_gate = tl.where(raw_gate > LIMIT, 0.0, d_gate)
        d_up = tl.where(tl.abs(raw_up) > LIMIT, 0.0, d_up)
    tl.store(d_h + at, d_gate.to(d_h.dtype.element_ty), mask=inside)
    tl.store(d_h + at + F, d_up.to(d_h.dtype.element_ty), mask=inside)


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
TILES = Tiles(elements=4096, columns=4096, warps=8)


def gated_grad(h, d_out, *, activation, tiles: Tiles = TILES):
    """[*R, 2, F], [*R, F] -> [*R, 2, F]."""
    R, F = prod(h.shape[:-2]), h.shape[-1]
    BF = launcher.divisor(F, tiles.columns)
    BR = tiles.elements // BF
    return launcher.triton_call(
        h, d_out,
        kernel=_gated_grad_kernel, out_type=jax.ShapeDtypeStruct(h.shape, h.dtype),
        grid=(triton.cdiv(R, BR) * triton.cdiv(F, BF),), num_warps=tiles.warps,
        R=R, F=F, BR=BR, BF=BF, FUNCTION=activation.function, LIMIT=activation.limit,
        OFFSET=activation.up_offset,
    )  # fmt: skip
