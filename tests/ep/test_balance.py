"""Choices of slots by loops, weights and gradients of slots, and skewed steps against the exchange over experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core import grouped_gemm
from expertmesh.ep import (
    EpConfig,
    balance,
    combine,
    copy_experts,
    dispatch,
    find_overflow,
    plan_copies,
    prepare,
    raise_overflow,
)
from expertmesh.ep.testing import WORKLOADS, make_choices

pytestmark = pytest.mark.default_jax

R, E, K, T, S = 8, 32, 4, 64, 2
EACH = E // R
CONFIG = EpConfig(num_experts=E, axis="ep", alignment=8)


def make_mesh(groups=1):
    shape, kinds = (groups, R // groups), (AxisType.Explicit,) * 2
    return jax.make_mesh(shape, ("dp", "ep"), axis_types=kinds)


def put(x, groups=1, spec=None):
    spec = PartitionSpec(("dp", "ep")) if spec is None else spec
    mesh = make_mesh(groups)
    return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda at: x[at])


def choices(workload, step=0, num_ranks=R):
    sizes = dict(num_ranks=num_ranks, num_experts=E, top_k=K, tokens_per_rank=T)
    return make_choices(workload, **sizes, step=step)


@partial(jax.jit, static_argnames=("config", "num_spare", "factor"))
def balanced_slots(idx, config=CONFIG, num_spare=S, factor=1.0):
    found = balance(idx, config, num_spare=num_spare, capacity_factor=factor)
    handle = prepare(found.topk_idx, found.config)
    counts = handle.tokens_per_expert, handle.num_dropped, handle.source
    return found.topk_idx, found.copies.expert, counts, find_overflow(handle)


def experts_of(slots, held, each=EACH):
    """The expert of each slot, by division."""
    rank, place = np.divmod(slots, each + held.shape[1])
    expert = np.where(place < each, rank * each + place, held[rank, np.maximum(place - each, 0)])
    return np.where(slots < 0, -1, expert)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_choices_go_to_slots_of_their_expert(workload):
    """Of each expert the first to its own slot, then to its copies in order; as many as the plan says."""
    idx = choices(workload)
    slots, held, (counts, dropped, source), _ = map_to_numpy(
        balanced_slots(put(idx.reshape(-1, K)))
    )
    np.testing.assert_array_equal(experts_of(slots, held), idx.reshape(-1, K))
    plan = plan_copies(np.bincount(idx[idx >= 0], minlength=E), num_ranks=R, num_spare=S)
    np.testing.assert_array_equal(held, plan.expert)
    np.testing.assert_array_equal(counts.sum(axis=1), plan.load)
    copy_rows = dict(zip(slots_of_copies(), np.ravel(plan.rows), strict=True))
    flat_idx, flat_slots = idx.reshape(-1), slots.reshape(-1)
    for expert in range(E):
        own = expert // EACH * (EACH + S) + expert % EACH
        copies = [
            slot for slot, x in zip(slots_of_copies(), held.reshape(-1), strict=True) if x == expert
        ]
        taken = flat_slots[flat_idx == expert]
        order = [own, *copies]
        np.testing.assert_array_equal(taken, sorted(taken, key=order.index))
        assert [np.sum(taken == slot) for slot in copies] == [copy_rows[slot] for slot in copies]
    assert source.shape[1] <= T * K + (EACH + S) * CONFIG.alignment
    aligned = -(-counts // CONFIG.alignment) * CONFIG.alignment
    assert dropped.any() == (aligned.sum(axis=1).max() > source.shape[1])


def test_the_same_with_64_bits():
    idx = put(choices("W3").reshape(-1, K))
    want = map_to_numpy(balanced_slots(idx)[:3])
    with jax.enable_x64(True):
        got = map_to_numpy(balanced_slots(idx)[:3])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, other)


def slots_of_copies():
    return [rank * (EACH + S) + EACH + place for rank in range(R) for place in range(S)]


def map_to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def test_several_groups_hold_the_same_copies():
    """Each sends a copy its share; what stays is its experts' own."""
    idx = np.concatenate([choices("W3", step, num_ranks=4) for step in range(2)])
    slots, held, (counts, *_), _ = map_to_numpy(balanced_slots(put(idx.reshape(-1, K), 2)))
    each = E // 4
    np.testing.assert_array_equal(experts_of(slots, held, each), idx.reshape(-1, K))
    assert held.shape == (4, S)
    plan = plan_copies(np.bincount(idx.reshape(-1), minlength=E), num_ranks=4, num_spare=S)
    np.testing.assert_array_equal(held, plan.expert)
    got = counts.reshape(2, 4, each + S)
    share = np.stack([np.bincount(part.reshape(-1), minlength=E) for part in np.split(idx, 2)])
    share = share / share.sum(axis=0)
    want = np.asarray(plan.rows) * share[:, held]
    np.testing.assert_array_equal(got[:, :, each:], np.where(held < 0, 0, np.floor(want + 1e-3)))
    without = [np.bincount(part.reshape(-1) // each).max() for part in np.split(idx, 2)]
    assert got.sum(axis=2).max() < 1.1 * T * K < min(without)


def test_what_copies_cannot_level_is_counted():
    """All choices are of one rank's experts; one spare slot on each other rank takes one expert each."""
    idx = np.tile(np.arange(K), (R * T, 1)).astype(np.int32)
    config = EpConfig(num_experts=E, axis="ep", overflow="error", capacity=T * K // 2)
    *_, (counts, dropped, source), overflow = map_to_numpy(balanced_slots(put(idx), config, 1))
    assert source.shape == (R, T * K // 2)
    assert dropped.sum() == np.maximum(counts.sum(axis=1) - T * K // 2, 0).sum() > 0
    with pytest.raises(RuntimeError, match="capacity=128"):
        raise_overflow(overflow)


def test_one_rank_stays_as_it_is():
    idx = jnp.asarray(choices("W1").reshape(-1, K))
    config = EpConfig(num_experts=E)
    found = balance(idx, config, num_spare=S)
    assert found.topk_idx is idx and found.config == config and found.copies.expert.size == 0
    w = jnp.ones((E, 2))
    assert copy_experts(w, found.copies) is w


def test_buffers_of_64_ranks():
    """4096 tokens, 8 of 256 experts: T K rows and a tile for each of six slots; eight times as many for any routing."""
    mesh = AbstractMesh((64,), ("ep",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = jax.ShapeDtypeStruct((64 * 4096, 8), jnp.int32, sharding=sharding)
    config = EpConfig(num_experts=256, axis="ep", alignment=128)

    def rows(idx, num_spare):
        found = balance(idx, config, num_spare=num_spare)
        return prepare(found.topk_idx, found.config).source

    level, worst = (jax.eval_shape(partial(rows, num_spare=s), idx).shape[1] for s in (2, 0))
    assert 4096 * 8 <= level <= 4096 * 8 + 6 * 128 <= 1.1 * 4096 * 8
    assert worst > 30 * level


@pytest.mark.parametrize("capacity_factor", [0.5, float("inf")])
def test_what_balance_refuses(capacity_factor):
    with pytest.raises(ValueError, match="balance: capacity_factor must be"):
        balance(
            put(choices("W1").reshape(-1, K)), CONFIG, num_spare=1, capacity_factor=capacity_factor
        )


def of_slots(w, held):
    """By a loop; zeros where a slot holds nothing."""
    w = np.asarray(w, np.float64).reshape(R, EACH, -1)
    flat = w.reshape(E, -1)
    copies = [[flat[x] if x >= 0 else 0 * flat[0] for x in row] for row in held]
    return np.concatenate([w, copies], axis=1)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        ("float32", "bfloat16"),
        *((d, None) for d in ("float32", "bfloat16", "float8_e4m3fn", "uint8")),
    ],
)
def test_weights_of_slots(dtype, way):
    """Copies are rounded on the way, what stays is not."""
    w = np.random.default_rng(0).integers(0, 200, (E, 3, 5)) * 1.01
    w = jnp.asarray(w).astype(dtype)
    found = balance(put(choices("W1").reshape(-1, K)), CONFIG, num_spare=S)
    got = copy_experts(put(np.asarray(w), spec=PartitionSpec("ep")), found.copies, dtype=way)
    assert got.dtype == w.dtype and got.shape == (E + R * S, 3, 5)
    held = np.asarray(found.copies.expert)
    want = of_slots(np.asarray(w, np.float64), held)
    if way:
        want[:, EACH:] = of_slots(np.asarray(w.astype(way), np.float64), held)[:, EACH:]
    assert (held >= 0).sum() >= R - 1
    np.testing.assert_array_equal(np.asarray(got, np.float64).reshape(want.shape), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_come_back(dtype):
    """An expert's own, and those of all its copies, in float32; twice the same bits."""
    found = balance(put(choices("W1").reshape(-1, K)), CONFIG, num_spare=S)
    w = put(np.zeros((E, 7), dtype), spec=PartitionSpec("ep"))
    g = np.random.default_rng(1).normal(size=(E + R * S, 7)).astype(dtype)
    cotangent = put(g, spec=PartitionSpec("ep"))
    pull = jax.jit(lambda w, g: jax.vjp(lambda w: copy_experts(w, found.copies), w)[1](g)[0])
    got = pull(w, cotangent)
    wide, want = np.asarray(g, np.float64).reshape(R, EACH + S, -1), np.zeros((E, 7))
    want += wide[:, :EACH].reshape(E, -1)
    for rank, row in enumerate(np.asarray(found.copies.expert)):
        for place, expert in enumerate(row):
            if expert >= 0:
                want[expert] += wide[rank, EACH + place]
    assert got.dtype == dtype and jax.typeof(got).sharding.spec[0] == "ep"
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(got, pull(w, cotangent))


@partial(jax.jit, static_argnames=("num_spare",))
def step(idx, x, w, g, num_spare):
    """Sums of products of small integers, and their gradients: exact in any order."""
    found = balance(idx, CONFIG, num_spare=num_spare, capacity_factor=1.25)
    handle = prepare(found.topk_idx, found.config)

    def experts(x, w):
        rows = dispatch(handle, x)
        return combine(
            handle, grouped_gemm(rows, copy_experts(w, found.copies), handle.group_sizes)
        )

    out, pull = jax.vjp(experts, x, w)
    return out, *pull(g), jnp.sum(handle.num_dropped)


def run_steps(steps=200):
    """How many steps there were, and in how many each array differed; the workloads in turn."""
    rng = np.random.default_rng(0)
    x, g = (put(rng.integers(-2, 3, (R * T, 8)).astype(np.float32)) for _ in range(2))
    w = put(rng.integers(-2, 3, (E, 8, 8)).astype(np.float32), spec=PartitionSpec("ep"))
    unlike = jax.jit(lambda a, b: [jnp.any(one != other) for one, other in zip(a, b, strict=True)])
    counts = np.zeros(4, int)
    for number in range(steps):
        idx = choices(list(WORKLOADS)[number % len(WORKLOADS)], step=number)
        idx = put(idx.reshape(-1, K))
        want, got = (step(idx, x, w, g, num_spare=spare) for spare in (0, S))
        assert int(want[-1]) == 0
        counts += [bool(one) for one in unlike(got, want)]
    return [steps, *map(int, counts)]


@covering("steps", (40, 200), covers=[40])
def test_skewed_steps_are_those_of_the_flat_exchange(steps):
    assert run_steps(steps) == [steps, 0, 0, 0, 0]


@pytest.mark.multiprocess
@pytest.mark.full
def test_200_skewed_steps_over_8_processes(multiprocess):
    results = multiprocess("ep.test_balance:run_steps", processes=8, devices=1, timeout=600)
    assert results == [[200, 0, 0, 0, 0]] * 8
