"""Tokens quantized and dispatched, and multiplied by experts: two functions, each with a VJP.

    q(x)     along D, where the token is; its data and scales are dispatched
    y[p, r]  = rows[p, r] @ q(w)[e] + bias[e]        rows = dispatched q(x), w quantized along D; e = the row's expert
    dw[e]    = sum of z[p, r]^T q(dy)[p, r]          z = q(dequantized rows), both quantized along the rows
    dx[t]    = sum of q(dy)[p, r] @ q(w)[e]^T        over the token's rows; dy and w quantized along N

A row is, bit for bit, what quantizing after a dispatch of x would give. For dw there is no x in high precision where
the rows are: z is made of what has arrived, by definition, so on one device too and with every transport.

No gradient goes through an 8-bit array. A cotangent has the dtype of its primal: through an integer carrier there would
be none, through an 8-bit float small ones would be lost. So the first function also returns rows in x's dtype, through
which the gradient goes from the second to the first. Nothing reads their values, and a compiled program has none.

Dimension key: t tokens, P participants, C rows per participant, D model width, N output dimensions (any number),
E experts, G groups per participant.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.apply import (
    layer_of,
    linear_bwd,
    product,
    weight_for_dgrad,
    weight_for_fprop,
)
from expertmesh.core.linear.grouped_gemm import GROUPED
from expertmesh.core.linear.layer import Extra, Layer, residuals
from expertmesh.core.linear.quantize_kernel import QuantizedKernel
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize import quantize
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import Recipe, TensorFormat
from expertmesh.core.vjp import differentiable
from expertmesh.ep import Handle, combine, dispatch
from expertmesh.flax_moe.remat import named

__all__ = ["dispatch_quantized", "dispatched_dense"]


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


def dispatched_dense(
    rows: jax.Array,
    quantized: QuantizedArray,
    kernel: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe,
    kernel_quantized: QuantizedKernel | None = None,
    reduce_dtype: DTypeLike = "float32",
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`grouped_dense(quantized, kernel, group_sizes, bias)` of rows that are quantized already.

    Args:
      rows, quantized: of `dispatch_quantized`.
      kernel: float[E, D, *N].
      group_sizes: int32[P, G], the handle's.
      bias: float[E, *N] or None.
      recipe: that of `dispatch_quantized`.
      kernel_quantized, reduce_dtype: see `expertmesh.core.grouped_dense`.
      w_spec: where `kernel` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, *N] in the dtype of `rows`; zeros for rows after the last group.

    Raises:
      ValueError: what `grouped_dense` refuses.

    Differentiable in `rows`, `kernel` and `bias`. Kept for the backward: the rows quantized along the rows, and
    `kernel` quantized along N; the dispatched rows have their checkpoint names too. Costs are those of `grouped_dense`.
    """
    extra = Extra(kernel_quantized=kernel_quantized)
    layer = layer_of(
        "dispatched_dense",
        GROUPED,
        rows,
        kernel,
        extra,
        recipe,
        reduce_dtype=reduce_dtype,
        specs=(None, w_spec, None),
    )
    return _dispatched_dense(rows, quantized, kernel, bias, group_sizes, extra, layer=layer)


_Dispatched = tuple[jax.Array, QuantizedArray]
_WireFormat = TensorFormat | str | None
Carried = tuple[Any, ...]  # of a layer, for `grouped_dense_bwd`


def _plain_wire(handle: Handle, x: jax.Array) -> str | None:
    """The dtype in which sums of gradients travel where they are not quantized."""
    return None if handle.transport == "ring" or x.dtype == jnp.float32 else x.dtype.name


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


def _forward(
    quantized: QuantizedArray,
    kernel: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    extra: Extra,
    layer: Layer,
) -> tuple[jax.Array, QuantizedArray]:
    """(y, the kernel quantized along D)."""
    q_kernel, _ = weight_for_fprop(kernel, extra, layer)
    return product(quantized, q_kernel, group_sizes, bias, layer), q_kernel


def value(
    rows: jax.Array,
    quantized: QuantizedArray,
    kernel: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    extra: Extra,
    *,
    layer: Layer,
) -> jax.Array:
    del rows
    return _forward(quantized, kernel, bias, group_sizes, extra, layer)[0]


def fwd(
    rows: jax.Array,
    quantized: QuantizedArray,
    kernel: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    extra: Extra,
    *,
    layer: Layer,
) -> tuple[jax.Array, Carried]:
    """(y, what the backward needs)."""
    del rows
    y, q_kernel = _forward(quantized, kernel, bias, group_sizes, extra, layer)
    along_rows = grouped_requantize(
        quantized,
        group_sizes,
        layer.formats.x_wgrad,
        spec=layer.used[0],
        zero_rest=layer.zero_rest,
    )
    q_kernel = weight_for_dgrad(kernel, q_kernel, extra, layer)
    return y, (*residuals(along_rows, q_kernel), group_sizes, bias, None)


def _bwd(carried: Carried, dy: jax.Array, *, layer: Layer) -> tuple[jax.Array | None, ...]:
    d_rows, d_kernel, _, d_bias, _ = linear_bwd(carried, dy, layer=layer)
    return d_rows, None, d_kernel, d_bias, None, None


_dispatch_quantized = differentiable(_dispatch_fwd, _dispatch_bwd)
_dispatched_dense = differentiable(fwd, _bwd, value)
