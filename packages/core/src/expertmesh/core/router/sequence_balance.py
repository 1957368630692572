"""The balance loss of each sequence by itself, averaged over sequences.

    1 / S * sum_s coeff * E / (K T_s^2) * sum_e P_se n_se,  P_se = sum_t q_ste,  n_se = #{(t, k): idx_stk = e}

with q the scores of a token normalised over all experts (see scores.py).

Dimension key: `...` sequences (S in all), T tokens of a sequence, E experts, K choices per token.
"""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.router.balance import check_balance_operands
from expertmesh.core.router.scores import expert_scores, expert_scores_grad
from expertmesh.core.vjp import differentiable

__all__ = ["sequence_balance_loss"]


def sequence_balance_loss(
    logits: jax.Array,
    topk_idx: jax.Array,
    *,
    coeff: float,
    score_function: str = "softmax",
    token_mask: jax.Array | None = None,
) -> jax.Array:
    """The mean over sequences of `load_balance_loss` of one sequence: no sequence may lean on another's balance.

    Args:
      logits: float[..., T, E]: the last dimension but one runs along a sequence.
      topk_idx: int[..., T, K]; values outside [0, E), such as -1 for "not routed", are not counted.
      coeff: Python number.
      score_function: see `load_balance_loss`.
      token_mask: bool[..., T]; tokens for which it is False are in neither P, n nor T_s.

    Returns:
      float32[], the same for every sharding. A sequence without tokens adds 0 and is one of the S; 0 for no sequences.
      Differentiable in `logits`; the counts n are constants.

    Raises:
      ValueError: leading dimensions differ, no dimension of tokens, an unknown score function, a mask of another shape.
      TypeError: `topk_idx` is not of integers, `logits` not of floats, the mask not bool.

    Costs an all-reduce of one scalar over the axes that shard sequences; over those that shard the tokens of a
    sequence all-reduces of [S, E] arrays, S being the shard's sequences. None in the backward. Inside your own
    `shard_map` the result is that of the shard alone.
    """
    check_balance_operands("sequence_balance_loss", logits, topk_idx, score_function, token_mask)
    if logits.ndim < 2:
        raise ValueError(
            f"sequence_balance_loss: logits must be [..., T, E]; got logits.shape={logits.shape}; add logits[None]"
        )
    return _sequence_balance(
        logits, topk_idx, token_mask, coeff=float(coeff), score_function=score_function
    )


def _sums(logits, token_mask=None, *, score_function):
    """P, float32[..., E]."""
    probs = expert_scores(logits, score_function)
    if token_mask is not None:
        probs = jnp.where(token_mask[..., None], probs, 0.0)
    return jnp.sum(probs, axis=-2)


def _sums_grad(logits, d_sums, token_mask=None, *, score_function):
    """The cotangent of the logits for that of P."""
    d_logits = expert_scores_grad(logits, d_sums[..., None, :], score_function)
    return d_logits if token_mask is None else jnp.where(token_mask[..., None], d_logits, 0.0)


def _counts(topk_idx, token_mask=None, *, num_experts):
    """n, int32[..., E], and T_s, int32[...]."""
    live = jnp.ones(topk_idx.shape[:-1], bool) if token_mask is None else token_mask
    hit = topk_idx[..., None] == jnp.arange(num_experts, dtype=topk_idx.dtype)
    chosen = jnp.sum(hit & live[..., None, None], axis=-2, dtype=jnp.int32)
    return jnp.sum(chosen, axis=-2), jnp.sum(live, axis=-1, dtype=jnp.int32)


_sums_op = Op(
    "sequence_balance_sums",
    _sums,
    "... t e, ... t -> ... e",
    summed=("t",),
    whole=("e",),
    roles="tokens sequence ., tokens sequence -> tokens .",
)
_sums_grad_op = Op(
    "sequence_balance_grad",
    _sums_grad,
    "... t e, ... e, ... t -> ... t e",
    whole=("e",),
    roles="tokens sequence ., tokens ., tokens sequence -> tokens sequence .",
)
_counts_op = Op(
    "sequence_counts",
    _counts,
    "... t k, ... t -> ... e, ...",
    summed=("t",),
    whole=("k", "e"),
    roles="tokens sequence ., tokens sequence -> tokens ., tokens",
)
_dot_op = Op(
    "sequence_balance_dot",
    lambda a, b: jnp.sum(a * b),
    "... e, ... e -> ()",
    summed=("...",),
    whole=("e",),
    roles="tokens ., tokens . -> ()",
)


def _sequence_balance_fwd(logits, topk_idx, token_mask, *, coeff, score_function):
    num_experts, top_k = logits.shape[-1], max(topk_idx.shape[-1], 1)
    prob = _sums_op(logits, token_mask, score_function=score_function)
    count, tokens = _counts_op(topk_idx, token_mask, num_experts=num_experts)
    scale = coeff * num_experts / (top_k * max(prod(logits.shape[:-2]), 1))
    tokens = jnp.maximum(tokens, 1).astype(jnp.float32)[..., None]
    weight = scale * count.astype(jnp.float32) / tokens / tokens
    return _dot_op(prob, weight), (logits, token_mask, weight)


def _sequence_balance_bwd(residuals, cotangent, *, coeff, score_function):
    del coeff
    logits, token_mask, weight = residuals
    d_sums = cotangent * weight
    d_logits = _sums_grad_op(logits, d_sums, token_mask, score_function=score_function)
    return d_logits, None, None


_sequence_balance = differentiable(_sequence_balance_fwd, _sequence_balance_bwd)
