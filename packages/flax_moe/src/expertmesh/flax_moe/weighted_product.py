"""Activation, routing weights and second product, as one function with one VJP.

    y_r = (w_r act(h_r)) Wo_e                 e = the row's expert

    d_r  = g_r Wo_e^T                         g = the cotangent of y
    dh_r = w_r d_r * the derivative at h_r    dw_r = <d_r, act(h_r)>      dWo_e = sum of (w_r act(h_r))^T g_r

The gradient of a weight needs no expert output, so neither these nor the activations are kept: the pass that makes dh
and dw makes w act(h) again. Nothing reads rows after the last group, so nothing is written there.

Dimension key: P participants, C rows per participant, F expert width, D model width, E experts.
"""

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.mesh import narrow_at_rest
from expertmesh.core.op import check_reduce_dtype
from expertmesh.core.ops.activate_rows import activate_rows_grad_op, activate_rows_op
from expertmesh.core.ops.activation import Activation
from expertmesh.core.vjp import at_rest, differentiable
from expertmesh.ep import Handle
from expertmesh.flax_moe.remat import named

__all__ = ["weighted_product"]


def weighted_product(
    h: jax.Array,
    wo: jax.Array,
    weights: jax.Array,
    handle: Handle,
    *,
    activation: str | Activation,
    reduce_dtype: DTypeLike = "float32",
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`grouped_gemm(weights[..., None] * activate(h), wo, handle.group_sizes)`.

    Args:
      h: float[P, C, 2, F], or [P, C, F] without a gate.
      wo: float[E, F, D]; cast to the dtype of h, its gradient is accumulated and returned in its own.
      weights: float32[P, C] of `dispatch_weights`.
      handle: of `prepare`.
      activation: see `expertmesh.core.activate`.
      reduce_dtype: of the gradient of `wo`; see `expertmesh.core.grouped_gemm`.
      w_spec: where `wo` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, D] in the dtype of h, for `combine`; rows after the last group are not to be read, and rows that hold no
      token do not enter a gradient, whatever they hold.

    Differentiable in h, wo and weights. Kept for the backward: h and the weights. A sharded F costs the backward an
    all-reduce [P, C].
    """
    return _weighted_product(
        h,
        wo,
        weights,
        handle,
        activation=Activation.of(activation),
        reduce_dtype=check_reduce_dtype("weighted_product", reduce_dtype),
        w_dtype=wo.dtype,
        w_spec=w_spec,
    )


_Residuals = tuple[jax.Array, jax.Array, jax.Array, Handle]


def _fwd(
    h: jax.Array,
    wo: jax.Array,
    weights: jax.Array,
    handle: Handle,
    *,
    activation: Activation,
    reduce_dtype: DTypeLike,
    w_dtype: DTypeLike,
    w_spec: PartitionSpec | None,
) -> tuple[jax.Array, _Residuals]:
    del reduce_dtype, w_dtype
    sizes, wo = handle.group_sizes, narrow_at_rest(wo, h.dtype, w_spec, ("experts", "fsdp"))
    a_PCF = activate_rows_op(h, weights, handle.source, sizes, activation=activation)
    specs = (None, w_spec, None)
    y_PCD = grouped_gemm_op(
        a_PCF, wo, sizes, out_dtype=h.dtype, zero_rest=False, operand_specs=specs
    )
    return named("expert_output", y_PCD), (h, wo, weights, handle)


def _bwd(
    residuals: _Residuals,
    d_rows: jax.Array,
    *,
    activation: Activation,
    reduce_dtype: DTypeLike,
    w_dtype: DTypeLike,
    w_spec: PartitionSpec | None,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    h, wo, weights, handle = residuals
    d_out = grouped_gemm_dgrad_op(
        d_rows,
        wo,
        handle.group_sizes,
        out_dtype=h.dtype,
        zero_rest=False,
        operand_specs=(None, w_spec, None),
        result_specs=(_spec_of_activation(h),),
    )
    d_h, d_weights, a_PCF = activate_rows_grad_op(
        h, d_out, weights, handle.source, handle.group_sizes, activation=activation
    )
    d_wo = grouped_gemm_wgrad_op(
        a_PCF,
        d_rows,
        handle.group_sizes,
        num_experts=wo.shape[0],
        out_dtype=w_dtype,
        result_specs=(at_rest(wo, w_spec),),
        reduce_dtype=reduce_dtype,
    )
    return d_h, d_wo, d_weights, None


def _spec_of_activation(h: jax.Array) -> PartitionSpec | None:
    """[P, C, F] where h is, as far as its type says so."""
    spec = at_rest(h, None)
    return spec and PartitionSpec(spec[0], spec[1], spec[-1])


_weighted_product = differentiable(_fwd, _bwd)
