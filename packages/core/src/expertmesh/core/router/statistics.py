"""What a router did: counts, load, entropy. Numbers to watch; nothing here is differentiable.

Dimension key: `...` tokens, E experts, K choices per token.
"""

import dataclasses
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.operands import is_routed, wide_ids
from expertmesh.core.router.balance import (
    check_balance_operands,
    expert_counts,
    live_tokens_op,
    sum_op,
)
from expertmesh.core.router.scores import ExpertScores

__all__ = ["RouterStatistics", "router_statistics"]


class RouterStatistics(NamedTuple):
    """See `router_statistics`.

    Attributes:
      tokens_per_expert: int32[E], choices of each expert.
      max_over_mean_load: float32[], max_e n_e / mean_e n_e: 1 for a balanced routing; 0 where nothing is routed.
      entropy: float32[], in nats: the mean over routed tokens of -sum_e q_e log q_e; 0 where nothing is routed.
      num_masked: int32[], tokens without a routed choice.
    """

    tokens_per_expert: jax.Array
    max_over_mean_load: jax.Array
    entropy: jax.Array
    num_masked: jax.Array


def router_statistics(
    logits: jax.Array, topk_idx: jax.Array, *, score_function: str = "softmax"
) -> RouterStatistics:
    """Statistics of a routing, over all tokens of all shards.

    Args:
      logits: float[..., E].
      topk_idx: int[..., K], as `route` returns them: -1 (or any value outside [0, E)) is not routed.
      score_function: of the scores q, normalised over all experts as in `load_balance_loss`.

    Returns:
      RouterStatistics; gradient 0.

    Raises:
      ValueError: leading dimensions differ, or an unknown score function.
      TypeError: `topk_idx` is not of integers, or `logits` not of floats.

    Costs all-reduces of one [E] vector and two scalars over the axes that shard tokens. Inside your own `shard_map`:
    the shard's.
    """
    check_balance_operands("router_statistics", logits, topk_idx, score_function, None)
    logits, num_experts = jax.lax.stop_gradient(logits), logits.shape[-1]
    count_E = expert_counts(topk_idx, num_experts=num_experts)
    live = jnp.any(is_routed(wide_ids(topk_idx), num_experts), axis=-1)
    num_masked = live_tokens_op(topk_idx, ~live, sequence_dims=0)
    num_routed = jnp.maximum(prod(live.shape) - num_masked, 1).astype(jnp.float32)
    entropy = _Entropy(ExpertScores(score_function))
    total = sum_op(logits, jnp.ones(1, jnp.float32), live, quantity=entropy)
    load_E = count_E.astype(jnp.float32)
    routed = jnp.sum(load_E)
    return RouterStatistics(
        tokens_per_expert=count_E,
        max_over_mean_load=jnp.max(load_E) * num_experts / jnp.where(routed > 0, routed, 1.0),
        entropy=total / num_routed,
        num_masked=num_masked,
    )


@dataclasses.dataclass(frozen=True)
class _Entropy:
    """-sum_e q_e log q_e of a token, float32[..., 1]."""

    scores: ExpertScores

    def __call__(self, logits: jax.Array) -> jax.Array:
        q = self.scores(logits)
        # 0 log 0 = 0, and NaN stays NaN.
        return -jnp.sum(jnp.where(q == 0, 0.0, q * jnp.log(q)), axis=-1, keepdims=True)
