"""What a router did: counts, load, entropy. Numbers to watch; nothing here is differentiable.

Dimension key: `...` tokens, E experts, K choices per token.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import is_routed, wide_ids
from expertmesh.core.router.balance import check_balance_operands, counts
from expertmesh.core.router.scores import ExpertScores
from expertmesh.core.vjp import differentiable

__all__ = ["RouterStatistics", "router_statistics"]


class RouterStatistics(NamedTuple):
    """See `router_statistics`.

    Attributes:
      tokens_per_expert: int32[E], choices of each expert.
      max_over_mean_load: float32[], max_e n_e / mean_e n_e: 1 for a balanced routing; 0 where nothing is routed.
      entropy: float32[], in nats: the mean over routed tokens of -sum_e q_e log q_e; 0 where nothing is routed.
      num_masked: int32[], tokens none of whose choices is routed.
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
    count_E, entropy, num_masked = _constants(logits, topk_idx, score_function=score_function)
    load_E = count_E.astype(jnp.float32)
    num_routed = jnp.maximum(prod(logits.shape[:-1]) - num_masked, 1).astype(jnp.float32)
    mean = jnp.sum(load_E) / logits.shape[-1]
    return RouterStatistics(
        tokens_per_expert=count_E,
        max_over_mean_load=jnp.max(load_E) / jnp.where(mean > 0, mean, 1.0),
        entropy=entropy / num_routed,
        num_masked=num_masked,
    )


def _statistics(
    logits: jax.Array, topk_idx: jax.Array, *, score_function: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts, sum of the entropies of routed tokens, number of tokens that are not routed."""
    num_experts = logits.shape[-1]
    topk_idx = wide_ids(topk_idx)
    routed = is_routed(topk_idx, num_experts)
    count_E = counts(topk_idx, num_experts=num_experts, sequence_dims=0)
    q = ExpertScores(score_function)(logits)
    # 0 log 0 = 0, and NaN stays NaN.
    entropy = -jnp.sum(jnp.where(q == 0, 0.0, q * jnp.log(q)), axis=-1)
    live = jnp.any(routed, axis=-1)
    return count_E, jnp.sum(jnp.where(live, entropy, 0.0)), jnp.sum(~live, dtype=jnp.int32)


_statistics_op = Op(
    "router_statistics",
    _statistics,
    "... e, ... k -> e, (), ()",
    summed=("...",),
    whole=("e", "k"),
    roles="tokens ., tokens . -> ., (), ()",
)


def _constants_fwd(
    logits: jax.Array, topk_idx: jax.Array, *, score_function: str
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    return _statistics_op(logits, topk_idx, score_function=score_function), None


def _constants_bwd(
    residuals: None, cotangents: object, *, score_function: str
) -> tuple[None, None]:
    return None, None


# A stop_gradient would not do: choices that come from differentiable weights' op carry (empty) tangents.
_constants = differentiable(_constants_fwd, _constants_bwd)
