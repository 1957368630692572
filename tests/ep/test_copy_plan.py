"""The plan of copies keeps its rules and is near the best of an exact solver; the kernel against the definition."""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from ep.copies_oracle import least_fullest, loads_by_loops
from expertmesh.ep import copy_plan as module
from expertmesh.ep.copy_plan import least_rows_of_a_copy, plan_copies
from expertmesh.ep.testing import WORKLOADS, make_choices
from expertmesh.flax_moe import place_experts

SIZES = {"few": (8, 32, 4, 512), "fine": (4, 64, 8, 512), "one each": (8, 8, 2, 512)}


def counts_of(workload, sizes, step, seed=0):
    R, E, K, T = sizes
    given = dict(num_ranks=R, num_experts=E, top_k=K, tokens_per_rank=T)
    idx = make_choices(workload, **given, step=step, seed=seed)
    return np.bincount(idx[idx >= 0], minlength=E).astype(np.int32)


def placed_counts(workload, sizes, step=3):
    """Of a step, with the experts placed by those of the steps before."""
    before = sum(counts_of(workload, sizes, earlier) for earlier in range(step))
    return counts_of(workload, sizes, step)[place_experts(before, sizes[0])]


def fullest(counts, num_ranks, num_spare, **options):
    """The fullest rank's share of the mean, by loops over the plan."""
    plan = plan_copies(jnp.asarray(counts), num_ranks=num_ranks, num_spare=num_spare, **options)
    load = loads_by_loops(counts, plan, num_ranks)
    np.testing.assert_array_equal(plan.load, load)
    return load.max() * num_ranks / counts.sum()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_near_the_best_with_experts_placed_before(workload, sizes):
    """The solver is asked only where the mean itself does not answer."""
    counts = placed_counts(workload, sizes)
    got = fullest(counts, sizes[0], 2)
    assert got <= 1.02 or got <= 1.02 * least_fullest(counts, sizes[0], 2)


@pytest.mark.parametrize("num_spare", [1, 2])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_near_the_best_with_experts_where_they_are(workload, num_spare):
    counts = counts_of(workload, SIZES["few"], 3)
    got = fullest(counts, 8, num_spare)
    assert got <= 1.02 or got <= 1.02 * least_fullest(counts, 8, num_spare)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_64_ranks_are_level(workload):
    """With 256 experts and two spare slots; the bound is the goal."""
    assert fullest(placed_counts(workload, (64, 256, 8, 256)), 64, 2) <= 1.02


@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize("part", range(4))
def test_near_the_best_for_routing_of_the_trainer(part, layer):
    """Recorded: each fourth step, with the experts placed by the three before, on 8 ranks."""
    recorded = json.loads(pathlib.Path(__file__).with_name("recorded_routing.json").read_text())
    *before, counts = np.array(recorded["rows"][part], np.int32)[:, layer]
    counts = counts[place_experts(sum(before), 8)]
    assert largest_over_mean(counts, 8) > 1.1
    got = fullest(counts, 8, 2)
    assert got <= 1.02 or got <= 1.02 * least_fullest(counts, 8, 2)


def largest_over_mean(counts, num_ranks):
    load = counts.reshape(num_ranks, -1).sum(axis=1)
    return load.max() / load.mean()


@pytest.mark.parametrize("seed", range(20))
def test_any_counts(seed):
    """Of many magnitudes, with zeros, on any number of ranks."""
    rng = np.random.default_rng(seed)
    ranks, local, spare = rng.integers(1, 9), rng.integers(1, 6), rng.integers(0, 4)
    counts = (10.0 ** rng.uniform(-1, 5, ranks * local)).astype(np.int32)
    assert fullest(counts, ranks, spare) <= largest_over_mean(counts, ranks) + 1e-9


def test_ranks_pass_on_what_few_can_take():
    """Of 64 ranks 61 are a little too full, and three have six slots: ranks give more than they have too much."""
    load = np.full((64, 4), 255)
    load[:3] = np.ceil(250 - 5 * 61 / 3)
    assert fullest(load.reshape(-1).astype(np.int32), 64, 2) <= 1.002


def test_without_rows_nothing_is_copied():
    plan = plan_copies(jnp.zeros(8, jnp.int32), num_ranks=4, num_spare=2)
    assert (np.asarray(plan.expert) == -1).all() and not np.asarray(plan.load).any()
    assert plan_copies(jnp.ones(8, jnp.int32), num_ranks=4, num_spare=0).expert.shape == (4, 0)


def test_counts_near_the_limit_of_int32():
    counts = np.array([2**31 - 9, 2, 3, 1], np.int32)
    plan = plan_copies(jnp.asarray(counts), num_ranks=4, num_spare=1)
    assert plan.load.max() == 2**29


@pytest.mark.parametrize("least", [0, 10, 100, 10**6])
def test_a_copy_takes_more_than_the_least(least):
    """And what is left above the level is no more than that."""
    counts = counts_of("W3", SIZES["few"], 0)
    plan = plan_copies(jnp.asarray(counts), num_ranks=8, num_spare=2, least_rows=least)
    taken = np.asarray(plan.rows)[np.asarray(plan.expert) >= 0]
    assert (taken > least).all() and len(taken) == 0 or least < 10**6
    assert loads_by_loops(counts, plan, 8).max() <= counts.sum() / 8 + max(least, 1)


def test_the_same_under_jit_and_vmap():
    counts = jnp.stack([jnp.asarray(counts_of(w, SIZES["few"], 0)) for w in WORKLOADS])
    plan = partial(plan_copies, num_ranks=8, num_spare=2)
    together = jax.jit(jax.vmap(plan))(counts)
    for number, each in enumerate(counts):
        for got, want in zip(together, plan(each), strict=True):
            np.testing.assert_array_equal(got[number], want)


def test_the_same_with_64_bits():
    """What is summed and found there is int32 all the same."""
    counts = jnp.asarray(counts_of("W3", SIZES["few"], 0))
    want = plan_copies(counts, num_ranks=8, num_spare=2)
    with jax.enable_x64(True):
        got = plan_copies(counts, num_ranks=8, num_spare=2)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == jnp.int32
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "counts, options, error, message",
    [
        (np.ones(8, np.float32), {}, TypeError, "dtype=float32"),
        (np.ones((2, 4), np.int32), {}, ValueError, r"shape=\(2, 4\)"),
        (np.ones(6, np.int32), {}, ValueError, "num_ranks=4"),
        (np.ones(8, np.int32), {"num_spare": -1}, ValueError, "num_spare=-1"),
        (np.ones(8, np.int32), {"least_rows": -1}, ValueError, "least_rows=-1"),
        (np.ones(8, np.int32), {"num_ranks": 0}, ValueError, "num_ranks=0"),
        (np.ones(8, np.int32), {"num_ranks": 4.0}, TypeError, "num_ranks=4.0"),
        (np.ones(8, np.int32), {"num_spare": 1.5}, TypeError, "num_spare=1.5"),
        (np.ones(8, np.int32), {"least_rows": 0.5}, TypeError, "least_rows=0.5"),
    ],
)
def test_what_it_refuses(counts, options, error, message):
    with pytest.raises(error, match=f"plan_copies: .*{message}"):
        plan_copies(jnp.asarray(counts), **dict(num_ranks=4, num_spare=1) | options)


def test_numpys_ints_are_ints():
    counts = jnp.asarray(counts_of("W3", SIZES["few"], 0))
    got, want = (
        plan_copies(counts, num_ranks=kind(8), num_spare=kind(2), least_rows=kind(1))
        for kind in (np.int64, int)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_when_a_copy_pays():
    """At 600 TFLOP/s a row of n weights takes 6 n / 600e12 s; 6 n bytes at 300 GB/s, as long as 2000 rows."""
    rates = dict(flops_per_second=600e12, bytes_per_second=300e9)
    rows = least_rows_of_a_copy(**rates)
    n = 3 * 7168 * 2048
    assert rows == 2000 and rows * 6 * n / 600e12 == pytest.approx((2 + 4) * n / 300e9)
    for name in rates:
        with pytest.raises(ValueError, match=f"{name}=0"):
            least_rows_of_a_copy(**rates | {name: 0})


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("least", [0, 40])
@pytest.mark.parametrize(
    "ranks, local, spare", [(8, 4, 2), (64, 4, 2), (5, 3, 1), (1, 4, 2), (3, 1, 5)]
)
def test_the_kernel_plans_the_same(ranks, local, spare, least):
    options = dict(num_spare=spare, least_rows=least, levels=module.LEVELS)
    rng = np.random.default_rng(ranks)
    for power in (2, 4, 0):  # at 0 all are equal
        counts = jnp.asarray(100 * rng.uniform(0.1, 1, (ranks, local)) ** -power, jnp.int32)
        got, want = (
            module.plan_op(counts, implementation=name, **options)
            for name in ("triton", "reference")
        )
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_the_kernel_refuses():
    refused = partial(module._unsupported, num_spare=2, least_rows=0)
    assert refused(jax.ShapeDtypeStruct((64, 4), jnp.int32)) is None
    for shape, number in (((2048, 1), "there are 2048, 2 and 2048"), ((64, 256), "2 and 16384")):
        assert number in refused(jax.ShapeDtypeStruct(shape, jnp.int32))
