"""Activations of rows times the rows' weights, for rows that hold a token; a group's other rows are zeros.

    out[p, r] = weights[p, r] * act(h[p, r])   if holds_token(source)[p, r], else 0

with act as in ops/activation.py. The backward makes the result again, so that h alone is kept: with `d` the cotangent
of `out`,

    d_h[p, r]       = weights[p, r] * d[p, r] * the derivative at h
    d_weights[p, r] = <d[p, r], act(h[p, r])>

What is not selected may be NaN. Padding rows are undefined (`ops/groups.py`), but those of d_weights are zeros.

Dimension key: P participants, C rows per participant, F expert width, G groups per participant.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activation import Activation, function_and_gradient, unsupported
from expertmesh.core.ops.groups import selected
from expertmesh.core.ops.row_map import holds_token

__all__ = [
    "activate_rows_grad_op",
    "activate_rows_grad_reference",
    "activate_rows_op",
    "activate_rows_reference",
    "activates_at_once",
]

ROWS_AT_ONCE = 256  # of a group, in a tile of the kernel
# NVIDIA H100, 2026-11-26: docs/dev/kernels.md says what was measured.
LONGEST_CONTRACTION, LARGEST_WEIGHT = 2048, 2048 * 2048


def activates_at_once(rows: int, contraction: int, width: int, groups: int) -> bool:
    """Whether one kernel that projects gathered rows, to a gate and an up half, and activates them is faster than two.

    It reads narrow tokens fast enough, groups fill its tiles, and tensor cores, of which two kernels take more, are
    not all that limits.
    """
    small = contraction <= LONGEST_CONTRACTION and contraction * width <= LARGEST_WEIGHT
    return small and rows >= ROWS_AT_ONCE * groups


def activate_rows_reference(
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array | None,
    *,
    activation: Activation,
) -> jax.Array:
    """float[P, C, F] in h's dtype, computed in float32 and rounded once."""
    del group_sizes  # zeros cost nothing here
    value, _ = function_and_gradient(activation, h.astype(jnp.float32))
    return _selected(source, weights[..., None] * value, h.dtype)


def activate_rows_grad_reference(
    h: jax.Array,
    d_out: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array | None,
    *,
    activation: Activation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d_h like h, float32 d_weights [P, C], and the value, [P, C, F]."""
    del group_sizes
    value, pull = function_and_gradient(activation, h.astype(jnp.float32))
    d, weight = d_out.astype(jnp.float32), weights[..., None]
    d_weights = jnp.sum(d * value, axis=-1)
    return (
        _selected(source, pull(weight * d), h.dtype),
        _selected(source, d_weights, jnp.float32),
        _selected(source, weight * value, h.dtype),
    )


def _selected(source: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return selected(holds_token(source), x).astype(dtype)


def _kernel(function: str) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.triton.activate_rows", function, unsupported),)


activate_rows_op = Op(
    "activate_rows",
    activate_rows_reference,
    "p c two... f, p c, p c, p g -> p c f",
    whole=("two...", "g"),
    roles="participants . . tp, participants ., participants ., participants . -> participants . tp",
    kernels=_kernel("value"),
)
activate_rows_grad_op = Op(
    "activate_rows_grad",
    activate_rows_grad_reference,
    "p c two... f, p c f, p c, p c, p g -> p c two... f, p c, p c f",
    whole=("two...", "g"),
    summed=("f",),
    roles="participants . . tp, participants . tp, participants ., participants ., participants . "
    "-> participants . . tp, participants ., participants . tp",
    kernels=_kernel("grad"),
)
