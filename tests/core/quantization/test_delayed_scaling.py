"""Delayed scaling against a list of amaxes in NumPy; its state through scans and over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import (
    DelayedScaling,
    DelayedState,
    Float8CurrentScaling,
    grouped_quantize_delayed,
    init_delayed,
    quantize_delayed,
)

AMAXES = [1.0, 64.0, 2.0, 0.0, np.nan, 0.5, np.inf, 3.0, 2.0**-140, 2.0**-3, 0.0, 1.0]


def multipliers(amaxes, recipe):
    """Of each step: of the steps before it, by the formula of the recipe."""
    history, multiplier, out = [0.0] * recipe.amax_history_len, np.float32(1), []
    for amax in amaxes:
        out.append(multiplier)
        history[0] = amax
        seen = max(history, key=lambda a: np.inf if np.isnan(a) else a)
        seen = amax if recipe.amax_compute_algo == "most_recent" else seen
        seen = np.nan if np.isnan(history).any() and seen is not amax else seen
        if seen > 0 and np.isfinite(seen):
            with np.errstate(over="ignore"):
                exact = min(np.float32(448) / np.float32(seen), np.finfo(np.float32).max)
            multiplier = np.float32(exact / 2**recipe.margin)
        history = [0.0, *history[2:], history[0]] if len(history) > 1 else [0.0]
    return np.array(out)


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=3),
        DelayedScaling(amax_history_len=1, margin=2),
        DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    ],
)
def test_steps_in_a_scan(recipe):
    """The state is a carry; a step's scale knows the steps before it only."""
    x = np.array(AMAXES, np.float32)[:, None] * np.array([[-1.0, 0.25]], np.float32)

    def step(state, x):
        q, state = quantize_delayed(x, state, recipe)
        return state, q

    state, q = jax.jit(lambda x: jax.lax.scan(step, init_delayed(recipe), x))(x)
    want = multipliers(AMAXES, recipe)
    np.testing.assert_array_equal(q.scale, np.float32(1) / want)
    exact = np.clip(x.astype(np.float64) * want[:, None], -448, 448).astype(q.data.dtype)
    exact = np.where(np.isnan(x), 0x7F, exact.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), exact)
    assert state.amax_history.shape == (recipe.amax_history_len,)


def test_a_state_for_each_expert():
    recipe = DelayedScaling(amax_history_len=2)
    w = np.ones((3, 4, 2), np.float32) * np.array([1, 8, 64], np.float32)[:, None, None]
    q, state = quantize_delayed(w, init_delayed(recipe, (3,)), recipe)
    np.testing.assert_array_equal(q.scale, [1, 1, 1])
    np.testing.assert_array_equal(state.multiplier, [448, 56, 7])
    np.testing.assert_array_equal(state.amax_history, [[0, 1], [0, 8], [0, 64]])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_the_state_is_the_same_on_all_devices(kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    recipe = DelayedScaling(amax_history_len=2)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = x.reshape(2, 2, 2)
    x = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    rows = jax.device_put(rows, NamedSharding(mesh, P("a")))
    sizes = jax.device_put(np.array([[1, 1], [0, 1]], np.int32), NamedSharding(mesh, P("a")))

    @jax.jit
    def function(x, rows, sizes):
        state = init_delayed(recipe)
        return quantize_delayed(x, state, recipe)[1], grouped_quantize_delayed(
            rows, sizes, state, recipe
        )[1]

    dense, grouped = function(x, rows, sizes)
    np.testing.assert_array_equal(dense.amax_history, [0, 7])
    np.testing.assert_array_equal(grouped.amax_history, [0, 5])  # 6 and 7 are in no group
    for leaf in jax.tree.leaves((dense, grouped)):
        assert leaf.sharding.is_fully_replicated


@pytest.mark.parametrize(
    "state, recipe, error, words",
    [
        (None, DelayedScaling(), TypeError, ["state=None", "init_delayed"]),
        (init_delayed(DelayedScaling()), DelayedScaling(amax_history_len=4), ValueError, ["1024"]),
        (
            DelayedState(jnp.ones(2), jnp.ones((3, 1024))),
            DelayedScaling(),
            ValueError,
            ["(3, 1024)", "(2,)"],
        ),
        (init_delayed(DelayedScaling()), Float8CurrentScaling(), TypeError, ["DelayedScaling"]),
        (init_delayed(DelayedScaling(), (3,)), DelayedScaling(), ValueError, ["(3,)"]),
    ],
)
def test_errors(state, recipe, error, words):
    for call in (
        lambda: quantize_delayed(jnp.ones((2, 8)), state, recipe),
        lambda: grouped_quantize_delayed(jnp.ones((2, 8, 4)), jnp.ones((2, 1), int), state, recipe),
    ):
        with pytest.raises(error) as info:
            call()
        assert all(word in str(info.value) for word in ["quantize_delayed", *words])
