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
from jax.sharding import PartitionSpec

from expertmesh.core.ops.dense import QuantizedKernel, check_cache, kernel_copies
from expertmesh.core.ops.grouped_dense import (
    multiply_rows,
    multiply_rows_bwd,
    specs_in_use,
)
from expertmesh.core.ops.grouped_quantize import grouped_quantize
from expertmesh.core.ops.quantize import dequantize, quantize
from expertmesh.core.recipe import Recipe
from expertmesh.core.support import warn_if_emulated
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
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`grouped_dense(dispatch(handle, x), kernel, handle.group_sizes, bias)`, with x quantized before it is dispatched.

    Args:
      handle: from `expertmesh.ep.prepare`, its rows aligned to the recipe's blocks.
      x: float[..., D].
      kernel: float[E, D, *N].
      bias: float[E, *N] or None.
      recipe: one for which `dispatches_quantized` holds.
      kernel_quantized: see `expertmesh.core.grouped_dense`.
      quantize_combine: gradients of x travel in the format of the recipe's gradients; see `combine`'s `wire_format`.
      w_spec: where `kernel` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, *N] in x's dtype; zeros for rows after the last group.

    Raises:
      ValueError: what `quantize`, `dispatch` and `grouped_dense` refuse.

    Differentiable in x, `kernel` and `bias`. Kept for the backward: the rows quantized along the rows, and `kernel`
    quantized along N; the dispatched rows have their checkpoint names too.
    Costs a dispatch of D bytes and the scales per row, and in the backward a combine; else as `grouped_dense`.
    """
    check_cache("dispatch_dense", kernel, kernel_quantized, recipe)
    warn_if_emulated(recipe, x, kernel)
    return _dispatch_dense(
        x,
        kernel,
        bias,
        handle,
        kernel_quantized,
        recipe=recipe,
        wire_format=recipe.formats().grad_dgrad if quantize_combine else None,
        specs=specs_in_use(kernel.ndim, None, w_spec, None),
        w_spec=w_spec,
    )


def _dispatch_dense_fwd(x, kernel, bias, handle, cached, *, recipe, specs, w_spec, **backward):
    del w_spec, backward
    formats, sizes = recipe.formats(), handle.group_sizes
    rows = named("dispatched", dispatch(handle, quantize(x, formats.x)))
    along_rows = grouped_quantize(
        dequantize(rows, spec=specs[0]), sizes, formats.x_wgrad, axis=1, spec=specs[0]
    )
    if cached is None:
        cached, _ = kernel_copies(kernel, recipe, 1, None, specs[1])
    y, residuals = multiply_rows(
        (rows, along_rows), cached, sizes, bias, out_dtype=x.dtype, specs=specs
    )
    return y, (residuals, handle)


def _dispatch_dense_bwd(residuals, dy, *, recipe, specs, w_spec, wire_format):
    of_rows, handle = residuals
    d_rows, d_kernel, d_bias = multiply_rows_bwd(
        of_rows, dy, recipe=recipe, specs=specs, x_spec=specs[0], w_spec=w_spec
    )
    d_x = combine(handle, d_rows, wire_format=wire_format)
    return d_x, d_kernel, d_bias, None, None


_dispatch_dense = differentiable(_dispatch_dense_fwd, _dispatch_dense_bwd)
