"""Balance without a loss: updates of the bias by which experts are chosen. Nothing here is differentiable.

    sign:     bias_e + rate * sign(mean_j n_j - n_e)
    quantile: bias_e + rate * (b_e - bias_e),  b_e = quantile over tokens t of r_te at K / E,
              r_te = c_te - s_te the bias that e would need to be chosen by t

Dimension key: `...` tokens (T in all), E experts, K choices per token, B bins of a histogram.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import (
    FLOATS,
    as_counts,
    check_arrays,
    check_numbers,
    check_token_mask,
)
from expertmesh.core.router.config import RouterConfig
from expertmesh.core.router.scores import pointwise_scores

__all__ = ["quantile_expert_bias", "required_bias_histogram", "update_expert_bias"]


def update_expert_bias(
    expert_bias: jax.Array, tokens_per_expert: jax.Array, rate: float | jax.Array
) -> jax.Array:
    """bias + rate * sign(mean(n) - n): experts with too few tokens become likelier, those with too many less likely.

    Args:
      expert_bias: float[E].
      tokens_per_expert: int or float[E], n over the whole batch, as `expert_counts` returns it.
      rate: step; may be traced.

    Returns:
      float[E] in the bias' dtype. An expert with exactly the mean keeps its bias.

    Raises:
      ValueError: shapes that are not [E]; a rate that is a Python number and not finite.
      TypeError: the bias is not floating point.

    No communication: the counts are global already. The rule is that of auxiliary-loss-free load balancing
    (arXiv:2408.15664).
    """
    _check_bias("update_expert_bias", expert_bias)
    check_arrays("update_expert_bias", tokens_per_expert=tokens_per_expert)
    if tokens_per_expert.shape != expert_bias.shape:
        raise ValueError(
            "update_expert_bias: tokens_per_expert must be shaped like the bias; "
            f"got tokens_per_expert.shape={tokens_per_expert.shape}, expert_bias.shape={expert_bias.shape}; "
            "pass one count per expert"
        )
    if isinstance(rate, int | float):
        check_numbers("update_expert_bias", "pass a step such as 1e-3", rate=rate)
    count_E = jax.lax.stop_gradient(tokens_per_expert)
    # From the first expert's, so that the mean of equal counts is exact however large they are.
    if jnp.issubdtype(count_E.dtype, jnp.unsignedinteger):  # whose differences wrap
        count_E = count_E.astype(f"int{max(8 * count_E.dtype.itemsize, 32)}")
    excess_E = (count_E - count_E[:1]).astype(jnp.float32)
    # Not the mean: XLA multiplies by a rounded 1 / E.
    direction_E = jnp.sign(jnp.sum(excess_E) - excess_E.size * excess_E)
    bias_E = jax.lax.stop_gradient(expert_bias).astype(jnp.float32)
    return (bias_E + jax.lax.stop_gradient(rate) * direction_E).astype(expert_bias.dtype)


def required_bias_histogram(
    logits: jax.Array,
    expert_bias: jax.Array,
    config: RouterConfig,
    *,
    num_bins: int = 512,
    bias_range: tuple[float, float] = (-1.0, 1.0),
    token_mask: jax.Array | None = None,
) -> jax.Array:
    """For each expert, a histogram over tokens of the smallest bias with which the token would choose it.

    With s the token's unbiased scores and z_(1) >= z_(2) >= ... its sorted biased scores s + bias, the score to beat is
    c_e = z_(K+1) for an expert among the K best and z_(K) for another; the bias needed is r_e = c_e - s_e. So e is
    chosen if bias_e > r_e and not if bias_e < r_e, the other biases being what they are.

    Args:
      logits: float[..., E].
      expert_bias: float[E].
      config: with a score function other than softmax, top_k less than E, and no groups.
      num_bins: B, of equal width.
      bias_range: from the lower edge of the first bin to the upper edge of the last; what is needed beyond it counts in
        the first or last bin.
      token_mask: bool[...]; tokens for which it is False are not counted, nor is a NaN.

    Returns:
      int32[E, B], over all tokens of all shards; histograms of several steps may be added. Gradient 0.

    Raises:
      ValueError: softmax, groups, top_k = E, no bins, an empty range, shapes that do not fit.
      TypeError: logits or bias are not floating point, the mask not bool.

    Costs an all-reduce of one [E, B] array over the axes that shard tokens. Inside your own `shard_map`: the shard's.
    """
    RouterConfig.check("required_bias_histogram", config=config)
    (num_bins,) = as_counts("required_bias_histogram", num_bins=num_bins)
    _check_histogram(logits, expert_bias, config, num_bins, bias_range)
    check_token_mask("required_bias_histogram", token_mask, logits.shape[:-1])
    operands = (jax.lax.stop_gradient(logits), jax.lax.stop_gradient(expert_bias))
    options = dict(config=config, num_bins=num_bins, bias_range=tuple(map(float, bias_range)))
    histogram: jax.Array = _histogram_op(*operands, token_mask, **options)
    return histogram


def quantile_expert_bias(
    expert_bias: jax.Array,
    histogram: jax.Array,
    *,
    top_k: int,
    bias_range: tuple[float, float] = (-1.0, 1.0),
    rate: float | jax.Array = 1.0,
) -> jax.Array:
    """bias + rate * (b - bias): b_e is the bias with which e would get its even share of the tokens, K / E of them.

    b_e is the quantile at K / E of the needed biases, read from the histogram: in the first bin at which the cumulated
    count reaches K / E of the total, linearly interpolated within the bin. Each expert moves as if it moved alone. A
    `rate` below 1 damps the effect of all moving at once.

    Args:
      expert_bias: float[E].
      histogram: int[E, B] of `required_bias_histogram`.
      top_k: K.
      bias_range: that of the histogram.
      rate: 1 goes to b; may be traced.

    Returns:
      float[E] in the bias' dtype; unchanged for an expert whose histogram is empty. Gradient 0.

    Raises:
      ValueError: an empty range, or shapes that do not fit.
      TypeError: the bias is not floating point.

    No communication: the histogram is global already.
    """
    _check_bias("quantile_expert_bias", expert_bias)
    _check_range("quantile_expert_bias", bias_range)
    (top_k,) = as_counts("quantile_expert_bias", top_k=top_k)
    check_arrays("quantile_expert_bias", histogram=histogram)
    if histogram.ndim != 2 or histogram.shape[0] != expert_bias.shape[0] or not histogram.shape[1]:
        raise ValueError(
            "quantile_expert_bias: histogram must be [E, B]; "
            f"got histogram.shape={histogram.shape}, expert_bias.shape={expert_bias.shape}; "
            "pass that of required_bias_histogram"
        )
    num_experts, num_bins = histogram.shape
    if top_k > num_experts:
        raise ValueError(
            "quantile_expert_bias: top_k must be at most the number of experts; "
            f"got top_k={top_k}, {num_experts} experts; pass that of the router"
        )
    low, high = bias_range
    upto_EB = jnp.cumsum(jax.lax.stop_gradient(histogram).astype(jnp.float32), axis=1)
    # In E-ths, not divided: XLA multiplies by a rounded 1 / E, and past the bin that just reaches it lies a far one.
    reached_EB, target_E = upto_EB * num_experts, upto_EB[:, -1:] * top_k
    bin_E = jnp.argmax(reached_EB >= target_E, axis=1)[:, None]
    edges_EB = jnp.pad(reached_EB, ((0, 0), (1, 0)))
    before_E, after_E = (jnp.take_along_axis(edges_EB, bin_E + i, axis=1) for i in (0, 1))
    place_E = bin_E + (target_E - before_E) / jnp.maximum(after_E - before_E, 1.0)
    wanted_E = low + (high - low) / num_bins * place_E[:, 0]
    bias_E = jax.lax.stop_gradient(expert_bias).astype(jnp.float32)
    moved_E = bias_E + jax.lax.stop_gradient(rate) * (wanted_E - bias_E)
    return jnp.where(upto_EB[:, -1] > 0, moved_E, bias_E).astype(expert_bias.dtype)


def _check_bias(function: str, expert_bias: jax.Array) -> None:
    check_arrays(function, FLOATS, expert_bias=expert_bias)
    if expert_bias.ndim != 1:
        raise ValueError(
            f"{function}: expert_bias must be [E]; got expert_bias.shape={expert_bias.shape}; "
            "pass one value per expert"
        )


def _check_range(function: str, bias_range: tuple[float, float]) -> None:
    low, high = bias_range
    if not low < high:
        raise ValueError(
            f"{function}: bias_range must ascend; got bias_range={bias_range}; pass (low, high)"
        )


def _check_histogram(
    logits: jax.Array,
    expert_bias: jax.Array,
    config: RouterConfig,
    num_bins: int,
    bias_range: tuple[float, float],
) -> None:
    name = "required_bias_histogram"
    check_arrays(name, FLOATS, logits=logits, expert_bias=expert_bias)
    config.check_bias(name, expert_bias, logits.shape[-1])
    if config.score_function == "softmax":
        raise ValueError(
            f"{name}: the scores must be of an expert alone; got score_function='softmax', of which they sum to 1; "
            "use update_expert_bias"
        )
    _check_range(name, bias_range)
    if config.num_groups is not None:
        raise ValueError(
            f"{name}: groups must not be set, a group has no one score to beat; got num_groups={config.num_groups}; "
            "use update_expert_bias"
        )
    if config.top_k >= logits.shape[-1] or num_bins < 1:
        raise ValueError(
            f"{name}: top_k must be less than the number of experts, and num_bins at least 1; "
            f"got top_k={config.top_k}, logits.shape={logits.shape}, num_bins={num_bins}; change them"
        )


def _histogram(
    logits: jax.Array,
    expert_bias: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    config: RouterConfig,
    num_bins: int,
    bias_range: tuple[float, float],
) -> jax.Array:
    num_experts, (low, high) = logits.shape[-1], bias_range
    scores = pointwise_scores(logits.astype(jnp.float32), config.score_function)
    biased = scores + expert_bias.astype(jnp.float32)
    top, idx = jax.lax.top_k(biased, config.top_k + 1)
    chosen = jnp.any(idx[..., :-1, None] == jnp.arange(num_experts), axis=-2)
    required = jnp.where(chosen, top[..., -1:], top[..., -2:-1]) - scores
    place = jnp.clip(jnp.floor((required - low) * (num_bins / (high - low))), 0, num_bins - 1)
    counted = ~jnp.isnan(required)
    if token_mask is not None:
        counted &= token_mask[..., None]
    bin_idx = jnp.where(counted, place, num_bins).astype(jnp.int32)
    expert_idx = jnp.broadcast_to(jnp.arange(num_experts), bin_idx.shape)
    empty_EB = jnp.zeros((num_experts, num_bins), jnp.int32)
    return empty_EB.at[expert_idx, bin_idx].add(1, mode="drop")


_histogram_op = Op(
    "required_bias_histogram",
    _histogram,
    "... e, e, ... -> e b",
    summed=("...",),
    whole=("e", "b"),
    roles="tokens ., ., tokens -> . .",
)
