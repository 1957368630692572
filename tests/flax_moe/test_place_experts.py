"""Experts placed by load: the balance against all placements, and the same function in other numbers."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import DelayedScaling
from expertmesh.flax_moe import (
    init_quant_state,
    moe,
    permute_experts,
    place_experts,
    split_wi,
)
from flax_moe.moe_oracle import AUTO, EXPLICIT, make_config, make_data, make_mesh, place

ZIPF = 1 / np.arange(1, 9)


def largest(loads, ranks):
    return np.reshape(loads, (ranks, -1)).sum(axis=1).max()


@pytest.mark.parametrize("loads", [ZIPF, ZIPF[::-1], [9, 1, 1, 1, 1, 1, 1, 9]], ids=str)
def test_balance_is_near_the_best(loads):
    """Of all 35 ways to give 8 experts to 2 ranks."""
    loads = np.asarray(loads, float)
    placement = place_experts(loads, 2)
    assert placement.dtype == np.int32 and sorted(placement) == list(range(8))
    assert list(placement[:4]) == sorted(placement[:4])
    best = min(
        max(loads[list(half)].sum(), loads.sum() - loads[list(half)].sum())
        for half in itertools.combinations(range(8), 4)
    )
    assert largest(loads[placement], 2) <= 1.05 * best


def test_equal_loads_are_taken_in_order():
    """By a loop in Python; of 64 experts, since numpy sorts short arrays stably whatever is asked for."""
    loads = np.random.default_rng(0).integers(0, 4, 64)
    held = [[] for _ in range(8)]
    for expert in sorted(range(64), key=lambda e: (-loads[e], e)):
        room = [rank for rank in range(8) if len(held[rank]) < 8]
        held[min(room, key=lambda rank: (sum(loads[held[rank]]), rank))].append(expert)
    np.testing.assert_array_equal(place_experts(loads, 8), np.concatenate([*map(sorted, held)]))


@pytest.mark.parametrize("axes", [EXPLICIT, AUTO])
def test_experts_stay_sharded(axes):
    mesh = make_mesh((2, 2), axes)
    w = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("ep")))
    placement = np.array([3, 1, 0, 2, 7, 6, 5, 4])
    for permute in (permute_experts, jax.jit(permute_experts)):
        got = permute({"wo": w}, placement)["wo"]
        np.testing.assert_array_equal(got, np.asarray(w)[placement])
        assert axes is AUTO or got.sharding.is_equivalent_to(w.sharding, 2)


@pytest.mark.parametrize("ranks", [0, -2, 2.0])
def test_ranks_are_counted(ranks):
    with pytest.raises((ValueError, TypeError), match="place_experts: ranks must be"):
        place_experts(np.ones(8), ranks)


@pytest.mark.parametrize("placement", [[0, 0], [1, 2], [-1, 0]])
def test_what_is_no_permutation_is_refused(placement):
    with pytest.raises(ValueError, match="each of 0 to 1 once"):
        permute_experts({"wo": jnp.ones((2, 3, 4))}, np.array(placement))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_gains_nothing_stays(ranks):
    np.testing.assert_array_equal(place_experts(np.ones(8), ranks), np.arange(8))
    np.testing.assert_array_equal(place_experts(np.zeros(8), ranks), np.arange(8))


def test_one_expert():
    np.testing.assert_array_equal(place_experts(np.ones(1), 1), [0])
    np.testing.assert_array_equal(place_experts(np.ones(1), 1, num_groups=1), [0])


@pytest.mark.parametrize("ranks, groups", [(2, 4), (4, 4), (4, 2), (8, 2)])
def test_groups_stay_groups(ranks, groups):
    loads = np.random.default_rng(0).permutation(2.0 ** np.arange(8))
    placement = place_experts(loads, ranks, num_groups=groups)
    assert largest(loads[placement], ranks) <= largest(loads, ranks)
    size = 8 // groups
    for members in placement.reshape(groups, size) // size:
        assert len(set(members)) == 1


def test_each_group_is_balanced_over_its_own_ranks():
    loads = np.array([8, 7, 1, 1, 2, 2, 9, 8])
    placement = place_experts(loads, 4, num_groups=2)
    assert sorted(placement[:4]) == [0, 1, 2, 3] and sorted(placement[4:]) == [4, 5, 6, 7]
    assert largest(loads, 4) == 17 and largest(loads[placement], 4) == 11


def test_loads_of_any_kind():
    want = place_experts(ZIPF, 2)
    assert list(want) != list(range(8))
    np.testing.assert_array_equal(place_experts(list(ZIPF), 2), want)
    np.testing.assert_array_equal(place_experts(jnp.asarray(840 * ZIPF, jnp.int32), 2), want)


@pytest.mark.parametrize(
    "loads, ranks, groups, words",
    [
        (np.ones(8), 3, None, "8 experts, ranks=3"),
        (np.ones(8), 16, None, "8 experts, ranks=16"),
        (np.ones(8), 1, 3, "8 experts, ranks=1, num_groups=3"),
        (np.ones(12), 6, 4, "ranks=6, num_groups=4"),
        (np.ones(0), 1, None, "got 0 experts, ranks=1"),
        (np.ones((2, 4)), 2, None, r"\[E\] finite"),
        (np.array([1, np.nan]), 2, None, "nan"),
        (np.array([1, -1]), 2, None, "at least 0"),
    ],
)
def test_errors_of_loads(loads, ranks, groups, words):
    with pytest.raises(ValueError, match=words):
        place_experts(loads, ranks, num_groups=groups)


def test_the_block_computes_the_same():
    """Bit for bit on a mesh: outputs, gradients of tokens, and those of parameters in the new numbers."""
    config = make_config(use_bias=True, score_function="sigmoid", use_expert_bias=True)
    data = make_data(config, (8, 3, 16))
    mesh = make_mesh((2, 2), EXPLICIT)
    params, x, dy = place(data, config, mesh)
    bias = jnp.linspace(-1, 1, 8)

    @jax.jit
    def step(params, bias, x, dy):
        def loss(params, x):
            out = moe(params, x, config, expert_bias=bias)
            return jnp.sum(out.y * dy) + out.aux_loss + out.z_loss, out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (d_params, d_x), out = step(params, bias, x, dy)
    placement = place_experts(out.tokens_per_expert, 2)
    assert list(placement) != list(range(8))
    tree = permute_experts({"params": params, "expert_bias": bias}, placement)
    for name, w in tree["params"].items():
        assert w.sharding == params[name].sharding
    (d_placed, d_x_again), again = step(tree["params"], tree["expert_bias"], x, dy)
    counts = np.asarray(out.tokens_per_expert)[placement]
    np.testing.assert_array_equal(again.tokens_per_expert, counts)
    assert largest(counts, 2) < largest(out.tokens_per_expert, 2)
    np.testing.assert_array_equal(placement[again.topk_idx], out.topk_idx)
    back = permute_experts(d_placed, np.argsort(placement))
    # Sums over experts (the gate's and the tokens' gradients) are in another order.
    np.testing.assert_array_equal(again.y, out.y)
    np.testing.assert_allclose(d_x_again, d_x, rtol=1e-5, atol=1e-5)
    for name, want in d_params.items():
        np.testing.assert_allclose(back[name], want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_null_experts_stay():
    """They follow the others in the router's parameters alone."""
    placement = np.array([2, 0, 1], np.int16)
    columns = np.arange(10).reshape(2, 5)
    moved = permute_experts({"gate_kernel": columns, "gate_bias": columns[0]}, placement)
    np.testing.assert_array_equal(moved["gate_kernel"], columns[:, [2, 0, 1, 3, 4]])
    np.testing.assert_array_equal(moved["gate_bias"], [2, 0, 1, 3, 4])
    with pytest.raises(ValueError, match=r"wo must have E = 3 in dimension 0; got wo.shape=\(5, 1"):
        permute_experts({"wo": np.zeros((5, 1, 1))}, placement)
    with pytest.raises(ValueError, match="gate_kernel must have E = 3 in dimension 1"):
        permute_experts({"gate_kernel": columns[:, :2]}, placement)


def test_every_tree_of_a_block():
    """Split and merged parameters, moments around them, delayed scaling's state; other leaves are the same objects."""
    biases = dict(use_bias=True, use_gate_bias=True)
    config = make_config(shared_expert_dim=8, recipe=DelayedScaling(amax_history_len=8), **biases)
    params = jax.tree.map(jnp.asarray, make_data(config).params)
    state = init_quant_state(config)
    number = jnp.arange(8.0)
    scales = dataclasses.replace(state["wi"].weight, multiplier=number)
    state = state | {"wi": dataclasses.replace(state["wi"], weight=scales)}
    tree = {"mu": params, "split": split_wi(params), "state": state, "count": jnp.int32(3)}
    placement = np.array([3, 1, 0, 2, 7, 6, 5, 4])
    got = permute_experts(tree, placement)
    for before, after in ((params, got["mu"]), (tree["split"], got["split"])):
        for name, w in before.items():
            dim = 1 if name == "gate_kernel" else 0
            want = w if name.startswith("shared") else np.take(np.asarray(w), placement, axis=dim)
            np.testing.assert_array_equal(after[name], want, err_msg=name)
            assert not name.startswith("shared") or after[name] is w
    np.testing.assert_array_equal(got["state"]["wi"].weight.multiplier, placement)
    assert got["state"]["wi"].x is state["wi"].x and got["count"] is tree["count"]
    stacked = jax.vmap(permute_experts)({"wo": jnp.stack(2 * [number])}, jnp.stack(2 * [placement]))
    np.testing.assert_array_equal(stacked["wo"], 2 * [placement])


@pytest.mark.parametrize(
    "tree, placement, words",
    [
        ({"wi": np.ones((4, 2))}, np.arange(8), r"wi must have E = 8 in dimension 0.*\(4, 2\)"),
        ({"gate_kernel": np.ones(8)}, np.arange(8), r"gate_kernel.*dimension 1"),
        ({"wi": np.ones(8)}, np.ones(8), "float32"),
        ({"wi": np.ones(8)}, np.arange(8).reshape(2, 4), r"int32\[2, 4\]"),
    ],
)
def test_errors_of_trees(tree, placement, words):
    with pytest.raises(ValueError, match=words):
        permute_experts(jax.tree.map(jnp.asarray, tree), placement)
