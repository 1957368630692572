"""Router: from each token's logits to its K experts and their weights.

    softmax, post (default): idx = top_k(x);         w = softmax(x[idx])
             with a bias:    idx = top_k(p + bias);  w = softmax(x[idx]),  p = softmax(x)
    softmax, pre:            idx = top_k(p + bias);  w = p[idx]
    sigmoid, sqrtsoftplus:   idx = top_k(s + bias);  w = s[idx] / (sum_k s[idx] + 1e-20),  or s[idx]

all times `scaling_factor`. `normalize` says whether s is divided by the sum; None means K > 1. With groups, of E / G
experts each, top_k is limited to the `group_topk` best groups. A group's score is the sum of its `group_best` greatest
scores; None means K / group_topk of them.

Dimension key: `...` tokens, E experts, K choices per token, G groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import (
    FLOATS,
    INTEGERS,
    check_arrays,
    check_token_mask,
    exceeds,
    routed_ids,
)
from expertmesh.core.router.config import RouterConfig
from expertmesh.core.router.scores import (
    EPSILON,
    SCORE_FUNCTIONS,
    pointwise_scores,
    pointwise_slopes,
)
from expertmesh.core.vjp import differentiable

__all__ = ["SCORE_FUNCTIONS", "RouterConfig", "Routing", "route"]

MAX_ELEMENTS = 2**31 - 1  # what an int32 can count


class Routing(NamedTuple):
    """The choices of each token, by descending score (forced ones: in the order given).

    Attributes:
      topk_idx: int32[..., K], in [0, E), distinct within a token; -1 for a choice that is not routed.
      topk_weights: float32[..., K]; 0 where not routed.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array


def route(
    logits: jax.Array,
    config: RouterConfig,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
) -> Routing:
    """Chooses each token's K experts and their weights, by the module's formulas.

    Args:
      logits: float[..., E]; computed with in float32, whatever the dtype.
      config: see RouterConfig.
      expert_bias: float[E], added to the scores by which experts and groups are chosen, and to nothing else: weights
        are those of the unbiased scores, to the bit.
      token_mask: bool[...]; a token for which it is False gets no expert: indices -1, weights 0, gradient 0, whatever
        its logits hold.
      topk_idx: int[..., K]: these choices instead of the best ones, as for the replay of a recorded routing. Weights
        and gradients are those of the logits at the indices. Values outside [0, E) are not routed: index -1, weight
        0, no part in the normalisation.

    Returns:
      Routing, by descending biased score; of equal scores (0.0 and -0.0 are equal) the lower expert index comes first.
      Experts with a logit of -inf come last and get weight 0. One NaN logit (of either sign) makes all weights of its
      token NaN; where weights are not divided by their sum, its own alone. The choices stay in range. Nothing hides a
      NaN but `token_mask`, and a forced choice that does not read it. Groups with a NaN come before the others.

    Raises:
      ValueError: top_k exceeds the number of experts; groups that do not fit it; operands whose shapes do not fit the
        logits or top_k; more than 2^31 - 1 logits on one device, unless `topk_idx` is given.
      TypeError: logits or bias are not floating point, the mask not bool, forced indices not integers.

    Differentiable in `logits`; the bias gets gradient 0. No communication, however tokens are sharded; a sharded expert
    dimension is gathered.
    """
    RouterConfig.check("route", config=config)
    _check_logits(logits, config)
    _check_operands(logits, config, expert_bias, topk_idx)
    check_token_mask("route", token_mask, logits.shape[:-1])
    return _route(logits, expert_bias, token_mask, topk_idx, config=config)


_Residuals = tuple[jax.Array, jax.Array, jax.Array]  # logits, choices, their weights before scaling


def _check_logits(logits: jax.Array, config: RouterConfig) -> None:
    check_arrays("route", FLOATS, logits=logits)
    if logits.ndim < 1:
        raise ValueError(
            "route: logits must be [..., E]; got logits.shape=(); pass one value per expert"
        )
    config.check_experts("route", logits.shape[-1])


def _check_operands(
    logits: jax.Array,
    config: RouterConfig,
    expert_bias: jax.Array | None,
    topk_idx: jax.Array | None,
) -> None:
    if expert_bias is not None:
        config.check_bias("route", expert_bias, logits.shape[-1])
    check_arrays("route", INTEGERS, optional=True, topk_idx=topk_idx)
    if topk_idx is not None and topk_idx.shape != (*logits.shape[:-1], config.top_k):
        raise ValueError(
            "route: topk_idx must be [..., K] for the tokens of the logits and K = top_k; "
            f"got topk_idx.shape={topk_idx.shape}, logits.shape={logits.shape}, top_k={config.top_k}; "
            "record and replay with the same top_k"
        )


def _choose(
    logits: jax.Array,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
    topk_idx: jax.Array | None,
    *,
    config: RouterConfig,
) -> tuple[jax.Array, jax.Array]:
    """The choices, the best or those given, and their weights before scaling."""
    if topk_idx is None:
        topk_idx = _select(logits, expert_bias, config=config)
    topk_idx = routed_ids(topk_idx, token_mask, logits.shape[-1])
    return topk_idx, _weigh(logits, topk_idx, config=config)


def _select(logits: jax.Array, expert_bias: jax.Array | None, *, config: RouterConfig) -> jax.Array:
    if exceeds(logits.size, MAX_ELEMENTS):
        raise ValueError(
            f"route: tokens times experts on one device must be at most 2^31 - 1; got shape={logits.shape}; "
            "shard the tokens further"
        )
    scores = _scores(logits.astype(jnp.float32), config, biased=expert_bias is not None)
    if expert_bias is not None:
        scores = scores + expert_bias.astype(jnp.float32)
    return _top_experts(scores, config)


def _top_experts(scores: jax.Array, config: RouterConfig) -> jax.Array:
    """int32[..., K] by descending score, of equal scores the lower expert (or group) first; NaN before all others."""
    scores, top_k = _ordered(scores), config.top_k
    if config.num_groups is None or config.group_topk is None:
        return jax.lax.top_k(scores, top_k)[1]
    *tokens, num_experts = scores.shape
    num_groups, group_topk = config.num_groups, config.group_topk
    group_size = num_experts // num_groups
    scores = scores.reshape(*tokens, num_groups, group_size)
    best = jax.lax.top_k(scores, config.best_of_group)[0]
    kept = jax.lax.top_k(_ordered(jnp.sum(best, axis=-1)), group_topk)[1]
    # Ascending, so that of equal scores the lower expert still comes first. Experts of other groups are not masked
    # but absent: -inf could not tell them from experts of a kept group whose score is -inf.
    kept = jnp.sort(kept, axis=-1)
    candidates = jnp.take_along_axis(scores, kept[..., None], axis=-2)
    place = jax.lax.top_k(candidates.reshape(*tokens, group_topk * group_size), top_k)[1]
    group = jnp.take_along_axis(kept, place // group_size, axis=-1)
    return group * group_size + place % group_size


def _ordered(scores: jax.Array) -> jax.Array:
    """The scores as top_k's total order must see them: it tells -0.0 from 0.0 and NaN by its sign bit."""
    scores = jnp.where(scores == 0, jnp.float32(0), scores)
    return jnp.where(jnp.isnan(scores), jnp.float32(jnp.nan), scores)


def _scores(x: jax.Array, config: RouterConfig, *, biased: bool) -> jax.Array:
    """What experts are chosen by, but for the bias."""
    if config.score_function != "softmax":
        return pointwise_scores(x, config.score_function)
    if biased:  # a NaN is that expert's alone, so that it is chosen
        return jnp.where(jnp.isnan(x), x, jax.nn.softmax(jnp.where(jnp.isnan(x), -jnp.inf, x)))
    return jax.nn.softmax(x) if config.use_pre_softmax else x  # of the order of their softmax


def _weigh(logits: jax.Array, topk_idx: jax.Array, *, config: RouterConfig) -> jax.Array:
    """float32[..., K] before scaling."""
    x = logits.astype(jnp.float32)
    routed = topk_idx >= 0
    if config.score_function == "softmax":
        if config.use_pre_softmax:
            weights = _pick(jax.nn.softmax(x), topk_idx)
        else:
            weights = jax.nn.softmax(jnp.where(routed, _pick(x, topk_idx), -jnp.inf))
        return jnp.where(routed, weights, 0.0)
    s = pointwise_scores(_pick(x, topk_idx), config.score_function)
    s = jnp.where(routed, s, 0.0)
    return s / (jnp.sum(s, axis=-1, keepdims=True) + EPSILON) if config.divides else s


def _weigh_grad(
    logits: jax.Array,
    topk_idx: jax.Array,
    weights: jax.Array,
    d_weights: jax.Array,
    *,
    config: RouterConfig,
) -> jax.Array:
    """The cotangent of the logits, float32[..., E], for that of the weights before scaling."""
    num_experts = logits.shape[-1]
    routed = topk_idx >= 0
    x, d_weights = logits.astype(jnp.float32), jnp.where(routed, d_weights, 0.0)
    mean = jnp.sum(d_weights * weights, axis=-1, keepdims=True)
    if config.use_pre_softmax:
        d_logits = jax.nn.softmax(x) * (
            _scatter_to_experts(d_weights, topk_idx, num_experts) - mean
        )
        return jnp.where(jnp.any(routed, axis=-1, keepdims=True), d_logits, 0.0)
    if config.score_function == "softmax":
        d_chosen = weights * (d_weights - mean)
    else:
        d_chosen = _pointwise_grad(_pick(x, topk_idx), routed, d_weights, mean, config)
    return _scatter_to_experts(jnp.where(routed, d_chosen, 0.0), topk_idx, num_experts)


def _pointwise_grad(
    x: jax.Array, routed: jax.Array, d_weights: jax.Array, mean: jax.Array, config: RouterConfig
) -> jax.Array:
    """Of the chosen logits. Divides by the sum of scores once: its square would underflow."""
    slopes = pointwise_slopes(x, config.score_function)
    if not config.divides:
        return d_weights * slopes
    s = jnp.where(routed, pointwise_scores(x, config.score_function), 0.0)
    return (d_weights - mean) * (slopes / (jnp.sum(s, axis=-1, keepdims=True) + EPSILON))


def _pick(values: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """[..., E] to [..., K]; anything where not routed."""
    return jnp.take_along_axis(values, jnp.maximum(topk_idx, 0), axis=-1)


def _scatter_to_experts(values: jax.Array, topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """[..., K] to [..., E]: each value at its expert, zero elsewhere. A select, so that no scatter is needed."""
    hit = topk_idx[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, (*topk_idx.shape, num_experts), topk_idx.ndim
    )
    return jnp.sum(jnp.where(hit, values[..., None], jnp.float32(0)), axis=-2)


def _unsupported(logits: jax.Array, *rest: jax.Array, config: RouterConfig) -> str | None:
    """What keeps these types from the kernels, or None."""
    del rest
    num_experts = logits.shape[-1]
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or not logits.size:
        return f"logits must be float32, bfloat16 or float16, and there; they are {logits.dtype}{logits.shape}"
    if config.score_function == "sqrtsoftplus":
        return "the scores must be softmax or sigmoid; they are sqrtsoftplus"
    if not 32 <= num_experts <= 512 or config.top_k > 16:
        return (
            "a warp compares 32 to 512 experts and chooses at most 16; "
            f"there are {num_experts} experts, top_k={config.top_k}"
        )
    sizes = (num_experts, config.num_groups or 1)
    if config.num_groups and any(size & (size - 1) for size in sizes):
        return f"the numbers of experts and groups must be powers of two; they are {sizes}"
    return None


def _choose_unsupported(
    logits: jax.Array, expert_bias: jax.Array | None, *rest: jax.Array, config: RouterConfig
) -> str | None:
    if expert_bias is not None and config.score_function == "softmax":
        return "scores with a bias must be sigmoid; they are softmax"
    return _unsupported(logits, *rest, config=config)


_choose_op = Op(
    "route_choose",
    _choose,
    "... e, e, ..., ... k -> ... k, ... k",
    whole=("e", "k"),
    roles="tokens ., ., tokens, tokens . -> tokens ., tokens .",
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.triton.router",
            "choose",
            _choose_unsupported,
            takes=lambda logits, expert_bias, token_mask, topk_idx: topk_idx is None,
        ),
    ),
)
_weigh_grad_op = Op(
    "route_grad",
    _weigh_grad,
    "... e, ... k, ... k, ... k -> ... e",
    whole=("e", "k"),
    kernels=(Kernel.triton("expertmesh.core.kernels.triton.router", "weigh_grad", _unsupported),),
)


def _route_fwd(
    logits: jax.Array,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
    topk_idx: jax.Array | None,
    *,
    config: RouterConfig,
) -> tuple[Routing, _Residuals]:
    topk_idx, weights = _choose_op(logits, expert_bias, token_mask, topk_idx, config=config)
    return Routing(topk_idx, weights * config.scaling_factor), (logits, topk_idx, weights)


def _route_bwd(
    residuals: _Residuals, cotangent: Routing, *, config: RouterConfig
) -> tuple[jax.Array, None, None, None]:
    d_weights = cotangent.topk_weights * config.scaling_factor
    return _weigh_grad_op(*residuals, d_weights, config=config), None, None, None


_route = differentiable(_route_fwd, _route_bwd)
