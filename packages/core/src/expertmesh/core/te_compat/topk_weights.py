"""The same weights as one number per expert (`probs[..., E]`) and as one per choice (`topk_weights[..., K]`).

    probs[..., e] = sum_k [idx[..., k] == e] * weights[..., k]

Dimension key: `...` tokens, E experts, K choices per token. Comparisons with every expert, in place of scatters.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import FLOATS, INTEGERS, check_arrays, wide_ids
from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.core.vjp import differentiable

__all__ = ["probs_to_topk_weights", "topk_weights_to_probs"]


def probs_to_topk_weights(probs: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """weights[..., k] = probs[..., topk_idx[..., k]], and 0 for an id outside [0, E).

    Args:
      probs: float[..., E].
      topk_idx: int[..., K].

    Returns:
      [..., K] in the dtype of probs. The cotangent is `topk_weights_to_probs`.

    Raises:
      TypeError: probs is not floating, or topk_idx is not of integers.
      ValueError: leading dimensions differ.

    Costs no communication when tokens are sharded; E and K are held whole.
    """
    _check_values("probs_to_topk_weights", "probs", probs, topk_idx)
    return _to_weights(probs, topk_idx)


def topk_weights_to_probs(
    topk_weights: jax.Array, topk_idx: jax.Array, *, num_experts: int
) -> jax.Array:
    """probs[..., e] = sum_k [topk_idx[..., k] == e] * topk_weights[..., k].

    Args:
      topk_weights: float[..., K].
      topk_idx: int[..., K]; the weight of an id outside [0, E) is left out.
      num_experts: E.

    Returns:
      [..., E] in the dtype of topk_weights, accumulated in float32. The cotangent is `probs_to_topk_weights`.

    Raises:
      TypeError: topk_weights is not floating, or topk_idx is not of integers.
      ValueError: shapes differ, or num_experts below 1.

    Costs no communication when tokens are sharded; K is held whole.
    """
    _check_values("topk_weights_to_probs", "topk_weights", topk_weights, topk_idx)
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            "topk_weights_to_probs: one weight for each id must be given; got "
            f"topk_weights.shape={topk_weights.shape}, topk_idx.shape={topk_idx.shape}; use those of one router"
        )
    num_experts = _check_experts("topk_weights_to_probs", num_experts)
    return _to_probs(topk_weights, topk_idx, num_experts=num_experts)


def _is_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """bool[..., K, E]; fused into what reads it."""
    return topk_idx[..., None] == jnp.arange(num_experts, dtype=topk_idx.dtype)


def _to_weights_reference(probs: jax.Array, topk_idx: jax.Array) -> jax.Array:
    chosen = _is_expert(wide_ids(topk_idx), probs.shape[-1])
    return jnp.sum(jnp.where(chosen, probs[..., None, :], jnp.zeros_like(probs[..., None, :])), -1)


def _to_probs_reference(
    topk_weights: jax.Array, topk_idx: jax.Array, *, num_experts: int
) -> jax.Array:
    chosen = _is_expert(wide_ids(topk_idx), num_experts)
    wide = topk_weights.astype(accumulator_dtype(topk_weights.dtype))[..., None]
    return jnp.sum(jnp.where(chosen, wide, jnp.zeros_like(wide)), -2).astype(topk_weights.dtype)


# The dimension of experts is m: the factor e would have the role of experts that a mesh axis shards.
_gather = Op(
    "probs_to_topk_weights", _to_weights_reference, "... m, ... k -> ... k", whole=("m", "k")
)
_weights_to_probs = Op(
    "topk_weights_to_probs", _to_probs_reference, "... k, ... k -> ... m", whole=("k",)
)


def _to_weights_fwd(
    probs: jax.Array, topk_idx: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, "_Size"]]:
    return _gather(probs, topk_idx), (topk_idx, _Size(probs.shape[-1]))


def _to_weights_bwd(
    residuals: tuple[jax.Array, "_Size"], d_weights: jax.Array
) -> tuple[jax.Array, None]:
    topk_idx, size = residuals
    return _weights_to_probs(d_weights, topk_idx, num_experts=int(size)), None


def _to_probs_fwd(
    topk_weights: jax.Array, topk_idx: jax.Array, *, num_experts: int
) -> tuple[jax.Array, jax.Array]:
    return _weights_to_probs(topk_weights, topk_idx, num_experts=num_experts), topk_idx


def _to_probs_bwd(
    topk_idx: jax.Array, d_probs: jax.Array, *, num_experts: int
) -> tuple[jax.Array, None]:
    return _gather(d_probs, topk_idx), None


@jax.tree_util.register_static
class _Size(int):
    """The number of experts: a static leaf of the residuals, where probs themselves are not needed."""


_to_weights = differentiable(_to_weights_fwd, _to_weights_bwd)
_to_probs = differentiable(_to_probs_fwd, _to_probs_bwd)


def _check_experts(function: str, num_experts: int) -> int:
    if operator.index(num_experts) < 1:
        raise ValueError(
            f"{function}: num_experts must be >= 1; got num_experts={num_experts}; pass the number of all experts"
        )
    return operator.index(num_experts)


def _check_idx(function: str, topk_idx: jax.Array) -> None:
    check_arrays(function, INTEGERS, topk_idx=topk_idx)
    if topk_idx.ndim < 1:
        raise ValueError(
            f"{function}: topk_idx must have a dimension of choices; got shape={topk_idx.shape}; add one"
        )


def _check_values(function: str, name: str, values: Any, topk_idx: jax.Array) -> None:
    _check_idx(function, topk_idx)
    check_arrays(function, FLOATS, **{name: values})
    if values.ndim < 1 or values.shape[:-1] != topk_idx.shape[:-1]:
        raise ValueError(
            f"{function}: {name} and topk_idx must have equal leading dimensions; got {name}.shape={values.shape}, "
            f"topk_idx.shape={topk_idx.shape}; pass those of the same tokens"
        )
