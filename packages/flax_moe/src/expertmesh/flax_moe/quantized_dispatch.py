"""Tokens quantized, dispatched and multiplied by experts, as one function with one VJP.

    q(x)     along D, where the token is; its data and scales are dispatched
    y[p, r]  = rows[p, r] @ q(w)[e] + bias[e]        rows = dispatched q(x), w quantized along D; e = the row's expert
    dw[e]    = sum of z[p, r]^T q(dy)[p, r]          z = q(dequantized rows), both quantized along the rows
    dx[t]    = sum of q(dy)[p, r] @ q(w)[e]^T        over the token's rows; dy and w quantized along N

A row is, bit for bit, what quantizing after a dispatch of x would give. For dw there is no x in high precision where
the rows are: z is made of what has arrived, by definition, so on one device too and with every transport.

No 8-bit array crosses the boundary of the VJP. A cotangent has the dtype of its primal: through an integer carrier
there would be none, through an 8-bit float small ones would be lost.

Dimension key: t tokens, P participants, C rows per participant, D model width, N output dimensions (any number),
E experts, G groups per participant.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.layer import Extra, Layer, residuals
from expertmesh.core.ops.grouped_dense import (
    grouped_dense_bwd,
    kernel_for_dgrad,
    kernel_for_fprop,
    product,
    stateless_layer,
)
from expertmesh.core.ops.grouped_requantize import grouped_requantize
from expertmesh.core.ops.quantize import quantize
from expertmesh.core.ops.quantize_kernel import QuantizedKernel
from expertmesh.core.recipe import Recipe
from expertmesh.core.vjp import differentiable
from expertmesh.ep import Handle, combine, dispatch
from expertmesh.flax_moe.remat import named

__all__ = ["dispatch_dense"]


def dispatch_dense(
    handle: Handle,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe,
    kernel_quantized: QuantizedKernel | None = None,
    quantize_combine: bool = False,
    reduce_dtype="float32",
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`grouped_dense(dispatch(handle, x), kernel, handle.group_sizes, bias)`, with x quantized before it is dispatched.

    Args:
      handle: from `expertmesh.ep.prepare`, its rows aligned to the recipe's blocks.
      x: float[..., D].
      kernel: float[E, D, *N].
      bias: float[E, *N] or None.
      recipe: one for which `dispatches_quantized` holds.
      kernel_quantized, reduce_dtype: see `expertmesh.core.grouped_dense`.
      quantize_combine: gradients of x travel in the format of the recipe's gradients, else in the dtype of x (over
        "ring", which adds on the way, in float32); see `combine`'s `wire_format`.
      w_spec: where `kernel` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, *N] in x's dtype; zeros for rows after the last group.

    Raises:
      ValueError: what `quantize`, `dispatch` and `grouped_dense` refuse.

    Differentiable in x, `kernel` and `bias`. Kept for the backward: the rows quantized along the rows, and `kernel`
    quantized along N; the dispatched rows have their checkpoint names too.
    Costs a dispatch of D bytes and the scales per row, and in the backward a combine; else as `grouped_dense`.
    """
    extra = Extra(kernel_quantized=kernel_quantized)
    layer = stateless_layer("dispatch_dense", x, kernel, extra, recipe, w_spec, reduce_dtype)
    return _dispatch_dense(
        x,
        kernel,
        bias,
        handle,
        extra,
        layer=layer,
        wire_format=layer.formats.grad_dgrad if quantize_combine else plain_wire(handle, x),
    )


def plain_wire(handle: Handle, x) -> str | None:
    """The dtype in which sums of gradients travel where they are not quantized."""
    return None if handle.transport == "ring" or x.dtype == jnp.float32 else x.dtype.name


def _forward(x, kernel, bias, handle, extra: Extra, layer: Layer):
    """(y, the rows and the kernel quantized along D)."""
    rows = named("dispatched", dispatch(handle, quantize(x, layer.formats.x)))
    q_kernel = kernel_for_fprop(kernel, extra, layer)
    return product(rows, q_kernel, handle.group_sizes, bias, layer), rows, q_kernel


def value(x, kernel, bias, handle, extra, *, layer: Layer, wire_format=None):
    del wire_format
    return _forward(x, kernel, bias, handle, extra, layer)[0]


def fwd(x, kernel, bias, handle, extra, *, layer: Layer, wire_format=None):
    """(y, what the backward needs)."""
    del wire_format
    y, rows, q_kernel = _forward(x, kernel, bias, handle, extra, layer)
    spec, sizes = layer.used[0], handle.group_sizes
    along_rows = grouped_requantize(
        rows, sizes, layer.formats.x_wgrad, spec=spec, zero_rest=layer.zero_rest
    )
    q_kernel = kernel_for_dgrad(kernel, q_kernel, extra, layer)
    return y, ((*residuals(along_rows, q_kernel), sizes, bias, None), handle)


def _bwd(carried, dy, *, layer: Layer, wire_format):
    of_rows, handle = carried
    d_rows, d_kernel, _, d_bias, _ = grouped_dense_bwd(of_rows, dy, layer=layer)
    return combine(handle, d_rows, wire_format=wire_format), d_kernel, d_bias, None, None


_dispatch_dense = differentiable(fwd, _bwd, value)
