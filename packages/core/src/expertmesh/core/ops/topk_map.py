"""Conversions between routing maps over experts and lists of chosen experts, and of the numbers that belong to them.

    map[..., e] = any_k idx[..., k] == e,   probs[..., e] = sum_k [idx[..., k] == e] * weights[..., k]

Dimension key: `...` tokens, E experts, K choices per token. Comparisons with every expert, in place of scatters.
"""

import operator

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.core.vjp import differentiable

__all__ = [
    "probs_to_topk_weights",
    "routing_map_to_topk_idx",
    "topk_idx_to_routing_map",
    "topk_weights_to_probs",
]


def routing_map_to_topk_idx(routing_map: jax.Array, *, top_k: int) -> jax.Array:
    """The chosen experts of each token in ascending order: idx[..., k] is the k-th e with map[..., e].

    Args:
      routing_map: bool or int[..., E]; nonzero is chosen.
      top_k: K. Of a token with more experts the K lowest are taken; -1 fills the places of a token with fewer.

    Returns:
      int32[..., K].

    Raises:
      TypeError: routing_map is neither of bools nor of integers.
      ValueError: top_k below 1, or a map of rank 0.

    Costs no communication when tokens are sharded; E is held whole.
    """
    if not (routing_map.dtype == jnp.bool_ or jnp.issubdtype(routing_map.dtype, jnp.integer)):
        raise TypeError(
            "routing_map_to_topk_idx: routing_map must be of bools or integers; got "
            f"dtype={routing_map.dtype}; pass which experts are chosen, not scores"
        )
    if operator.index(top_k) < 1 or routing_map.ndim < 1:
        raise ValueError(
            "routing_map_to_topk_idx: top_k must be >= 1 and the map have a dimension of experts; got "
            f"top_k={top_k}, routing_map.shape={routing_map.shape}; use top_k=E to keep all experts"
        )
    return _map_to_idx(routing_map, top_k=operator.index(top_k))


def topk_idx_to_routing_map(topk_idx: jax.Array, *, num_experts: int) -> jax.Array:
    """map[..., e] = any_k topk_idx[..., k] == e.

    Args:
      topk_idx: int[..., K]; an id outside [0, E), such as -1, chooses nothing. Equal ids of a token are one entry.
      num_experts: E.

    Returns:
      bool[..., E].

    Raises:
      TypeError: topk_idx is not of integers.
      ValueError: num_experts below 1, or rank 0.

    Costs no communication when tokens are sharded; K is held whole.
    """
    _check_idx("topk_idx_to_routing_map", topk_idx)
    return _idx_to_map(topk_idx, num_experts=_check_experts("topk_idx_to_routing_map", num_experts))


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


def _map_to_idx_reference(routing_map, *, top_k):
    seen = jnp.cumsum(routing_map != 0, axis=-1, dtype=jnp.int32)[..., None, :]
    before = seen <= jnp.arange(top_k, dtype=jnp.int32)[:, None]
    idx = jnp.sum(before, axis=-1, dtype=jnp.int32)
    return jnp.where(idx < routing_map.shape[-1], idx, -1)


def _is_expert(topk_idx, num_experts):
    """bool[..., K, E]; fused into what reads it."""
    return topk_idx[..., None] == jnp.arange(num_experts, dtype=topk_idx.dtype)


def _idx_to_map_reference(topk_idx, *, num_experts):
    return jnp.any(_is_expert(_wide(topk_idx), num_experts), axis=-2)


def _to_weights_reference(probs, topk_idx):
    chosen = _is_expert(_wide(topk_idx), probs.shape[-1])
    return jnp.sum(jnp.where(chosen, probs[..., None, :], jnp.zeros_like(probs[..., None, :])), -1)


def _to_probs_reference(topk_weights, topk_idx, *, num_experts):
    chosen = _is_expert(_wide(topk_idx), num_experts)
    wide = topk_weights.astype(accumulator_dtype(topk_weights.dtype))[..., None]
    return jnp.sum(jnp.where(chosen, wide, jnp.zeros_like(wide)), -2).astype(topk_weights.dtype)


def _wide(topk_idx):
    """A narrow integer could not hold every expert id it is compared with."""
    return topk_idx if topk_idx.dtype.itemsize >= 4 else topk_idx.astype(jnp.int32)


# The dimension of experts is m: the factor e would have the role of experts that a mesh axis shards.
_map_to_idx = Op("routing_map_to_topk_idx", _map_to_idx_reference, "... m -> ... k", whole=("m",))
_idx_to_map = Op("topk_idx_to_routing_map", _idx_to_map_reference, "... k -> ... m", whole=("k",))
_gather = Op(
    "probs_to_topk_weights", _to_weights_reference, "... m, ... k -> ... k", whole=("m", "k")
)
_spread = Op("topk_weights_to_probs", _to_probs_reference, "... k, ... k -> ... m", whole=("k",))


def _to_weights_fwd(probs, topk_idx):
    return _gather(probs, topk_idx), (topk_idx, _Size(probs.shape[-1]))


def _to_weights_bwd(residuals, d_weights):
    topk_idx, size = residuals
    return _spread(d_weights, topk_idx, num_experts=int(size)), None


def _to_probs_fwd(topk_weights, topk_idx, *, num_experts):
    return _spread(topk_weights, topk_idx, num_experts=num_experts), topk_idx


def _to_probs_bwd(topk_idx, d_probs, *, num_experts):
    return _gather(d_probs, topk_idx), None


@jax.tree_util.register_static
class _Size(int):
    """The number of experts: a static leaf of the residuals, where probs themselves are not needed."""


_to_weights = differentiable(_to_weights_fwd, _to_weights_bwd)
_to_probs = differentiable(_to_probs_fwd, _to_probs_bwd)


def _check_experts(function, num_experts) -> int:
    if operator.index(num_experts) < 1:
        raise ValueError(
            f"{function}: num_experts must be >= 1; got num_experts={num_experts}; pass the number of all experts"
        )
    return operator.index(num_experts)


def _check_idx(function, topk_idx):
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(
            f"{function}: topk_idx must be of integers; got dtype={topk_idx.dtype}; pass expert ids"
        )
    if topk_idx.ndim < 1:
        raise ValueError(
            f"{function}: topk_idx must have a dimension of choices; got shape={topk_idx.shape}; add one"
        )


def _check_values(function, name, values, topk_idx):
    _check_idx(function, topk_idx)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(
            f"{function}: {name} must be floating; got dtype={values.dtype}; cast to float32"
        )
    if values.ndim < 1 or values.shape[:-1] != topk_idx.shape[:-1]:
        raise ValueError(
            f"{function}: {name} and topk_idx must have equal leading dimensions; got {name}.shape={values.shape}, "
            f"topk_idx.shape={topk_idx.shape}; pass those of the same tokens"
        )
