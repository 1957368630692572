"""Losses that keep a router balanced and its logits small, and the count of each expert's tokens.

All are sums over tokens of a quantity f of their logits, with weights that have no gradient:

    loss = sum_s sum_t <w_s, f(logits_st)>

    balance: f = q,             w_se = coeff E n_se / (S K T_s^2),  n_se = #{(t, k): idx_stk = e}
    z:       f = logsumexp^2,   w = coeff / T

with q the scores of a token normalised over all experts (see scores.py). `load_balance_loss` is the
`sequence_balance_loss` of all tokens as one sequence, S = 1.

Dimension key: `...` tokens (T in all) or sequences (S in all) of T_s tokens t, E experts, K choices per token, F
numbers of a quantity.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import (
    FLOATS,
    INTEGERS,
    as_counts,
    check_arrays,
    check_token_mask,
    of_live,
    wide_ids,
)
from expertmesh.core.router.scores import ExpertScores, check_score_function
from expertmesh.core.vjp import differentiable

__all__ = ["expert_counts", "load_balance_loss", "router_z_loss", "sequence_balance_loss"]


def load_balance_loss(
    logits: jax.Array,
    topk_idx: jax.Array,
    *,
    coeff: float | jax.Array,
    score_function: str = "softmax",
    token_mask: jax.Array | None = None,
    tokens_per_expert: jax.Array | None = None,
) -> jax.Array:
    """coeff * E / (K T^2) * sum_e P_e n_e: smallest when choices and probabilities are spread evenly, then `coeff`.

    Args:
      logits: float[..., E].
      topk_idx: int[..., K]; values outside [0, E), such as -1 for "not routed", are not counted.
      coeff: Python number, or float[], which may be traced.
      score_function: of the scores q in P: softmax over all experts, or sigmoid or sqrtsoftplus divided by the sum over
        all experts + 1e-20, whatever K. Bias, groups, scaling factor and the order of softmax and choice play no part.
      token_mask: bool[...]; tokens for which it is False are in neither P, n nor T.
      tokens_per_expert: number[E] in place of n, in units of this call's T tokens: for a loss over a global batch, the
        mean of `expert_counts` over its steps or data ranks. A constant, like n.

    Returns:
      float32[], the same for every sharding; 0 for no tokens. Differentiable in `logits` and `coeff`; the counts n are
      constants.

    Raises:
      ValueError: leading dimensions differ, an unknown score function, a mask, counts or coefficient of the wrong
        shape.
      TypeError: `topk_idx` is not of integers, `logits` not of floats, the mask not bool.

    Costs all-reduces of one [E] vector and a scalar over the axes that shard tokens, and of one integer with a mask;
    none in the backward. Inside your own `shard_map` the result is about the shard's tokens alone. The loss is that of
    Switch Transformers (arXiv:2101.03961, eq. 4-6), extended to K choices.
    """
    check_balance_operands("load_balance_loss", logits, topk_idx, score_function, token_mask)
    check_arrays("load_balance_loss", optional=True, tokens_per_expert=tokens_per_expert)
    if tokens_per_expert is not None and tokens_per_expert.shape != logits.shape[-1:]:
        raise ValueError(
            "load_balance_loss: tokens_per_expert must be [E]; "
            f"got tokens_per_expert.shape={tokens_per_expert.shape}, logits.shape={logits.shape}; "
            "pass one count per expert"
        )
    options = dict(score_function=score_function, sequence_dims=0)
    loss = partial(_balance, logits, topk_idx, token_mask, tokens_per_expert, **options)
    return _times("load_balance_loss", coeff, loss)


def sequence_balance_loss(
    logits: jax.Array,
    topk_idx: jax.Array,
    *,
    coeff: float | jax.Array,
    score_function: str = "softmax",
    token_mask: jax.Array | None = None,
) -> jax.Array:
    """The mean of `load_balance_loss` over sequences: each sequence is balanced by itself.

    Args:
      logits: float[..., T, E]: the last dimension but one runs along a sequence.
      topk_idx: int[..., T, K]; values outside [0, E), such as -1 for "not routed", are not counted.
      coeff: Python number, or float[], which may be traced.
      score_function: see `load_balance_loss`.
      token_mask: bool[..., T]; tokens for which it is False are in neither P, n nor T_s.

    Returns:
      float32[], the same for every sharding. A sequence without tokens adds 0 and is one of the S; 0 for no sequences.
      Differentiable in `logits` and `coeff`; the counts n are constants.

    Raises:
      ValueError: leading dimensions differ, no dimension of tokens, an unknown score function, a mask or a
        coefficient of another shape.
      TypeError: `topk_idx` is not of integers, `logits` not of floats, the mask not bool.

    Costs an all-reduce of one scalar over the axes that shard sequences or their tokens; over the latter also of one
    [S, E] array, S being the shard's sequences, and of [S] integers with a mask. None in the backward. Inside your own
    `shard_map` the result is that of the shard alone.
    """
    check_balance_operands("sequence_balance_loss", logits, topk_idx, score_function, token_mask)
    if logits.ndim < 2:
        raise ValueError(
            f"sequence_balance_loss: logits must be [..., T, E]; got logits.shape={logits.shape}; add logits[None]"
        )
    options = dict(score_function=score_function, sequence_dims=logits.ndim - 2)
    loss = partial(_balance, logits, topk_idx, token_mask, None, **options)
    return _times("sequence_balance_loss", coeff, loss)


def router_z_loss(
    logits: jax.Array, *, coeff: float | jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
    """coeff * mean_t logsumexp(logits_t)^2: keeps the logits small.

    Args:
      logits: float[..., E].
      coeff: Python number, or float[], which may be traced.
      token_mask: bool[...]; the mean is over the tokens for which it is True.

    Returns:
      float32[], the same for every sharding; 0 for no tokens. Differentiable in `logits` and `coeff`.

    Raises:
      ValueError: a mask or coefficient of the wrong shape.
      TypeError: `logits` is not of floats, the mask not bool.

    Costs an all-reduce of one scalar over the axes that shard tokens (two with a mask); none in the backward. Inside
    your own `shard_map` the result is that of the shard's tokens alone. The loss is that of ST-MoE (arXiv:2202.08906,
    eq. 5).
    """
    check_arrays("router_z_loss", FLOATS, logits=logits)
    check_token_mask("router_z_loss", token_mask, logits.shape[:-1])
    return _times("router_z_loss", coeff, partial(_z_loss, logits, token_mask))


def expert_counts(topk_idx: jax.Array, *, num_experts: int) -> jax.Array:
    """Number of choices of each expert: `jnp.bincount` over the values in [0, num_experts).

    Args:
      topk_idx: int[..., K]; other values, such as -1 for "not routed", are not counted.
      num_experts: E.

    Returns:
      int32[E], over all tokens of all shards.

    Raises:
      TypeError: `topk_idx` is not of integers, or `num_experts` no int.
      ValueError: `num_experts` below 1.

    Costs an all-reduce of one [E] vector over the axes that shard tokens. Inside your own `shard_map`: the shard's.
    """
    check_arrays("expert_counts", INTEGERS, topk_idx=topk_idx)
    (num_experts,) = as_counts("expert_counts", num_experts=num_experts)
    count_E: jax.Array = _counts_op(topk_idx, None, num_experts=num_experts, sequence_dims=0)
    return count_E


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


def _times(name: str, coeff: float | jax.Array, loss: Callable[..., jax.Array]) -> jax.Array:
    """loss(coeff=coeff). Options of an op are static: of an array it is coeff loss(1)."""
    if shape := jnp.shape(coeff):
        raise ValueError(
            f"{name}: coeff must be a number or a scalar array; got coeff.shape={shape}; pass one number"
        )
    if not isinstance(coeff, jax.Array):
        return loss(coeff=float(coeff))
    return coeff.astype(jnp.float32) * loss(coeff=1.0)


@partial(jax.jit, static_argnames=("coeff", "score_function", "sequence_dims"))
def _balance(
    logits: jax.Array,
    topk_idx: jax.Array,
    token_mask: jax.Array | None,
    count: jax.Array | None,
    *,
    coeff: float,
    score_function: str,
    sequence_dims: int,
) -> jax.Array:
    """The loss of sequences along the first `sequence_dims` dimensions."""
    num_experts, top_k = logits.shape[-1], max(topk_idx.shape[-1], 1)
    if count is None:
        sizes = dict(num_experts=num_experts, sequence_dims=sequence_dims)
        count = _counts_op(topk_idx, token_mask, **sizes)
    num_tokens = _num_tokens(topk_idx, token_mask, sequence_dims)
    scale = coeff * num_experts / (top_k * max(prod(logits.shape[:sequence_dims]), 1))
    # One division at a time: T^2 and its product with K may exceed what float32 holds exactly.
    weight = scale * count.astype(jnp.float32) / num_tokens / num_tokens
    return _weighted_sum(logits, weight, token_mask, quantity=ExpertScores(score_function))


@partial(jax.jit, static_argnames="coeff")
def _z_loss(logits: jax.Array, token_mask: jax.Array | None, *, coeff: float) -> jax.Array:
    weight = coeff / _num_tokens(jax.lax.stop_gradient(logits), token_mask, 0)
    return _weighted_sum(logits, weight, token_mask, quantity=_SquaredLogsumexp())


def _num_tokens(tokens: jax.Array, token_mask: jax.Array | None, sequence_dims: int) -> jax.Array:
    """T_s, at least 1, float32[..., 1], of an array of tokens that has no gradient."""
    if token_mask is None:
        size = max(prod(tokens.shape[sequence_dims:-1]), 1)
        return jnp.full((1,) * (sequence_dims + 1), size, jnp.float32)
    live: jax.Array = live_tokens_op(tokens, token_mask, sequence_dims=sequence_dims)
    return jnp.maximum(live, 1).astype(jnp.float32)[..., None]


def _counts(
    topk_idx: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    num_experts: int,
    sequence_dims: int,
) -> jax.Array:
    """n of each sequence, int32[..., E]."""

    def count(idx: jax.Array) -> jax.Array:
        return jnp.zeros(num_experts, jnp.int32).at[idx].add(1, mode="drop")

    for _ in range(sequence_dims):
        count = jax.vmap(count)
    topk_idx = of_live(wide_ids(topk_idx), token_mask, -1)
    # A negative index would count from the end.
    return count(jnp.where(topk_idx < 0, num_experts, topk_idx))


def _live_tokens(tokens: jax.Array, token_mask: jax.Array, *, sequence_dims: int) -> jax.Array:
    """T_s of each sequence, int32[...]; of `tokens` only the layout counts."""
    del tokens
    return jnp.sum(token_mask, axis=tuple(range(sequence_dims, token_mask.ndim)), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class _SquaredLogsumexp:
    """f of the z loss, F = 1."""

    def __call__(self, logits: jax.Array) -> jax.Array:
        x = logits.astype(jnp.float32)
        return jnp.square(jax.nn.logsumexp(x, axis=-1, keepdims=True))

    def grad(self, logits: jax.Array, d_values: jax.Array) -> jax.Array:
        x = logits.astype(jnp.float32)
        lse = jax.nn.logsumexp(x, axis=-1, keepdims=True)
        return 2 * d_values * lse * jnp.exp(x - lse)


_Quantity = ExpertScores | _SquaredLogsumexp


def _sum(
    logits: jax.Array,
    weight: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    quantity: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """sum_s sum_t <w_s, f(logits_st)> for weights [..., F] of each sequence."""
    values = of_live(quantity(logits), token_mask, 0.0)
    return jnp.sum(jnp.sum(values, axis=_token_dims(logits, weight)) * weight)


def _sum_grad(
    logits: jax.Array,
    d_values: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    quantity: _Quantity,
) -> jax.Array:
    """The cotangent of the logits for that of f, [..., F] of each sequence."""
    d_values = jnp.expand_dims(d_values, _token_dims(logits, d_values))
    return of_live(quantity.grad(logits, d_values), token_mask, 0.0)


def _token_dims(logits: jax.Array, weight: jax.Array) -> tuple[int, ...]:
    """The dimensions of tokens along which a sequence runs."""
    return tuple(range(weight.ndim - 1, logits.ndim - 1))


MAX_EXPERTS = 2048
MAX_SEQUENCES = 65535  # of a CUDA grid's second dimension


def _sum_unsupported(
    logits: jax.Array,
    weight: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    quantity: Callable[[jax.Array], jax.Array],
) -> str | None:
    """What keeps logits from the kernels, or None."""
    del token_mask
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or not logits.size:
        return f"logits must be float32, bfloat16 or float16, and there; they are {logits.dtype}{logits.shape}"
    if logits.shape[-1] > MAX_EXPERTS:
        return f"a program holds at most {MAX_EXPERTS} experts; there are {logits.shape[-1]}"
    if weight.ndim > 1:
        return f"all tokens must have the same weights; they are {weight.shape}"
    if quantity not in (ExpertScores("softmax"), ExpertScores("sigmoid"), _SquaredLogsumexp()):
        return f"there is none of {quantity}"
    return None


def _counts_unsupported(
    topk_idx: jax.Array, *rest: jax.Array, num_experts: int, sequence_dims: int
) -> str | None:
    del rest
    if not topk_idx.size or not 0 < num_experts <= MAX_EXPERTS:
        return f"there must be choices of 1 to {MAX_EXPERTS} experts; they are {topk_idx.shape} of {num_experts}"
    if prod(topk_idx.shape[:sequence_dims]) > MAX_SEQUENCES:
        return f"there must be at most {MAX_SEQUENCES} sequences; they are {topk_idx.shape[:sequence_dims]}"
    return None


def _triton(function: str, unsupported: Callable[..., str | None]) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.triton.load_balance", function, unsupported),)


# Roles are given because the experts of these vectors are never split, on whatever axis the weights' experts are.
_counts_op = Op(
    "expert_counts",
    _counts,
    "sequence_dims... ... k, sequence_dims... ... -> sequence_dims... e",
    summed=("...",),
    whole=("k", "e"),
    roles="tokens tokens ., tokens tokens -> tokens .",
    kernels=_triton("counts", _counts_unsupported),
)
live_tokens_op = Op(
    "num_tokens",
    _live_tokens,
    "sequence_dims... ... f, sequence_dims... ... -> sequence_dims...",
    summed=("...",),
    whole=("f",),
    roles="tokens tokens ., tokens tokens -> tokens",
)
sum_op = Op(
    "router_sum",
    _sum,
    "sequence_dims... ... e, sequence_dims... f, sequence_dims... ... -> ()",
    summed=("sequence_dims...", "..."),
    whole=("e", "f"),
    roles="tokens tokens ., tokens ., tokens tokens -> ()",
    kernels=_triton("weighted_sum", _sum_unsupported),
)
_sum_grad_op = Op(
    "router_sum_grad",
    _sum_grad,
    "sequence_dims... ... e, sequence_dims... f, sequence_dims... ... -> sequence_dims... ... e",
    whole=("e", "f"),
    roles="tokens tokens ., tokens ., tokens tokens -> tokens tokens .",
)

# Logits, weights, token mask.
_Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def _weighted_sum_fwd(
    logits: jax.Array, weight: jax.Array, token_mask: jax.Array | None, *, quantity: _Quantity
) -> tuple[jax.Array, _Residuals]:
    loss = sum_op(logits, weight, token_mask, quantity=quantity)
    return loss, (logits, weight, token_mask)


def _weighted_sum_bwd(
    residuals: _Residuals, cotangent: jax.Array, *, quantity: _Quantity
) -> tuple[jax.Array, None, None]:
    logits, weight, token_mask = residuals
    d_values = cotangent * weight
    return _sum_grad_op(logits, d_values, token_mask, quantity=quantity), None, None


_weighted_sum = differentiable(_weighted_sum_fwd, _weighted_sum_bwd)
