"""route beyond softmax: scores, bias, groups, scaling, masks, replay; against loops in float64."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from cases.covering import covering
from core.router import router_oracle as oracle
from expertmesh.core import RouterConfig, route
from expertmesh.core.router.scores import pointwise_scores, pointwise_slopes
from expertmesh.core.testing import relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

E = 12
CONFIGS = {
    "sigmoid": RouterConfig(top_k=4, score_function="sigmoid", scaling_factor=2.5),
    "sigmoid_one": RouterConfig(top_k=1, score_function="sigmoid", scaling_factor=0.5),
    "sqrtsoftplus": RouterConfig(top_k=4, score_function="sqrtsoftplus"),
    "sqrtsoftplus_plain": RouterConfig(top_k=4, score_function="sqrtsoftplus", normalize=False),
    "sqrtsoftplus_one": RouterConfig(top_k=1, score_function="sqrtsoftplus"),
    "sigmoid_groups": RouterConfig(
        top_k=4, score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=-1.5
    ),
    "sigmoid_group_best": RouterConfig(
        top_k=4, score_function="sigmoid", num_groups=4, group_topk=3, group_best=2
    ),
    "softmax_groups": RouterConfig(top_k=4, num_groups=3, group_topk=2, scaling_factor=3),
    "pre_softmax_groups": RouterConfig(
        top_k=3, use_pre_softmax=True, num_groups=6, group_topk=3, scaling_factor=0.25
    ),
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def make(seed, tokens=(5, 7)):
    """Logits, bias, mask, and choices some of which are out of range."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(*tokens, E)) * 2).astype(np.float32)
    bias = (rng.normal(size=E) * 0.2).astype(np.float32)
    return logits, bias, rng.random(tokens) < 0.7, rng.integers(-1, E + 1, size=(*tokens, 4))


def steering(config, bias):
    """For softmax where groups are: a bias for some, none for others."""
    return None if config.score_function == "softmax" and config.num_groups is None else bias


# Each configuration with a mask or a replay, and one with neither and with both.
@covering(
    "name, masked, replayed",
    CONFIGS,
    [False, True],
    [False, True],
    covers=[(name, i % 2 > 0, i % 2 < 1) for i, name in enumerate(CONFIGS)]
    + [(name, i > 0, i > 0) for i, name in enumerate(list(CONFIGS)[-2:])],
)
def test_values_and_gradients(name, masked, replayed):
    """Indices exactly; weights; gradients by central differences of the oracle, for cotangents of order 1."""
    config = CONFIGS[name]
    logits, bias, mask, forced = make(0)
    bias, mask = steering(config, bias), mask if masked else None
    forced = forced[..., : config.top_k].astype(np.int32) if replayed else None

    def weights(x):
        out = route(x, config, expert_bias=bias, token_mask=mask, topk_idx=forced)
        return out.topk_weights, out.topk_idx

    got, vjp, idx = jax.vjp(weights, jnp.asarray(logits), has_aux=True)
    want_idx, want = oracle.route(logits, config, bias, mask, forced)
    np.testing.assert_array_equal(idx, want_idx)
    assert got.dtype == jnp.float32 and relative_error(got, want) < 1e-6
    g = np.random.default_rng(1).normal(size=want.shape)
    (gradient,) = vjp(jnp.asarray(g, jnp.float32))
    # The choices are held: they do not depend on the logits.
    numeric = np.zeros(logits.shape)
    for e in range(E):
        step = np.zeros(E)
        step[e] = 1e-5
        up, down = (
            oracle.route(logits.astype(np.float64) + d, config, None, None, want_idx)[1]
            for d in (step, -step)
        )
        numeric[..., e] = np.sum(g * (up - down), axis=-1) / 2e-5
    assert relative_error(gradient, numeric) < 1e-4


@pytest.mark.parametrize("score", oracle.SCORES)
def test_scores_and_slopes_over_the_whole_range(score):
    """Relative to float64, element by element, where float32 can hold the result."""
    x = np.concatenate([np.linspace(-80, 80, 641), [-150.0, 20.0, 20.001, -20.0, -20.001, 1e30]])
    x = x[x > -85] if score == "sigmoid" else x
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    s = oracle.SCORES[score](wide)
    slope = {
        "sigmoid": np.exp(-np.abs(wide)) / (1 + np.exp(-np.abs(wide))) ** 2,
        "sqrtsoftplus": np.exp(-np.logaddexp(0, -wide)) / (2 * s),
    }[score]
    np.testing.assert_allclose(pointwise_scores(x, score), s, rtol=2e-6)
    np.testing.assert_allclose(pointwise_slopes(x, score), slope, rtol=2e-5, atol=1e-36)


@pytest.mark.parametrize("score", oracle.SCORES)
def test_extreme_logits_give_finite_gradients(score):
    config = RouterConfig(top_k=2, score_function=score)
    logits = jnp.array(
        [[-jnp.inf, -200, -300, -jnp.inf], [-jnp.inf] * 4, [90, 80, -90, 0.0]], jnp.float32
    )
    value, vjp = jax.vjp(lambda x: route(x, config).topk_weights, logits)
    (gradient,) = vjp(jnp.array([[1.0, -2.0]] * 3))
    assert np.isfinite(value).all() and np.isfinite(gradient).all()


def test_bias_steers_and_leaves_no_trace():
    """A bias that dwarfs the scores decides the choice; the weights are those of the scores, to the bit."""
    config = RouterConfig(top_k=2, score_function="sigmoid")
    logits = jnp.asarray(make(2)[0]) - 12  # scores of 1e-5 beside a bias of 1000
    bias = jnp.zeros(E).at[jnp.array([3, 8])].set(jnp.array([1000.0, 2000.0]))
    got = route(logits, config, expert_bias=bias)
    np.testing.assert_array_equal(got.topk_idx, np.broadcast_to([8, 3], got.topk_idx.shape))
    replayed = route(logits, config, topk_idx=got.topk_idx)
    np.testing.assert_array_equal(got.topk_weights, replayed.topk_weights)
    want = oracle.route(np.asarray(logits), config, np.asarray(bias))[1]
    assert relative_error(got.topk_weights, want) < 1e-6


def test_one_normalised_weight_is_1():
    """A choice alone is divided by itself if that is asked for."""
    config = RouterConfig(top_k=1, score_function="sigmoid", normalize=True)
    logits = jnp.asarray(make(2)[0])
    weights, vjp = jax.vjp(lambda x: route(x, config).topk_weights, logits)
    np.testing.assert_allclose(weights, 1, rtol=1e-6)
    assert np.abs(vjp(weights)[0]).max() < 1e-6


def test_bias_gets_no_gradient():
    config, (logits, bias, _, _) = CONFIGS["sigmoid"], make(3)
    gradient = jax.grad(lambda b: jnp.sum(route(logits, config, expert_bias=b).topk_weights ** 2))(
        jnp.asarray(bias)
    )
    np.testing.assert_array_equal(gradient, np.zeros(E))


@EVERY
def test_masked_tokens_route_nowhere(config):
    """NaN in them reaches nothing, forward or backward."""
    logits, bias, mask, _ = make(4)
    bias = steering(config, bias)
    poisoned = np.where(mask[..., None], logits, np.nan).astype(np.float32)

    def loss(x):
        out = route(x, config, expert_bias=bias, token_mask=mask)
        return jnp.sum(out.topk_weights**2), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(poisoned))
    clean, _ = route(logits, config, expert_bias=bias)
    np.testing.assert_array_equal(out.topk_idx, np.where(mask[..., None], clean, -1))
    assert (np.asarray(out.topk_weights)[~mask] == 0).all()
    assert (np.asarray(gradient)[~mask] == 0).all() and np.isfinite(gradient).all()


@EVERY
def test_nan_of_a_token_reaches_its_weights(config):
    logits, bias, _, _ = make(5)
    logits[1, 2, 7] = np.nan
    out = route(logits, config, expert_bias=steering(config, bias))
    poisoned = np.isnan(np.asarray(out.topk_weights)).sum(axis=-1)
    assert poisoned[1, 2] == (config.top_k if config.normalize is not False else 1)
    assert poisoned.astype(bool).sum() == 1
    assert ((out.topk_idx >= 0) & (out.topk_idx < E)).all()


def test_replay_reproduces_the_recorded_routing():
    config, (logits, bias, mask, _) = CONFIGS["sigmoid_groups"], make(6)
    first = route(logits, config, expert_bias=bias, token_mask=mask)
    again = route(logits, config, topk_idx=first.topk_idx)
    np.testing.assert_array_equal(first.topk_idx, again.topk_idx)
    np.testing.assert_array_equal(first.topk_weights, again.topk_weights)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_replay_takes_any_integers(dtype):
    logits = make(7)[0]
    recorded = route(logits, RouterConfig(top_k=3))
    again = route(logits, RouterConfig(top_k=3), topk_idx=recorded.topk_idx.astype(dtype))
    assert again.topk_idx.dtype == jnp.int32
    np.testing.assert_array_equal(again.topk_weights, recorded.topk_weights)


def test_experts_of_dropped_groups_never_stand_in():
    """An expert at -inf in a kept group comes before any of a dropped group."""
    logits = jnp.array([[1.0, 2.0, jnp.inf, -jnp.inf]])
    got = route(logits, RouterConfig(top_k=2, num_groups=2, group_topk=1))
    np.testing.assert_array_equal(got.topk_idx, [[2, 3]])


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(st.data())
def test_selection_property(data):
    """Any groups, ties everywhere (few distinct values), biases of the same few values."""
    group_topk = data.draw(st.integers(1, 3))
    num_groups = data.draw(st.integers(group_topk, 4))
    share = data.draw(st.integers(1, 3))
    size = data.draw(st.integers(share, 4))
    best = data.draw(st.none() | st.integers(1, size))
    own = dict(num_groups=num_groups, group_topk=group_topk, group_best=best)
    config = RouterConfig(
        top_k=share * group_topk if best is None else data.draw(st.integers(1, size * group_topk)),
        score_function="sigmoid",
        **data.draw(st.sampled_from([own, {}])),
    )
    experts = num_groups * size
    values = st.sampled_from([-math.inf, 0.0, -0.0, math.inf])  # scores 0, 1/2 and 1, exactly
    logits = np.array(data.draw(st.lists(values, min_size=experts, max_size=experts)), np.float32)
    steps = st.sampled_from([-0.5, 0.0, 0.25, 0.5])
    bias = np.array(data.draw(st.lists(steps, min_size=experts, max_size=experts)), np.float32)
    with jax.disable_jit():
        got = route(jnp.asarray(logits), config, expert_bias=jnp.asarray(bias)).topk_idx
    with np.errstate(over="ignore"):
        want = oracle.chosen_experts(
            oracle.SCORES["sigmoid"](logits.astype(np.float64)) + bias, config
        )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "kwargs, error, words",
    [
        (dict(num_groups=2), ValueError, ["num_groups=2", "group_topk=None", "together"]),
        (dict(group_topk=2), ValueError, ["num_groups=None", "together"]),
        (dict(num_groups=0, group_topk=1), ValueError, ["num_groups=0", "at least 1"]),
        (dict(num_groups=2, group_topk=0), ValueError, ["group_topk=0", "at least 1"]),
        (dict(num_groups=2.0, group_topk=1), TypeError, ["num_groups=2.0"]),
        (dict(num_groups=2, group_topk=4), ValueError, ["group_topk=4", "num_groups=2"]),
        (dict(num_groups=4, group_topk=3), ValueError, ["group_topk=3", "top_k=4", "group_best"]),
        (dict(group_best=1), ValueError, ["group_best=1", "num_groups"]),
        (
            dict(num_groups=2, group_topk=1, group_best=0),
            ValueError,
            ["group_best=0", "at least 1"],
        ),
        (dict(num_groups=2, group_topk=1, group_best=True), TypeError, ["group_best=True"]),
        (dict(normalize=True), ValueError, ["normalize=True", "softmax", "use_pre_softmax"]),
        (dict(normalize=1, score_function="sigmoid"), TypeError, ["normalize=1", "bool"]),
        (dict(scaling_factor="2"), TypeError, ["scaling_factor='2'", "Python number"]),
        (dict(scaling_factor=jnp.ones(())), TypeError, ["scaling_factor"]),
        (dict(scaling_factor=True), TypeError, ["scaling_factor=True"]),
        (dict(scaling_factor=math.inf), ValueError, ["scaling_factor=inf", "finite"]),
        (dict(score_function="relu"), ValueError, ["softmax", "sigmoid", "sqrtsoftplus"]),
        (dict(score_function="sigmoid", use_pre_softmax=True), ValueError, ["use_pre_softmax"]),
    ],
    ids=str,
)
def test_config_errors(kwargs, error, words):
    with pytest.raises(error) as info:
        RouterConfig(**{"top_k": 4} | kwargs)
    assert all(word in str(info.value) for word in ["RouterConfig", *words]), str(info.value)


SIGMOID = RouterConfig(top_k=2, score_function="sigmoid")


@pytest.mark.parametrize(
    "config, operands, error, words",
    [
        (SIGMOID, dict(expert_bias=np.zeros(5)), ValueError, ["(5,)", "6 experts"]),
        (SIGMOID, dict(expert_bias=np.zeros(6, int)), TypeError, ["expert_bias", "int"]),
        (SIGMOID, dict(token_mask=np.ones(4)), TypeError, ["token_mask", "float64"]),
        (SIGMOID, dict(token_mask=np.ones(3, bool)), ValueError, ["(3,)", "(4,)"]),
        (SIGMOID, dict(topk_idx=np.zeros((4, 2))), TypeError, ["topk_idx", "float64"]),
        (SIGMOID, dict(topk_idx=np.zeros((4, 3), int)), ValueError, ["(4, 3)", "top_k=2"]),
        (SIGMOID, dict(topk_idx=np.zeros((3, 2), int)), ValueError, ["(3, 2)", "(4, 6)"]),
        (RouterConfig(top_k=2, num_groups=4, group_topk=2), {}, ValueError, ["6 experts", "=4"]),
        (RouterConfig(top_k=3, num_groups=3, group_topk=1), {}, ValueError, ["top_k=3", "hold"]),
        (
            RouterConfig(top_k=1, num_groups=3, group_topk=1, group_best=3),
            {},
            ValueError,
            ["group_best=3", "6 experts", "lower"],
        ),
        (
            RouterConfig(top_k=3, num_groups=3, group_topk=1, group_best=2),
            {},
            ValueError,
            ["top_k=3", "hold"],
        ),
    ],
    ids=str,
)
def test_errors(config, operands, error, words):
    """At trace time: under jit as well."""
    with pytest.raises(error) as info:
        jax.eval_shape(lambda x: route(x, config, **operands), jnp.zeros((4, 6)))
    assert all(word in str(info.value) for word in ["route", *words]), str(info.value)


def test_too_many_logits_for_one_device():
    big = jax.ShapeDtypeStruct((2**27, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"2\^31 - 1; got shape=\(134217728, 16\)"):
        jax.eval_shape(lambda x: route(x, RouterConfig(top_k=2)), big)
