"""Rows that arrived quantized, multiplied by experts, activated and multiplied again, as one function with one VJP.

    h[p, r]  = rows[p, r] @ q(wi)[e]                rows: dispatched q(x), as in `quantized_dispatch.py`
    y[p, r]  = q(a)[p, r] @ q(wo)[e]                a = activate(h) quantized along F; e = the row's expert
    dwo[e]   = sum of q(a)[p, r]^T q(dy)[p, r]      both quantized along the rows
    dh       = da * the derivative at h             da = q(dy) @ q(wo)^T; dy and wo quantized along D
    dwi, drows                                      of q(dh), as in `quantized_dispatch.py`

The numbers are those of `dispatched_dense`, `activate` and `grouped_dense` one after the other. Neither the activation
nor dh is kept, nor written where a kernel quantizes it. Nothing reads rows after the last group, so they are not
written.

Dimension key: P participants, C rows per participant, F expert width, D model width, E experts, G groups per
participant.
"""

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.apply import (
    layer_of,
    linear_bwd,
    product,
    product_grads,
    weight_for_dgrad,
    weight_for_fprop,
)
from expertmesh.core.linear.grouped_gemm import GROUPED
from expertmesh.core.linear.layer import Extra, Layer, residuals
from expertmesh.core.linear.quantize_kernel import QuantizedKernel
from expertmesh.core.ops.activation import Activation, activate_at
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.quantization.quantize_rows import grouped_quantize, quantizes_both_at_once
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import Recipe
from expertmesh.core.vjp import differentiable
from expertmesh.flax_moe import quantized_dispatch as dispatched
from expertmesh.flax_moe.config import dispatches_quantized
from expertmesh.flax_moe.remat import named

__all__ = ["dispatched_experts", "takes_experts"]


def takes_experts(recipe: Recipe | None, activation: str | Activation) -> bool:
    """Whether `dispatched_experts` takes these."""
    if recipe is None or not Activation.of(activation).gated or not dispatches_quantized(recipe):
        return False
    formats = recipe.formats()
    return not formats.is_stochastic and quantizes_both_at_once(formats.x, formats.x_wgrad)


def dispatched_experts(
    rows: jax.Array,
    quantized: QuantizedArray,
    wi: jax.Array,
    wo: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: str | Activation,
    recipe: Recipe,
    kernels_quantized: tuple[QuantizedKernel | None, QuantizedKernel | None] = (None, None),
    reduce_dtype: DTypeLike = "float32",
    w_specs: tuple[PartitionSpec | None, PartitionSpec | None] = (None, None),
) -> jax.Array:
    """`h = dispatched_dense(rows, quantized, wi, group_sizes)`; `grouped_dense(activate(h), wo, group_sizes)`.

    Args:
      rows, quantized, group_sizes: see `dispatched_dense`.
      wi: float[E, D, 2, F].
      wo: float[E, F, D].
      activation, recipe: for which `takes_experts` holds.
      kernels_quantized, reduce_dtype, w_specs: see `expertmesh.core.grouped_dense`, of `wi` and `wo`.

    Returns:
      [P, C, D] in the dtype of `rows`; rows after the last group are not to be read.

    Raises:
      ValueError: what `dispatched_dense`, `activate` and `grouped_dense` refuse.

    Differentiable in `rows`, `wi` and `wo`. Kept for the backward: what `dispatched_dense` keeps, h, its activation
    quantized along the rows, and `wo` quantized along D. Costs and communication are those of the functions that it
    stands for.
    """
    extras = tuple(Extra(kernel_quantized=kernel) for kernel in kernels_quantized)
    layers = tuple(
        layer_of(
            "dispatched_experts",
            GROUPED,
            rows,
            w,
            extra,
            recipe,
            reduce_dtype=reduce_dtype,
            specs=(None, spec, None),
            zero_rest=False,
        )
        for w, extra, spec in zip((wi, wo), extras, w_specs, strict=True)
    )
    return _dispatched_experts(
        rows,
        quantized,
        wi,
        wo,
        group_sizes,
        extras,
        layers=layers,
        activation=Activation.of(activation),
    )


_Extras = tuple[Extra, Extra]
_Layers = tuple[Layer, Layer]
# Of both layers, and `h` between them.
_Carried = tuple[dispatched.Carried, jax.Array, dispatched.Carried]


def _product(
    q_a: QuantizedArray, wo: jax.Array, group_sizes: jax.Array, extra: Extra, layer: Layer
) -> tuple[jax.Array, QuantizedArray]:
    """(y, wo quantized along F)."""
    q_wo, _ = weight_for_fprop(wo, extra, layer)
    return product(q_a, q_wo, group_sizes, None, layer), q_wo


def _value(
    rows: jax.Array,
    quantized: QuantizedArray,
    wi: jax.Array,
    wo: jax.Array,
    sizes: jax.Array,
    extras: _Extras,
    *,
    layers: _Layers,
    activation: Activation,
) -> jax.Array:
    h = dispatched.value(rows, quantized, wi, None, sizes, extras[0], layer=layers[0])
    layer = layers[1]
    a = activate_at(named("hidden", h), activation, layer.used[0])
    q_a = grouped_quantize(a, sizes, layer.formats.x, axis=2, spec=layer.used[0])
    return _product(q_a, wo, sizes, extras[1], layer)[0]


def _fwd(
    rows: jax.Array,
    quantized: QuantizedArray,
    wi: jax.Array,
    wo: jax.Array,
    sizes: jax.Array,
    extras: _Extras,
    *,
    layers: _Layers,
    activation: Activation,
) -> tuple[jax.Array, _Carried]:
    h, of_rows = dispatched.fwd(rows, quantized, wi, None, sizes, extras[0], layer=layers[0])
    h, layer = named("hidden", h), layers[1]
    formats = layer.formats.x, layer.formats.x_wgrad
    q_a, along_rows = activate_quantize(
        h, sizes, formats, activation, spec=layer.used[0], zero_rest=layer.zero_rest
    )
    y, q_wo = _product(q_a, wo, sizes, extras[1], layer)
    q_wo = weight_for_dgrad(wo, q_wo, extras[1], layer)
    return y, (of_rows, h, (*residuals(along_rows, q_wo), sizes, None, None))


def _bwd(
    carried: _Carried, dy: jax.Array, *, layers: _Layers, activation: Activation
) -> tuple[jax.Array | None, ...]:
    of_rows, h, of_activation = carried
    d_a, d_wo, *_ = linear_bwd(of_activation, dy, layer=layers[1])
    layer, (q_rows, q_wi, sizes, *_) = layers[0], of_rows
    formats = layer.formats.grad_dgrad, layer.formats.grad_wgrad
    copies = activate_grad_quantize(
        h, d_a, sizes, formats, activation, spec=layer.used[2], zero_rest=layer.zero_rest
    )
    d_rows, d_wi = product_grads(q_rows, q_wi, sizes, copies, layer)
    return d_rows, None, d_wi, d_wo, None, None


_dispatched_experts = differentiable(_fwd, _bwd, _value)
