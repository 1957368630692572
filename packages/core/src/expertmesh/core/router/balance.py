"""Losses that keep a router balanced and its logits small, and the count of each expert's tokens.

    balance: 1 / S * sum_s coeff * E / (K T_s^2) * sum_e P_se n_se,  P_se = sum_t q_ste,  n_se = #{(t, k): idx_stk = e}
    z:       coeff / T * sum_t logsumexp(logits_t)^2

with q the scores of a token normalised over all experts (see scores.py). `load_balance_loss` takes all tokens as one
sequence (S = 1), `sequence_balance_loss` balances each sequence by itself. They sum by ops of their own, because other
numbers cross devices: [E] vectors of the one; a scalar of the other, and [S, E] arrays only where a sequence is split.

Dimension key: `...` tokens (T in all) or sequences (S in all) of T_s tokens t, E experts, K choices per token.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import FLOATS, INTEGERS, check_arrays, check_token_mask, wide_ids
from expertmesh.core.router.scores import check_score_function, expert_scores, expert_scores_grad
from expertmesh.core.vjp import differentiable

__all__ = ["expert_counts", "load_balance_loss", "router_z_loss", "sequence_balance_loss"]


def load_balance_loss(
    logits: jax.Array,
    topk_idx: jax.Array,
    *,
    coeff: float,
    score_function: str = "softmax",
    token_mask: jax.Array | None = None,
    tokens_per_expert: jax.Array | None = None,
) -> jax.Array:
    """coeff * E / (K T^2) * sum_e P_e n_e: smallest when choices and probabilities are spread evenly, then `coeff`.

    Args:
      logits: float[..., E].
      topk_idx: int[..., K]; values outside [0, E), such as -1 for "not routed", are not counted.
      coeff: Python number.
      score_function: of the scores q in P: softmax over all experts, or sigmoid or sqrtsoftplus divided by the sum over
        all experts + 1e-20, whatever K. Bias, groups, scaling factor and the order of softmax and choice play no part.
      token_mask: bool[...]; tokens for which it is False are in neither P, n nor T.
      tokens_per_expert: number[E] in place of n, in units of this call's T tokens: for a loss over a global batch, the
        mean of `expert_counts` over its steps or data ranks. A constant, like n.

    Returns:
      float32[], the same for every sharding; 0 for no tokens. Differentiable in `logits`; the counts n are constants.

    Raises:
      ValueError: leading dimensions differ, an unknown score function, a mask or counts of the wrong shape.
      TypeError: `topk_idx` is not of integers, `logits` not of floats, the mask not bool.

    Costs all-reduces of two [E] vectors over the axes that shard tokens, and of one integer with a mask; none in the
    backward. Without a mask T is read from the shape: inside your own `shard_map` the result is that of the shard's
    tokens alone. The loss is that of Switch Transformers (arXiv:2101.03961, eq. 4-6), extended to K choices.
    """
    check_balance_operands("load_balance_loss", logits, topk_idx, score_function, token_mask)
    check_arrays("load_balance_loss", optional=True, tokens_per_expert=tokens_per_expert)
    if tokens_per_expert is not None and tokens_per_expert.shape != logits.shape[-1:]:
        raise ValueError(
            "load_balance_loss: tokens_per_expert must be [E]; "
            f"got tokens_per_expert.shape={tokens_per_expert.shape}, logits.shape={logits.shape}; "
            "pass one count per expert"
        )
    options = dict(coeff=float(coeff), score_function=score_function, by_sequence=False)
    return _balance(logits, topk_idx, token_mask, tokens_per_expert, **options)


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
    options = dict(coeff=float(coeff), score_function=score_function, by_sequence=True)
    return _balance(logits, topk_idx, token_mask, None, **options)


def router_z_loss(
    logits: jax.Array, *, coeff: float, token_mask: jax.Array | None = None
) -> jax.Array:
    """coeff * mean_t logsumexp(logits_t)^2: keeps the logits small.

    Args:
      logits: float[..., E].
      coeff: Python number.
      token_mask: bool[...]; the mean is over the tokens for which it is True.

    Returns:
      float32[], the same for every sharding; 0 for no tokens. Differentiable.

    Raises:
      ValueError: a mask of the wrong shape.
      TypeError: `logits` is not of floats, the mask not bool.

    Costs an all-reduce of one scalar over the axes that shard tokens (two with a mask); none in the backward. Inside
    your own `shard_map` the result is that of the shard's tokens alone. The loss is that of ST-MoE (arXiv:2202.08906,
    eq. 5).
    """
    check_arrays("router_z_loss", FLOATS, logits=logits)
    check_token_mask("router_z_loss", token_mask, logits.shape[:-1])
    return _z_loss(logits, token_mask, coeff=float(coeff))


def expert_counts(topk_idx: jax.Array, *, num_experts: int) -> jax.Array:
    """Number of choices of each expert: `jnp.bincount` over the values in [0, num_experts).

    Args:
      topk_idx: int[..., K]; other values, such as -1 for "not routed", are not counted.
      num_experts: E.

    Returns:
      int32[E], over all tokens of all shards.

    Raises:
      TypeError: `topk_idx` is not of integers.

    Costs an all-reduce of one [E] vector over the axes that shard tokens. Inside your own `shard_map`: the shard's.
    """
    check_arrays("expert_counts", INTEGERS, topk_idx=topk_idx)
    count_E: jax.Array = _counts_op(topk_idx, None, num_experts=num_experts)
    return count_E


# Logits, token mask, what the sums are multiplied by.
_Residuals = tuple[jax.Array, jax.Array | None, jax.Array | float]


def check_balance_operands(
    name: str,
    logits: jax.Array,
    topk_idx: jax.Array,
    score_function: str,
    token_mask: jax.Array | None,
) -> None:
    """What every balance loss refuses."""
    check_arrays(name, FLOATS, logits=logits)
    check_arrays(name, INTEGERS, topk_idx=topk_idx)
    check_score_function(name, score_function)
    if logits.shape[:-1] != topk_idx.shape[:-1]:
        raise ValueError(
            f"{name}: logits and topk_idx must have equal leading dimensions; "
            f"got logits.shape={logits.shape}, topk_idx.shape={topk_idx.shape}; pass those of the same tokens"
        )
    check_token_mask(name, token_mask, logits.shape[:-1])


def count_choices(
    topk_idx: jax.Array, token_mask: jax.Array | None = None, *, num_experts: int
) -> jax.Array:
    """n of all tokens, int32[E]."""
    topk_idx = wide_ids(topk_idx)
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[..., None], topk_idx, -1)
    # A negative index would count from the end.
    idx = jnp.where(topk_idx < 0, num_experts, topk_idx).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[idx].add(1, mode="drop")


def _probs(logits: jax.Array, token_mask: jax.Array | None, score_function: str) -> jax.Array:
    """q, 0 for tokens that do not take part."""
    probs = expert_scores(logits, score_function)
    return probs if token_mask is None else jnp.where(token_mask[..., None], probs, 0.0)


def _prob_sums(
    logits: jax.Array, token_mask: jax.Array | None = None, *, score_function: str
) -> jax.Array:
    """P of all tokens, float32[E]."""
    probs = _probs(logits, token_mask, score_function)
    return jnp.sum(probs.reshape(-1, logits.shape[-1]), axis=0)


def _prob_sums_grad(
    logits: jax.Array,
    d_sums: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    score_function: str,
) -> jax.Array:
    """The cotangent of the logits for that of P, which may lack the dimensions of tokens."""
    d_logits = expert_scores_grad(logits, d_sums, score_function)
    return d_logits if token_mask is None else jnp.where(token_mask[..., None], d_logits, 0.0)


def _sequence_sums(
    logits: jax.Array, token_mask: jax.Array | None = None, *, score_function: str
) -> jax.Array:
    """P of each sequence, float32[..., E]."""
    return jnp.sum(_probs(logits, token_mask, score_function), axis=-2)


def _sequence_sums_grad(
    logits: jax.Array,
    d_sums: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    score_function: str,
) -> jax.Array:
    d_sums = d_sums[..., None, :]
    return _prob_sums_grad(logits, d_sums, token_mask, score_function=score_function)


def _sequence_counts(
    topk_idx: jax.Array, token_mask: jax.Array | None = None, *, num_experts: int
) -> tuple[jax.Array, jax.Array]:
    """n of each sequence, int32[..., E], and T_s, int32[...]."""
    live = jnp.ones(topk_idx.shape[:-1], bool) if token_mask is None else token_mask
    hit = topk_idx[..., None] == jnp.arange(num_experts, dtype=topk_idx.dtype)
    chosen = jnp.sum(hit & live[..., None, None], axis=-2, dtype=jnp.int32)
    return jnp.sum(chosen, axis=-2), jnp.sum(live, axis=-1, dtype=jnp.int32)


def _z_sum(logits: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
    squares = jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
    return jnp.sum(squares if token_mask is None else jnp.where(token_mask, squares, 0.0))


def _z_sum_grad(
    logits: jax.Array, d_sum: jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
    logits = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    d_logits = 2 * d_sum * lse * jnp.exp(logits - lse)
    return d_logits if token_mask is None else jnp.where(token_mask[..., None], d_logits, 0.0)


def _live_tokens(token_mask: jax.Array) -> jax.Array:
    return jnp.sum(token_mask, dtype=jnp.int32)


def _triton(function: str, unsupported: Callable[..., str | None]) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.triton.load_balance", function, unsupported),)


def _sums_unsupported(
    logits: jax.Array, *rest: jax.Array, score_function: str = "softmax"
) -> str | None:
    """What keeps logits from the kernels, or None."""
    del rest
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or not logits.size:
        return f"logits must be float32, bfloat16 or float16, and there; they are {logits.dtype}{logits.shape}"
    if logits.shape[-1] > MAX_EXPERTS:
        return f"a program holds at most {MAX_EXPERTS} experts; there are {logits.shape[-1]}"
    if score_function == "sqrtsoftplus":
        return "the scores must be softmax or sigmoid; they are sqrtsoftplus"
    return None


def _counts_unsupported(topk_idx: jax.Array, *rest: jax.Array, num_experts: int) -> str | None:
    del rest
    if not topk_idx.size or not 0 < num_experts <= MAX_EXPERTS:
        return f"there must be choices of 1 to {MAX_EXPERTS} experts; they are {topk_idx.shape} of {num_experts}"
    return None


MAX_EXPERTS = 2048
# Roles are given because the experts of these vectors are never split, on whatever axis the weights' experts are.
_counts_op = Op(
    "expert_counts",
    count_choices,
    "... k, ... -> e",
    summed=("...",),
    whole=("k", "e"),
    roles="tokens ., tokens -> .",
    kernels=_triton("counts", _counts_unsupported),
)
_live_tokens_op = Op("num_tokens", _live_tokens, "... -> ()", summed=("...",), roles="tokens -> ()")
_prob_sums_op = Op(
    "load_balance_sums",
    _prob_sums,
    "... e, ... -> e",
    summed=("...",),
    whole=("e",),
    roles="tokens ., tokens -> .",
    kernels=_triton("prob_sums", _sums_unsupported),
)
_prob_sums_grad_op = Op(
    "load_balance_grad",
    _prob_sums_grad,
    "... e, e, ... -> ... e",
    whole=("e",),
    roles="tokens ., ., tokens -> tokens .",
)
_sequence_sums_op = Op(
    "sequence_balance_sums",
    _sequence_sums,
    "... t e, ... t -> ... e",
    summed=("t",),
    whole=("e",),
    roles="tokens sequence ., tokens sequence -> tokens .",
)
_sequence_sums_grad_op = Op(
    "sequence_balance_grad",
    _sequence_sums_grad,
    "... t e, ... e, ... t -> ... t e",
    whole=("e",),
    roles="tokens sequence ., tokens ., tokens sequence -> tokens sequence .",
)
_sequence_counts_op = Op(
    "sequence_counts",
    _sequence_counts,
    "... t k, ... t -> ... e, ...",
    summed=("t",),
    whole=("k", "e"),
    roles="tokens sequence ., tokens sequence -> tokens ., tokens",
)
_sequence_dot_op = Op(
    "sequence_balance_dot",
    lambda a, b: jnp.sum(a * b),
    "... e, ... e -> ()",
    summed=("...",),
    whole=("e",),
    roles="tokens ., tokens . -> ()",
)
_z_sum_op = Op(
    "z_loss_sum",
    _z_sum,
    "... e, ... -> ()",
    summed=("...",),
    whole=("e",),
    roles="tokens ., tokens -> ()",
    kernels=_triton("z_sum", _sums_unsupported),
)
_z_sum_grad_op = Op(
    "z_loss_grad",
    _z_sum_grad,
    "... e, (), ... -> ... e",
    whole=("e",),
    roles="tokens ., (), tokens -> tokens .",
)


def _balance_fwd(
    logits: jax.Array,
    topk_idx: jax.Array,
    token_mask: jax.Array | None,
    count: jax.Array | None,
    *,
    coeff: float,
    score_function: str,
    by_sequence: bool,
) -> tuple[jax.Array, _Residuals]:
    num_experts, top_k = logits.shape[-1], max(topk_idx.shape[-1], 1)
    if by_sequence:
        num_sequences = max(prod(logits.shape[:-2]), 1)
        prob = _sequence_sums_op(logits, token_mask, score_function=score_function)
        count, num_tokens = _sequence_counts_op(topk_idx, token_mask, num_experts=num_experts)
        num_tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)[..., None]
    else:
        num_sequences = 1
        prob = _prob_sums_op(logits, token_mask, score_function=score_function)
        if count is None:
            count = _counts_op(topk_idx, token_mask, num_experts=num_experts)
        num_tokens = _num_tokens(logits, token_mask)
    scale = coeff * num_experts / (top_k * num_sequences)
    # One division at a time: T^2 and its product with K may exceed what float32 holds exactly.
    weight = scale * count.astype(jnp.float32) / num_tokens / num_tokens
    loss = _sequence_dot_op(prob, weight) if by_sequence else jnp.sum(prob * weight)
    return loss, (logits, token_mask, weight)


def _balance_bwd(
    residuals: _Residuals,
    cotangent: jax.Array,
    *,
    coeff: float,
    score_function: str,
    by_sequence: bool,
) -> tuple[jax.Array, None, None, None]:
    del coeff
    logits, token_mask, weight = residuals
    grad_op = _sequence_sums_grad_op if by_sequence else _prob_sums_grad_op
    d_sums = cotangent * weight
    return grad_op(logits, d_sums, token_mask, score_function=score_function), None, None, None


def _z_loss_fwd(
    logits: jax.Array, token_mask: jax.Array | None, *, coeff: float
) -> tuple[jax.Array, _Residuals]:
    total = _z_sum_op(logits, token_mask)
    scale = coeff / _num_tokens(logits, token_mask)
    return scale * total, (logits, token_mask, scale)


def _z_loss_bwd(
    residuals: _Residuals, cotangent: jax.Array, *, coeff: float
) -> tuple[jax.Array, None]:
    del coeff
    logits, token_mask, scale = residuals
    return _z_sum_grad_op(logits, scale * cotangent, token_mask), None


def _num_tokens(logits: jax.Array, token_mask: jax.Array | None) -> jax.Array | int:
    """T, at least 1."""
    if token_mask is None:
        return max(prod(logits.shape[:-1]), 1)
    return jnp.maximum(_live_tokens_op(token_mask), 1).astype(jnp.float32)


_balance = differentiable(_balance_fwd, _balance_bwd)
_z_loss = differentiable(_z_loss_fwd, _z_loss_bwd)
