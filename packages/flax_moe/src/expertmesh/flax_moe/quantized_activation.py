"""An activation, quantized, and multiplied by experts, as one function with one VJP.

    y[p, r] = q(a)[p, r] @ q(w)[e]                  a = activate(h) quantized along F; e = the row's expert
    dw[e]   = sum of q(a)[p, r]^T q(dy)[p, r]       both quantized along the rows
    dh      = da * the derivative at h              da = q(dy) @ q(w)^T; dy and w quantized along D

The numbers are those of `grouped_dense(activate(h), w)`, to the bit; the activation itself is not kept, nor written
where a kernel quantizes it.

Dimension key: P participants, C rows per participant, F expert width, D model width, E experts, G groups per
participant.
"""

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.layer import Extra, Layer, residuals
from expertmesh.core.ops.activate_quantize import activate_quantize
from expertmesh.core.ops.activation import Activation, activate, gated_grad_op
from expertmesh.core.ops.grouped_dense import (
    grouped_dense_bwd,
    kernel_for_dgrad,
    kernel_for_fprop,
    product,
    stateless_layer,
)
from expertmesh.core.ops.grouped_quantize import grouped_quantize, quantizes_both_at_once
from expertmesh.core.ops.quantize_kernel import QuantizedKernel
from expertmesh.core.recipe import Recipe
from expertmesh.core.vjp import differentiable

__all__ = ["activate_dense", "activates_quantized"]


def activates_quantized(recipe: Recipe | None, activation: str | Activation) -> bool:
    """Whether `activate_dense` takes these."""
    if recipe is None or not Activation.of(activation).gated:
        return False
    formats = recipe.formats()
    return not formats.is_stochastic and quantizes_both_at_once(formats.x, formats.x_wgrad)


def activate_dense(
    h: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: str | Activation,
    recipe: Recipe,
    kernel_quantized: QuantizedKernel | None = None,
    reduce_dtype="float32",
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`grouped_dense(activate(h, activation), kernel, group_sizes, recipe=recipe)`.

    Args:
      h: float[P, C, 2, F].
      kernel: float[E, F, D].
      group_sizes: int32[P, G], aligned to the recipe's blocks.
      activation, recipe: for which `activates_quantized` holds.
      kernel_quantized, reduce_dtype: see `expertmesh.core.grouped_dense`.
      w_spec: where `kernel` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, D] in h's dtype; zeros for rows after the last group.

    Raises:
      ValueError: what `activate` and `grouped_dense` refuse.

    Differentiable in h and `kernel`. Kept for the backward: h, its activation quantized along the rows, and `kernel`
    quantized along D. Costs and communication are those of `grouped_dense`.
    """
    extra = Extra(kernel_quantized=kernel_quantized)
    layer = stateless_layer("activate_dense", h, kernel, extra, recipe, w_spec, reduce_dtype)
    activation = Activation.of(activation)
    return _activate_dense(h, kernel, group_sizes, extra, layer=layer, activation=activation)


def _product(q_a, kernel, group_sizes, extra: Extra, layer: Layer):
    """(y, the kernel quantized along F)."""
    q_kernel = kernel_for_fprop(kernel, extra, layer)
    return product(q_a, q_kernel, group_sizes, None, layer), q_kernel


def _value(h, kernel, group_sizes, extra, *, layer: Layer, activation):
    a = activate(h, activation)
    q_a = grouped_quantize(a, group_sizes, layer.formats.x, axis=2, spec=layer.used[0])
    return _product(q_a, kernel, group_sizes, extra, layer)[0]


def _fwd(h, kernel, group_sizes, extra, *, layer: Layer, activation):
    formats = layer.formats.x, layer.formats.x_wgrad
    q_a, along_rows = activate_quantize(h, group_sizes, formats, activation, spec=layer.used[0])
    y, q_kernel = _product(q_a, kernel, group_sizes, extra, layer)
    q_kernel = kernel_for_dgrad(kernel, q_kernel, extra, layer)
    return y, ((*residuals(along_rows, q_kernel), group_sizes, None, None), h)


def _bwd(carried, dy, *, layer: Layer, activation):
    of_product, h = carried
    d_a, d_kernel, *_ = grouped_dense_bwd(of_product, dy, layer=layer)
    return gated_grad_op(h, d_a, activation=activation), d_kernel, None, None


_activate_dense = differentiable(_fwd, _bwd, _value)
