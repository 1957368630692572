"""Tokens to their experts and back (tests 1 to 8 and 10), every transport in every mesh mode.

Expected values are closed forms, or loops over tokens that share no code with the library.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.settings import (
    EACH_MODE,
    TOKENS,
    each_mode,
    every_setting,
    parametrize,
    run_on_mesh,
)
from ep.exchange_oracle import routing
from expertmesh.core.testing import magnitudes, relative_error
from expertmesh.ep import combine, dispatch, dispatch_weights, prepare

pytestmark = pytest.mark.any_device

NUM_EXPERTS, TOP_K, ALIGNMENT, WIDTH = 16, 2, 16, 5
TOKENS_PER_SHARD = 37
SUMMED = {"float32": 1e-6, "bfloat16": 1e-2}


def uniform(num_tokens):
    """Every expert equally often."""
    t, k = np.indices((num_tokens, TOP_K))
    return ((t * TOP_K + k) % NUM_EXPERTS).astype(np.int32)


def skewed(num_tokens):
    """Everyone to expert 0 and to one of the others."""
    t = np.arange(num_tokens)
    return np.stack([0 * t, 1 + t % (NUM_EXPERTS - 1)], axis=1).astype(np.int32)


def one_rank_idle(num_tokens):
    """A quarter of the tokens, one rank's and more, go nowhere."""
    idx = routing("uniform", num_tokens, TOP_K, NUM_EXPERTS)
    idx[: num_tokens // 4] = -1
    return idx


def exchange(idx, tokens, weights, y, g_rows, g_out, g_weights, *, config):
    """Experts that return `y`, whatever they get, and the transpose of each step."""
    handle = prepare(idx, config)
    rows, pull_tokens = jax.vjp(functools.partial(dispatch, handle), tokens)
    row_weights, pull_weights = jax.vjp(functools.partial(dispatch_weights, handle), weights)
    weighted = (y.astype(jnp.float32) * row_weights[..., None]).astype(y.dtype)
    out, pull_rows = jax.vjp(functools.partial(combine, handle), weighted)
    return dict(
        total_recv=handle.total_recv,
        num_dropped=handle.num_dropped,
        rows=rows,
        out=out,
        d_tokens=pull_tokens(g_rows)[0],
        row_weights=row_weights,
        d_rows=pull_rows(g_out)[0],
        d_weights=pull_weights(g_weights)[0],
    )


class Case:
    """An exchange in a setting: random operands of many magnitudes, and the loops' view of it."""

    def __init__(self, setting, route, capacity=None, per_shard=TOKENS_PER_SHARD):
        self.setting, self.capacity = setting, capacity
        num_tokens = per_shard * int(np.prod(setting.sizes))
        self.idx = route(num_tokens)
        self.oracle = setting.oracle(self.idx, NUM_EXPERTS, capacity, ALIGNMENT)
        self.live = self.oracle.source() >= 0
        rng = np.random.default_rng(len(self.idx))
        rows = (self.oracle.P, self.oracle.C, WIDTH)
        self.tokens = magnitudes(rng, (num_tokens, WIDTH), setting.dtype)
        self.weights = np.full(self.idx.shape, 1 / TOP_K, np.float32)
        self.y = self.poisoned(magnitudes(rng, rows, setting.dtype))
        self.g_rows = self.poisoned(magnitudes(rng, rows, setting.dtype))
        self.g_out = magnitudes(rng, (num_tokens, WIDTH), setting.dtype)
        self.g_weights = self.poisoned(rng.normal(size=rows[:2]).astype(np.float32))

    def poisoned(self, rows):
        """NaN where there is no row."""
        live = self.live.reshape(self.live.shape + (1,) * (rows.ndim - 2))
        return np.where(live, rows, np.asarray(np.nan, rows.dtype))

    def run(self):
        setting = self.setting
        operands = (self.idx, self.tokens, self.weights, self.y)
        operands += (self.g_rows, self.g_out, self.g_weights)
        each = setting.participants
        specs = (TOKENS, TOKENS, TOKENS, each, each, TOKENS, each)
        config = setting.config(NUM_EXPERTS, alignment=ALIGNMENT, capacity=self.capacity)
        return run_on_mesh(setting, exchange, operands, specs, config=config)


def wide(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.any_process
@every_setting
@pytest.mark.parametrize("route", [uniform, skewed, one_rank_idle])
def test_identity_round_trip(setting, route):
    """Test 1. Experts that change nothing, weights of 1 / K: every token comes back, one that goes nowhere as 0."""
    case = Case(setting, route)
    rows = case.run()["rows"]
    np.testing.assert_array_equal(wide(rows), case.oracle.dispatch(wide(case.tokens)))
    case.y = case.poisoned(rows)
    out = case.run()
    routed = (case.idx >= 0).any(axis=1, keepdims=True)
    assert out["out"].dtype == rows.dtype == setting.dtype
    np.testing.assert_array_equal(wide(out["out"]), np.where(routed, wide(case.tokens), 0))
    assert not out["num_dropped"].any()


@pytest.mark.any_process
@every_setting
def test_gradient_of_dispatch(setting):
    """Test 5. 0.5 * sum of squares over the rows that hold tokens: the gradient is K times the token."""
    case = Case(setting, skewed)
    case.g_rows = case.poisoned(case.oracle.dispatch(wide(case.tokens)).astype(case.g_rows.dtype))
    np.testing.assert_array_equal(wide(case.run()["d_tokens"]), TOP_K * wide(case.tokens))


@pytest.mark.any_process
@every_setting
def test_gradient_of_combine(setting):
    """Test 6. Each row gets its token's cotangent, all other rows exactly 0; the weight 1 / K makes it c / K."""
    case = Case(setting, uniform)
    out = case.run()
    np.testing.assert_array_equal(wide(out["d_rows"]), case.oracle.dispatch(wide(case.g_out)))
    np.testing.assert_array_equal(wide(out["d_rows"])[~case.live], 0)
    np.testing.assert_array_equal(out["row_weights"], np.where(case.live, 1 / TOP_K, 0))


@pytest.mark.any_process
@every_setting
def test_combine_adds_up_what_experts_return(setting):
    """Test 6, forward. Unequal weights; rows that no token owns are NaN."""
    case = Case(setting, skewed)
    case.weights = np.random.default_rng(1).normal(size=case.idx.shape).astype(np.float32)
    row_weights = case.oracle.dispatch_weights(wide(case.weights))[..., None]
    want = case.oracle.combine(wide(case.y) * row_weights)
    got = case.run()["out"]
    assert got.dtype == setting.dtype
    assert relative_error(got, want) <= SUMMED[setting.dtype]


@pytest.mark.any_process
@every_setting
def test_gradient_of_each_weight(setting):
    """Test 7. Each row's cotangent is its own number, which its choice must get."""
    case = Case(setting, skewed)
    number = np.arange(1, case.live.size + 1, dtype=np.float32).reshape(case.live.shape)
    case.g_weights = case.poisoned(number)
    got = case.run()["d_weights"]
    np.testing.assert_array_equal(got, case.oracle.combine_weights(number))
    assert len(np.unique(got)) == got.size


@parametrize(EACH_MODE[1:3], EACH_MODE[:1] + EACH_MODE[3:])
def test_overflow_drops_the_last_rows(setting):
    """Test 10. All first choices go to expert 0, and there is room for 32 rows: the terms of the others are missing."""
    case = Case(setting, skewed, capacity=32, per_shard=48)
    out = case.run()
    demand, dropped = np.array(case.oracle.total), np.array(case.oracle.dropped)
    np.testing.assert_array_equal(out["total_recv"].ravel(), demand)
    np.testing.assert_array_equal(out["num_dropped"].ravel(), dropped)
    assert demand.max() > 32 and dropped.sum() == case.idx.size - case.live.sum()
    kept = wide(case.oracle.combine_weights(np.ones(case.live.shape))).sum(axis=1, keepdims=True)
    assert set(np.unique(kept)) <= {0, 1, 2} and (kept < TOP_K).any() and (kept > 0).any()
    case.y = case.poisoned(out["rows"])
    returned = case.run()["out"]
    np.testing.assert_array_equal(wide(returned), kept / TOP_K * wide(case.tokens))
    want = case.oracle.combine(wide(case.g_rows))
    assert relative_error(out["d_tokens"], want) <= SUMMED[setting.dtype]
    np.testing.assert_array_equal(wide(out["d_tokens"])[kept[:, 0] == 0], 0)
    np.testing.assert_array_equal(
        out["d_weights"], case.oracle.combine_weights(wide(case.g_weights))
    )


def prepare_each(idx, *, configs):
    handles = [prepare(idx, config) for config in configs]
    return [(handle.tokens_per_expert, handle.total_recv) for handle in handles]


@each_mode
def test_counts_of_prepare(setting):
    """Test 4. A histogram of the EP group's choices; the demand is their sum, each rounded up."""
    num_tokens = TOKENS_PER_SHARD * int(np.prod(setting.sizes))
    idx = routing("holes", num_tokens, 3, NUM_EXPERTS)
    configs = tuple(setting.config(NUM_EXPERTS, alignment=a) for a in (1, 16, 128))
    results = run_on_mesh(setting, prepare_each, (idx,), (TOKENS,), configs=configs)
    groups = idx.reshape(setting.num_participants // setting.num_ranks, -1)
    routed = [group[(group >= 0) & (group < NUM_EXPERTS)] for group in groups]
    want = [np.bincount(group, minlength=NUM_EXPERTS) for group in routed]
    want = np.reshape(want, (setting.num_participants, NUM_EXPERTS // setting.num_ranks))
    for (raw, total), config in zip(results, configs, strict=True):
        assert raw.dtype == total.dtype == np.int32
        np.testing.assert_array_equal(raw, want)
        aligned = -(-want // config.alignment) * config.alignment
        np.testing.assert_array_equal(total, aligned.sum(axis=1))


def round_trip(idx, x, config):
    handle = prepare(idx, config)
    weights = dispatch_weights(handle, jnp.full(idx.shape, 1 / idx.shape[-1], jnp.float32))
    rows = dispatch(handle, x)
    weighted = rows.astype(jnp.float32) * weights[..., None]
    return combine(handle, weighted.astype(rows.dtype)), handle


def layers(idx_1, idx_2, a, g_a, g_b, *, configs):
    """Two exchanges, the second of what the first returned, and the gradient of <a', g_a> + <b', g_b>."""

    def both(a):
        first, handle_1 = round_trip(idx_1, a, configs[0])
        second, handle_2 = round_trip(idx_2, 0.25 - first, configs[1])
        handles = (handle_1, handle_2)
        return (first, second), [(h.tokens_per_expert, h.total_recv) for h in handles]

    out, pull, counts = jax.vjp(both, a, has_aux=True)
    return out, counts, pull((g_a, g_b))[0]


def check_layers(setting, idx_1, idx_2, configs):
    """b = 0.25 - a, so the gradient is g_a - g_b."""
    rng = np.random.default_rng(2)
    a, g_a, g_b = (
        (rng.integers(-32, 32, size=(len(idx_1), WIDTH)) / 8).astype(np.float32) for _ in range(3)
    )
    specs = (TOKENS,) * 5
    out, counts, d_a = run_on_mesh(
        setting, layers, (idx_1, idx_2, a, g_a, g_b), specs, configs=configs
    )
    assert relative_error(out[0], a) < 1e-6 and relative_error(out[1], 0.25 - a) < 1e-6
    assert relative_error(d_a, g_a - g_b) < 1e-6
    for idx, (raw, total), config in zip((idx_1, idx_2), counts, configs, strict=True):
        oracle = setting.oracle(idx, NUM_EXPERTS, alignment=config.alignment)
        np.testing.assert_array_equal(raw, oracle.raw)
        np.testing.assert_array_equal(total.ravel(), oracle.total)


@parametrize(EACH_MODE[1:2], EACH_MODE[:1] + EACH_MODE[2:])
@pytest.mark.parametrize("same", [True, False])
def test_two_exchanges_in_one_program(setting, same):
    """Tests 2 and 3. Two layers of one config keep apart, with the same routing and with different ones."""
    num_tokens = TOKENS_PER_SHARD * int(np.prod(setting.sizes))
    first = skewed(num_tokens)
    second = first if same else uniform(num_tokens)
    config = setting.config(NUM_EXPERTS, alignment=ALIGNMENT)
    check_layers(setting, first, second, (config, config))


@parametrize(EACH_MODE[2:3], EACH_MODE[:2])
def test_layers_of_different_top_k_and_alignment(setting):
    """EP-19, in one program."""
    num_tokens = TOKENS_PER_SHARD * int(np.prod(setting.sizes))
    second = routing("uniform", num_tokens, 3, NUM_EXPERTS)
    configs = (setting.config(NUM_EXPERTS, alignment=ALIGNMENT), setting.config(NUM_EXPERTS))
    check_layers(setting, skewed(num_tokens), second, configs)


def rows_and_tokens(idx, x, *, config):
    out, handle = round_trip(idx, x, config)
    return dispatch(handle, x), out


@parametrize(EACH_MODE[:1], EACH_MODE[1:])
def test_batches_of_sequences(setting):
    """Test 8. [B, S, D] is the same as its tokens in a row."""
    shape = (2 * int(np.prod(setting.sizes)), 6)
    idx = routing("holes", int(np.prod(shape)), TOP_K, NUM_EXPERTS)
    x = magnitudes(np.random.default_rng(0), (*shape, WIDTH), setting.dtype)
    capacity = 2 * idx.size * ALIGNMENT
    config = setting.config(NUM_EXPERTS, alignment=ALIGNMENT, capacity=capacity)
    operands = (idx.reshape(*shape, TOP_K), x)
    rows, out = run_on_mesh(setting, rows_and_tokens, operands, (TOKENS,) * 2, config=config)
    oracle = setting.oracle(idx, NUM_EXPERTS, capacity, ALIGNMENT)
    np.testing.assert_array_equal(wide(rows), oracle.dispatch(wide(x).reshape(-1, WIDTH)))
    share = ((idx >= 0) & (idx < NUM_EXPERTS)).mean(axis=1).reshape(*shape, 1)
    assert out.shape == x.shape and relative_error(out, share * wide(x)) < SUMMED[setting.dtype]
