"""Tokens quantized, dispatched, multiplied by experts, activated and multiplied again, as one function with one VJP.

    h[p, r]  = rows[p, r] @ q(wi)[e]                rows: dispatched q(x), as in `quantized_dispatch.py`
    y[p, r]  = q(a)[p, r] @ q(wo)[e]                a = activate(h) quantized along F; e = the row's expert
    dwo[e]   = sum of q(a)[p, r]^T q(dy)[p, r]      both quantized along the rows
    dh       = da * the derivative at h             da = q(dy) @ q(wo)^T; dy and wo quantized along D
    dwi, dx                                         of q(dh), as in `quantized_dispatch.py`

The numbers are those of `dispatch_dense`, `activate` and `grouped_dense` one after the other. Neither the activation
nor dh is kept, nor written where a kernel quantizes it. Nothing reads rows after the last group, so they are not
written.

Dimension key: P participants, C rows per participant, F expert width, D model width, E experts, G groups per
participant.
"""

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.layer import Extra, Layer, residuals
from expertmesh.core.ops.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.ops.activation import Activation, activate
from expertmesh.core.ops.grouped_dense import (
    grouped_dense_bwd,
    kernel_for_dgrad,
    kernel_for_fprop,
    product,
    product_grads,
    stateless_layer,
)
from expertmesh.core.ops.grouped_quantize import grouped_quantize, quantizes_both_at_once
from expertmesh.core.ops.quantize_kernel import QuantizedKernel
from expertmesh.core.recipe import Recipe
from expertmesh.core.vjp import differentiable
from expertmesh.ep import Handle, combine
from expertmesh.flax_moe import quantized_dispatch as dispatched
from expertmesh.flax_moe.config import dispatches_quantized
from expertmesh.flax_moe.remat import named

__all__ = ["dispatch_experts", "takes_experts"]


def takes_experts(recipe: Recipe | None, activation: str | Activation) -> bool:
    """Whether `dispatch_experts` takes these."""
    if recipe is None or not Activation.of(activation).gated or not dispatches_quantized(recipe):
        return False
    formats = recipe.formats()
    return not formats.is_stochastic and quantizes_both_at_once(formats.x, formats.x_wgrad)


def dispatch_experts(
    handle: Handle,
    x: jax.Array,
    wi: jax.Array,
    wo: jax.Array,
    *,
    activation: str | Activation,
    recipe: Recipe,
    kernels_quantized: tuple[QuantizedKernel | None, QuantizedKernel | None] = (None, None),
    quantize_combine: bool = False,
    reduce_dtype="float32",
    w_specs: tuple[PartitionSpec | None, PartitionSpec | None] = (None, None),
) -> jax.Array:
    """`h = dispatch_dense(handle, x, wi)`; `grouped_dense(activate(h, activation), wo, handle.group_sizes)`.

    Args:
      handle, x, quantize_combine: see `dispatch_dense`.
      wi: float[E, D, 2, F].
      wo: float[E, F, D].
      activation, recipe: for which `takes_experts` holds.
      kernels_quantized, reduce_dtype, w_specs: see `expertmesh.core.grouped_dense`, of `wi` and `wo`.

    Returns:
      [P, C, D] in x's dtype; rows after the last group are not to be read.

    Raises:
      ValueError: what `dispatch_dense`, `activate` and `grouped_dense` refuse.

    Differentiable in x, `wi` and `wo`. Kept for the backward: what `dispatch_dense` keeps, h, its activation quantized
    along the rows, and `wo` quantized along D. Costs and communication are those of the functions that it stands for.
    """
    extras = tuple(Extra(kernel_quantized=kernel) for kernel in kernels_quantized)
    layers = tuple(
        stateless_layer(
            "dispatch_experts", x, w, extra, recipe, spec, reduce_dtype, zero_rest=False
        )
        for w, extra, spec in zip((wi, wo), extras, w_specs, strict=True)
    )
    wire_format = layers[0].formats.grad_dgrad if quantize_combine else None
    return _dispatch_experts(
        x,
        wi,
        wo,
        handle,
        extras,
        layers=layers,
        activation=Activation.of(activation),
        wire_format=wire_format or dispatched.plain_wire(handle, x),
    )


def _product(q_a, wo, group_sizes, extra: Extra, layer: Layer):
    """(y, wo quantized along F)."""
    q_wo = kernel_for_fprop(wo, extra, layer)
    return product(q_a, q_wo, group_sizes, None, layer), q_wo


def _value(x, wi, wo, handle, extras, *, layers, activation, wire_format):
    del wire_format
    h = named("hidden", dispatched.value(x, wi, None, handle, extras[0], layer=layers[0]))
    a, sizes, layer = activate(h, activation), handle.group_sizes, layers[1]
    q_a = grouped_quantize(a, sizes, layer.formats.x, axis=2, spec=layer.used[0])
    return _product(q_a, wo, sizes, extras[1], layer)[0]


def _fwd(x, wi, wo, handle, extras, *, layers, activation, wire_format):
    del wire_format
    h, of_rows = dispatched.fwd(x, wi, None, handle, extras[0], layer=layers[0])
    h, sizes, layer = named("hidden", h), handle.group_sizes, layers[1]
    formats = layer.formats.x, layer.formats.x_wgrad
    q_a, along_rows = activate_quantize(
        h, sizes, formats, activation, spec=layer.used[0], zero_rest=layer.zero_rest
    )
    y, q_wo = _product(q_a, wo, sizes, extras[1], layer)
    q_wo = kernel_for_dgrad(wo, q_wo, extras[1], layer)
    return y, (of_rows, h, (*residuals(along_rows, q_wo), sizes, None, None))


def _bwd(carried, dy, *, layers, activation, wire_format):
    (of_rows, handle), h, of_activation = carried
    d_a, d_wo, *_ = grouped_dense_bwd(of_activation, dy, layer=layers[1])
    layer, sizes = layers[0], handle.group_sizes
    formats = layer.formats.grad_dgrad, layer.formats.grad_wgrad
    copies = activate_grad_quantize(
        h, d_a, sizes, formats, activation, spec=layer.used[2], zero_rest=layer.zero_rest
    )
    q_rows, q_wi, *_ = of_rows
    d_rows, d_wi = product_grads(q_rows, q_wi, sizes, copies, layer)
    return combine(handle, d_rows, wire_format=wire_format), d_wi, d_wo, None, None


_dispatch_experts = differentiable(_fwd, _bwd, _value)
