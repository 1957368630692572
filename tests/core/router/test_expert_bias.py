"""Updates of the expert bias: the rule of signs, the histogram of needed biases, its quantile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.router import router_oracle as oracle
from expertmesh.core import (
    RouterConfig,
    expert_counts,
    quantile_expert_bias,
    required_bias_histogram,
    route,
    update_expert_bias,
)

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

CONFIG = RouterConfig(top_k=2, score_function="sigmoid")


def skewed(seed=0, tokens=2048, experts=8):
    """Logits that prefer the low experts."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(tokens, experts)) - np.linspace(0, 1.5, experts)).astype(np.float32)


def test_sign_rule():
    got = update_expert_bias(jnp.array([0.5, 0.5, -1.0]), jnp.array([10, 4, 7]), 0.25)
    np.testing.assert_array_equal(got, [0.25, 0.75, -1.0])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int16", "float32"])
def test_counts_of_any_dtype(dtype):
    """[5, 1, 9, 5] around their mean of 5, and counts that differ by more than a signed byte holds."""
    for counts, signs in (([5, 1, 9, 5], [0, 1, -1, 0]), ([250, 0, 1, 9], [-1, 1, 1, 1])):
        got = update_expert_bias(jnp.zeros(4), jnp.array(counts, dtype), 0.5)
        np.testing.assert_array_equal(got, 0.5 * np.array(signs, np.float32))


@pytest.mark.parametrize("count", [0, 7, 2**24 + 1, 2**31 - 1])
def test_equal_counts_move_nothing(count):
    """Also where float32 does not hold the counts or an int32 their sum."""
    bias = jnp.linspace(-1, 1, 7)
    got = update_expert_bias(bias, jnp.full(7, count, jnp.int32), 0.1)
    np.testing.assert_array_equal(got, bias)


@pytest.mark.parametrize("experts", [7, 28, 60, 64, 160])
def test_an_expert_of_the_mean_does_not_move(experts):
    """Whatever the experts' number: 1 / E is rounded."""
    counts = np.full(experts, 3 * experts + 1)
    counts[:2] += [-5, 5]
    got = update_expert_bias(jnp.zeros(experts), jnp.asarray(counts), 0.25)
    np.testing.assert_array_equal(got, np.sign(counts.mean() - counts) / 4)


@pytest.mark.parametrize("experts", [7, 8, 28, 60])
def test_a_bin_that_just_reaches_the_quantile(experts):
    """It is found, not the next one that is not empty."""
    histogram = np.zeros((experts, 16), np.int32)
    histogram[:, 2], histogram[:, 12] = 3, 3 * experts - 3
    got = quantile_expert_bias(jnp.zeros(experts), jnp.asarray(histogram), top_k=1)
    np.testing.assert_array_equal(got, np.full(experts, -1 + 3 * 2 / 16))


def test_updates_have_no_gradient_and_keep_the_dtype():
    histogram = jnp.ones((3, 4), jnp.int32)

    def both(bias):
        return update_expert_bias(bias, jnp.array([1, 2, 3]), 0.1) + quantile_expert_bias(
            bias, histogram, top_k=1
        )

    bias = jnp.zeros(3, jnp.bfloat16)
    assert both(bias).dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.grad(lambda b: jnp.sum(both(b)))(bias), np.zeros(3))


@pytest.mark.parametrize("score_function", oracle.SCORES)
def test_histogram(score_function):
    config = RouterConfig(top_k=3, score_function=score_function)
    logits, bias = skewed(1, 200), np.linspace(-0.2, 0.1, 8).astype(np.float32)
    mask = np.random.default_rng(2).random(200) < 0.5
    got = required_bias_histogram(
        jnp.asarray(logits), jnp.asarray(bias), config, num_bins=9, bias_range=(-0.3, 0.4), token_mask=jnp.asarray(mask)
    )  # fmt: skip
    want = oracle.histogram(logits, bias, config, 9, (-0.3, 0.4), mask)
    np.testing.assert_array_equal(got, want)
    assert (np.sum(want, axis=1) == mask.sum()).all()


def test_needed_bias_decides_the_choice():
    """Just above what the histogram's definition says an expert is chosen, just below it is not."""
    s = oracle.SCORES["sigmoid"](skewed(3, 1)[0].astype(np.float64))
    needed = oracle.needed_bias(s, np.zeros(8), 2)
    for e in range(8):
        for offset, chosen in ((1e-6, True), (-1e-6, False)):
            bias = np.zeros(8)
            bias[e] = needed[e] + offset
            assert (e in oracle.chosen_experts(s + bias, CONFIG)) == chosen


def test_quantile_by_hand():
    """Half of the tokens (K / E = 1 / 2): inside a bin, at a bin's edge, nothing counted."""
    histogram = jnp.array([[0, 4, 4, 0], [6, 2, 0, 0]], jnp.int32)
    got = quantile_expert_bias(jnp.array([9.0, 9.0]), histogram, top_k=1, bias_range=(0.0, 4.0))
    np.testing.assert_allclose(got, [2.0, 4 / 6], rtol=1e-6)
    half = quantile_expert_bias(
        jnp.array([9.0, 9.0]), histogram, top_k=1, bias_range=(0.0, 4.0), rate=0.5
    )
    np.testing.assert_allclose(half, [5.5, (9 + 4 / 6) / 2], rtol=1e-6)
    empty = quantile_expert_bias(jnp.array([9.0, 3.0]), jnp.zeros((2, 4), jnp.int32), top_k=1)
    np.testing.assert_array_equal(empty, [9.0, 3.0])


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_updates_balance(rule):
    """From a load four times the mean to within a fifth of it."""
    logits, bias = jnp.asarray(skewed()), jnp.zeros(8)

    def counts(bias):
        idx = route(logits, CONFIG, expert_bias=bias).topk_idx
        return expert_counts(idx, num_experts=8)

    before = counts(bias)
    for _ in range(60 if rule == "sign" else 8):
        if rule == "sign":
            bias = update_expert_bias(bias, counts(bias), 0.01)
        else:
            histogram = required_bias_histogram(logits, bias, CONFIG)
            bias = quantile_expert_bias(bias, histogram, top_k=2, rate=0.5)
    after = counts(bias)
    assert np.max(before) > 1.8 * np.mean(before)
    assert np.max(after) < 1.2 * np.mean(after)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: update_expert_bias(jnp.zeros(3), jnp.zeros(4), 1), ValueError, ["(3,)", "(4,)"]),
        (lambda: update_expert_bias(jnp.zeros(3, int), jnp.zeros(3), 1), TypeError, ["int32"]),
        (lambda: update_expert_bias(jnp.zeros((1, 3)), jnp.zeros(3), 1), ValueError, ["(1, 3)"]),
        (lambda: histogram_of(config=RouterConfig(top_k=2)), ValueError, ["softmax"]),
        (lambda: histogram_of(bias=jnp.zeros(3)), ValueError, ["(3,)"]),
        (lambda: histogram_of(logits=jnp.zeros((4, 6), int)), TypeError, ["int32"]),
        (
            lambda: histogram_of(
                config=RouterConfig(top_k=2, score_function="sigmoid", num_groups=2, group_topk=1)
            ),
            ValueError,
            ["num_groups=2"],
        ),
        (
            lambda: histogram_of(config=RouterConfig(top_k=6, score_function="sigmoid")),
            ValueError,
            ["top_k=6"],
        ),
        (lambda: histogram_of(num_bins=0), ValueError, ["num_bins=0"]),
        (lambda: histogram_of(bias_range=(1, 1)), ValueError, ["bias_range=(1, 1)"]),
        (lambda: histogram_of(token_mask=jnp.ones(3, bool)), ValueError, ["token_mask"]),
        (
            lambda: quantile_expert_bias(jnp.zeros(3), jnp.zeros((4, 5), int), top_k=1),
            ValueError,
            ["(4, 5)", "(3,)"],
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call()
    assert all(word in str(info.value) for word in words), str(info.value)


def histogram_of(logits=None, bias=None, config=CONFIG, **options):
    logits = jnp.zeros((4, 6)) if logits is None else logits
    return required_bias_histogram(
        logits, jnp.zeros(6) if bias is None else bias, config, **options
    )
