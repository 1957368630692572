"""Tokens quantized and dispatched.

    q(x)     along D, where the token is; its data and scales are dispatched

A row is, bit for bit, what quantizing after a dispatch of x would give. Where all tokens are on one device they are
quantized, and the experts move them.

No gradient goes through an 8-bit array. A cotangent has the dtype of its primal: through an integer carrier there would
be none, through an 8-bit float small ones would be lost. So rows in x's dtype are returned too, through which the
gradient goes from the experts (experts.py) to x. Nothing reads their values, and a compiled program has none.

Dimension key: P participants, C rows per participant, D model width.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.quantization.quantize import quantize
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import Recipe, TensorFormat
from expertmesh.core.vjp import differentiable
from expertmesh.ep import Handle, combine, dispatch
from expertmesh.ep.transports.names import parse
from expertmesh.flax_moe.remat import named

__all__ = ["dispatch_quantized", "quantize_tokens"]


def quantize_tokens(x: jax.Array, recipe: Recipe) -> QuantizedArray:
    """q(x) where the tokens are, which are not dispatched; it has no derivative.

    Args:
      x: float[P, S, D].
      recipe: one for which `dispatches_quantized` holds.

    Raises:
      ValueError: what `quantize` refuses.
    """
    return named("dispatched", quantize(jax.lax.stop_gradient(x), recipe.formats().x))


def dispatch_quantized(
    handle: Handle, x: jax.Array, *, recipe: Recipe, quantize_combine: bool = False
) -> tuple[jax.Array, QuantizedArray]:
    """`dispatch(handle, x)`, with x quantized before it is dispatched.

    Args:
      handle: from `expertmesh.ep.prepare`, its rows aligned to the recipe's blocks.
      x: float[..., D].
      recipe: one for which `dispatches_quantized` holds.
      quantize_combine: gradients of x travel in the format of the recipe's gradients, else in the dtype of x (over
        "ring", which adds on the way, in float32); see `combine`'s `wire_format`.

    Returns:
      (rows, quantized), both [P, C, D]: quantized is what has arrived, and has no derivative; rows, in the dtype of x,
      is what the derivative goes through, and its values are the data without their scales.

    Raises:
      ValueError: what `quantize` and `dispatch` refuse.

    Costs a dispatch of D bytes and the scales per row, and in the backward a combine.
    """
    formats = recipe.formats()
    rows, quantized = _dispatch_quantized(
        x,
        handle,
        format=formats.x,
        wire_format=formats.grad_dgrad if quantize_combine else _plain_wire(handle, x),
    )
    return rows, jax.lax.stop_gradient(quantized)


_Dispatched = tuple[jax.Array, QuantizedArray]
_WireFormat = TensorFormat | str | None


def _plain_wire(handle: Handle, x: jax.Array) -> str | None:
    """The dtype in which sums of gradients travel where they are not quantized."""
    plain = parse(handle.transport).adds_on_the_way or x.dtype == jnp.float32
    return None if plain else x.dtype.name


def _dispatch_fwd(
    x: jax.Array, handle: Handle, *, format: TensorFormat, wire_format: _WireFormat
) -> tuple[_Dispatched, Handle]:
    del wire_format
    quantized = named("dispatched", dispatch(handle, quantize(x, format)))
    # A cast, not zeros: rows are then sharded as what has arrived, and vary over the same Manual axes.
    return (quantized.data.astype(x.dtype), quantized), handle


def _dispatch_bwd(
    handle: Handle, cotangents: _Dispatched, *, format: TensorFormat, wire_format: _WireFormat
) -> tuple[jax.Array, None]:
    del format
    d_rows, _ = cotangents
    return combine(handle, d_rows, wire_format=wire_format), None


_dispatch_quantized = differentiable(_dispatch_fwd, _dispatch_bwd)
