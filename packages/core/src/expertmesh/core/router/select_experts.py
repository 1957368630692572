"""The K experts with the greatest scores, among all or among those of the best groups.

    groups: E / G experts each; score of a group = sum of its K / group_topk greatest; the group_topk best take part.

Dimension key: `...` tokens, K choices per token, E experts, G groups.
"""

import jax
import jax.numpy as jnp

__all__: list[str] = []


def select_experts(scores, *, top_k, num_groups=None, group_topk=None):
    """int32[..., K] by descending score, of equal scores the lower expert (or group) first; NaN before all others."""
    scores = _ordered(scores)
    if num_groups is None:
        return jax.lax.top_k(scores, top_k)[1]
    *tokens, num_experts = scores.shape
    group_size = num_experts // num_groups
    scores = scores.reshape(*tokens, num_groups, group_size)
    best = jax.lax.top_k(scores, top_k // group_topk)[0]
    kept = jax.lax.top_k(_ordered(jnp.sum(best, axis=-1)), group_topk)[1]
    # Ascending, so that of equal scores the lower expert still comes first. Experts of other groups are not masked
    # but absent: -inf could not tell them from experts of a kept group whose score is -inf.
    kept = jnp.sort(kept, axis=-1)
    candidates = jnp.take_along_axis(scores, kept[..., None], axis=-2)
    place = jax.lax.top_k(candidates.reshape(*tokens, group_topk * group_size), top_k)[1]
    group = jnp.take_along_axis(kept, place // group_size, axis=-1)
    return group * group_size + place % group_size


def _ordered(scores):
    """The scores as top_k's total order must see them: it tells -0.0 from 0.0 and NaN by its sign bit."""
    scores = jnp.where(scores == 0, jnp.float32(0), scores)
    return jnp.where(jnp.isnan(scores), jnp.float32(jnp.nan), scores)
