"""Delayed scaling: a step's multiplier follows from the amaxes of earlier steps.

    q_t = quantize(x_t, multiplier_t)
    multiplier_{t+1} = max / amax / 2^margin,  amax = max(amax_t, ..., amax_{t-L+1}) or amax_t

An amax that is 0, Inf or NaN leaves the multiplier as it is. State in, state out: nothing is kept elsewhere. Dimension
key: e tensors with a state of their own (any number of dimensions), L steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.op import Op
from expertmesh.core.operands import FLOATS, INTEGERS, check_arrays
from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.quantize import check_source, quantize_with_amax
from expertmesh.core.quantization.quantize_rows import as_rows, quantize_rows
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import DelayedScaling
from expertmesh.core.quantization.scales import amax_multiplier

__all__ = ["DelayedState", "grouped_quantize_delayed", "init_delayed", "quantize_delayed"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """What delayed scaling remembers of one operand; a pytree that an optimizer must not touch.

    Attributes:
      multiplier: float32[*e], the reciprocal of the scale. The next step quantizes with it.
      amax_history: float32[*e, L]: the amaxes of the last L - 1 steps, the latest at the end. The first entry is 0: the
        next step writes its amax there.
    """

    multiplier: jax.Array
    amax_history: jax.Array


def init_delayed(recipe: DelayedScaling, shape: tuple[int, ...] = ()) -> DelayedState:
    """The state before the first step: multipliers of 1, no amax.

    Args:
      recipe: gives L.
      shape: () for one tensor, or for all groups of rows together; (E,) for the weights of experts.
    """
    length = recipe.amax_history_len
    return DelayedState(jnp.ones(shape, jnp.float32), jnp.zeros((*shape, length), jnp.float32))


def _update_reference(
    amax: jax.Array,
    multiplier: jax.Array,
    amax_history: jax.Array,
    *,
    margin: int,
    largest: float,
    most_recent: bool,
) -> tuple[jax.Array, jax.Array]:
    history = jnp.concatenate([amax[..., None], amax_history[..., 1:]], axis=-1)
    seen = numerics.magnitude(amax if most_recent else history)
    seen = seen if most_recent else jnp.max(seen, axis=-1)
    fresh = amax_multiplier(seen, largest, numerics.largest(jnp.float32))
    # Down to the least normal number, whose reciprocal is finite.
    fresh = jnp.maximum(fresh * jnp.float32(2.0**-margin), jnp.float32(2.0**-126))
    history = jnp.roll(history, -1, axis=-1)
    history = jnp.concatenate([jnp.zeros_like(history[..., :1]), history[..., 1:]], axis=-1)
    return jnp.where(numerics.is_regular(seen), fresh, multiplier), history


_update_op = Op("update_delayed", _update_reference, "..., ..., ... l -> ..., ... l", whole=("l",))


def _updated(state: DelayedState, amax: jax.Array, recipe: DelayedScaling) -> DelayedState:
    multiplier, history = _update_op(
        amax,
        state.multiplier,
        state.amax_history,
        margin=recipe.margin,
        largest=numerics.largest(recipe.formats().x.dtype),
        most_recent=recipe.amax_compute_algo == "most_recent",
    )
    return DelayedState(multiplier, history)


def quantize_delayed(
    x: jax.Array, state: DelayedState, recipe: DelayedScaling, *, spec: PartitionSpec | None = None
) -> tuple[QuantizedArray, DelayedState]:
    """`quantize(x, recipe.formats().x, multiplier=state.multiplier)`, and the state after it.

    Args:
      x: float32, bfloat16 or float16 [*e, ...]: tokens, or a weight.
      state: of `init_delayed(recipe, x.shape[:n])`, n = 0 for one tensor.
      spec: where `x` is, as of `quantize`.

    Returns:
      (q, state). The amax of `x` enters the new state's multiplier, not the scale of q. Numbers that are too large for
      the multiplier saturate.

    Raises:
      TypeError: no state, or no DelayedScaling. ValueError: a state of another shape or length.

    The amax is maximised over the axes that shard `x`; the state is the same on all devices.
    """
    check_arrays("quantize_delayed", FLOATS, x=x)
    _check_state("quantize_delayed", state, recipe)
    q, amax = quantize_with_amax(x, recipe.formats().x, state.multiplier, spec=spec)
    return q, _updated(state, amax, recipe)


def grouped_quantize_delayed(
    x: jax.Array,
    group_sizes: jax.Array,
    state: DelayedState,
    recipe: DelayedScaling,
    *,
    spec: PartitionSpec | None = None,
) -> tuple[QuantizedArray, DelayedState]:
    """`quantize_delayed` of rows in groups: one multiplier for all of them, of the amax of all of them.

    Args:
      x: [P, C, *K], as of `grouped_quantize`; padding rows enter no amax.
      group_sizes: int32[P, G].
      state: of `init_delayed(recipe)`.
      spec: where `x` is, as of `grouped_quantize`.

    Returns:
      (q, state); q's scales [P, G] are all equal.

    Raises:
      As `quantize_delayed`; ValueError: a state with dimensions.
    """
    q, _, state = grouped_quantize_delayed_both(
        x, group_sizes, state, recipe, spec=spec, twice=False
    )
    return q, state


def grouped_quantize_delayed_both(
    x: Any,
    group_sizes: jax.Array,
    state: DelayedState,
    recipe: DelayedScaling,
    *,
    spec: PartitionSpec | None = None,
    twice: bool = True,
) -> tuple[QuantizedArray, QuantizedArray, DelayedState]:
    """(q as of `grouped_quantize_delayed`, if `twice` the same as the weight's gradient reads it, the state).

    Args:
      x: an array, or `Rows`.
    """
    source = as_rows(x)
    check_arrays("grouped_quantize_delayed", FLOATS, x=source.base)
    check_arrays("grouped_quantize_delayed", INTEGERS, group_sizes=group_sizes)
    _check_state("grouped_quantize_delayed", state, recipe)
    if state.multiplier.ndim:
        raise ValueError(
            f"grouped_quantize_delayed: the groups must share one state; got a state of shape "
            f"{state.multiplier.shape}; make it with init_delayed(recipe)"
        )
    multiplier = jnp.broadcast_to(state.multiplier, group_sizes.shape)
    format, name = recipe.formats().x, "grouped_quantize_delayed"
    check_source(name, source.base, format)
    copies = quantize_rows(
        name,
        source,
        group_sizes,
        (format, format if twice else None),
        multiplier=multiplier,
        spec=spec,
    )
    amax = numerics.from_magnitude(jnp.max(numerics.magnitude(copies.amax), initial=0))
    return *copies[:2], _updated(state, amax, recipe)


def _check_state(name: str, state: Any, recipe: Any) -> None:
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"{name}: the recipe must be DelayedScaling; got {recipe!r}; use quantize for the others"
        )
    if not isinstance(state, DelayedState):
        raise TypeError(
            f"{name}: DelayedScaling needs a DelayedState; got state={state!r}; start with init_delayed(recipe)"
        )
    want = (*state.multiplier.shape, recipe.amax_history_len)
    if state.amax_history.shape != want:
        raise ValueError(
            f"{name}: amax_history must have the multiplier's shape and amax_history_len = "
            f"{recipe.amax_history_len} steps; got {state.amax_history.shape}, multiplier {state.multiplier.shape}; "
            "start with init_delayed(recipe)"
        )
