"""Overflow: exact counts for the whole mesh, and an error outside jit where the config asks for it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_case import Case
from ep.exchange_oracle import routing
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.ep import EpConfig, Overflow, find_overflow, prepare, raise_overflow

CASE = Case(mesh=(("dp", 2), ("ep", 4)), spec=(("dp", "ep"),), A=4, C=12)
CONFIG = dataclasses.replace(CASE.config, overflow="error")
ROLES = MeshResource(dp_resource="dp", ep_resource="ep")


def found(topk, config=CONFIG, kind=AxisType.Explicit):
    """The summary of one exchange, as a jitted step returns it."""
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    placed = jax.device_put(topk, NamedSharding(mesh, PartitionSpec(("dp", "ep"))))
    with global_shard_guard(ROLES if kind == AxisType.Auto else None):
        return jax.jit(lambda i: find_overflow(prepare(i, config)))(placed)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("route", ["holes", "one", "none"])
def test_the_summary_is_global_and_exact(kind, route):
    topk = routing(route, 40, 3, 8)
    oracle, out = CASE.oracle(topk), found(topk, kind=kind)
    assert int(out.num_dropped) == sum(oracle.dropped)
    assert int(out.demand) == max(oracle.total)
    assert int(out.participant) == np.argmax(oracle.total)
    assert (out.capacity, out.ep_size, out.policy) == (12, 4, "error")
    assert bool(out.any) == (sum(oracle.dropped) > 0)
    # Every process can read it.
    assert all(x.is_fully_replicated for x in jax.tree.leaves(out))


def test_error_names_demand_capacity_and_rank():
    topk = np.full((40, 3), -1, np.int32)
    topk[:20, 0] = 5  # group 0: 20 rows for rank 2
    topk[20:, 0] = 6  # group 1: 22 rows, in two zones of 24 and 4, for rank 3
    topk[20:22, 1] = 7
    with pytest.raises(RuntimeError) as error:
        raise_overflow(found(topk))
    for words in ("demand=24", "capacity=12", "rank 3 of EP group 1", "18 choices dropped in all"):
        assert words in str(error.value)
    # The same numbers, and no error, where drops are accepted.
    accepted = found(topk, dataclasses.replace(CONFIG, overflow="drop"))
    assert int(accepted.num_dropped) == 18
    raise_overflow(accepted)


def test_without_drops_nothing_is_raised():
    topk = np.full((40, 3), -1, np.int32)
    raise_overflow(found(topk))
    topk[0] = 0, 0, 1
    topk[:8, 2] = 1  # two zones, padded to 4 and 8 rows: full
    assert int(found(topk).demand) == 12
    raise_overflow(found(topk))


def test_it_is_called_outside_jit():
    topk = jnp.zeros((40, 3), jnp.int32)
    with pytest.raises(RuntimeError, match="outside jit.*return it from the jitted function"):
        config = EpConfig(num_experts=8)
        jax.jit(lambda i: raise_overflow(find_overflow(prepare(i, config))))(topk)


@pytest.mark.parametrize("transform", ["scan", "vmap"])
def test_layers(transform):
    """The worst of several calls is named, and drops of all of them are counted."""
    config = EpConfig(num_experts=8, capacity=60, overflow="error")
    one = np.asarray(routing("uniform", 40, 1, 8))
    topk = np.stack([one, np.tile(one, 2)[:, :1], one])
    topk = np.concatenate([topk, np.where(np.arange(40) < 25, topk[..., 0], -1)[..., None]], axis=2)

    def step(i):
        return find_overflow(prepare(i, config))

    if transform == "vmap":
        out = jax.jit(jax.vmap(step))(topk)
    else:
        out = jax.jit(lambda xs: jax.lax.scan(lambda c, i: (c, step(i)), 0, xs)[1])(topk)
    assert out.num_dropped.tolist() == [5, 5, 5] and out.demand.tolist() == [65] * 3
    quiet = dataclasses.replace(out, num_dropped=out.num_dropped * jnp.asarray([0, 1, 0]))
    with pytest.raises(RuntimeError, match=r"demand=65.*call \(1,\) of \(3,\), 5 choices"):
        raise_overflow(quiet)


def test_in_your_own_shard_map_it_is_about_the_shard():
    topk = routing("holes", 40, 3, 8)
    oracle, mesh = CASE.oracle(topk), jax.make_mesh((2, 4), ("dp", "ep"))
    spec = PartitionSpec(("dp", "ep"))

    def step(i):
        out = find_overflow(prepare(i, CONFIG))
        return out.num_dropped[None], out.demand[None]

    local = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    num_dropped, demand = jax.jit(local)(jax.device_put(topk, NamedSharding(mesh, spec)))
    assert num_dropped.tolist() == oracle.dropped and demand.tolist() == oracle.total


def test_values_are_not_read_where_nothing_can_be_raised():
    class Unreadable:
        def __array__(self, *args, **kwargs):
            raise AssertionError("read")

    value = Unreadable()
    raise_overflow(
        Overflow(
            num_dropped=value,
            demand=value,
            participant=value,
            stranger=value,
            capacity=1,
            ep_size=1,
            policy="drop",
        )
    )


def test_a_process_with_another_exchange_is_an_error_under_any_policy(monkeypatch):
    """As in the second of two groups of four; what processes do is in test_processes.py."""
    stranger = jnp.asarray([-1] * 4 + [2, 2, 0, 2], jnp.int32)
    handle = prepare(jnp.zeros((40, 3), jnp.int32), EpConfig(num_experts=8))
    handle = dataclasses.replace(
        handle, ep_size=4, stranger=stranger, total_recv=stranger, num_dropped=stranger * 0
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    out = find_overflow(handle)
    assert (out.policy, int(out.stranger)) == ("drop", 6)
    with pytest.raises(RuntimeError, match="same exchange; got another at rank 2 of EP group 1, "):
        raise_overflow(out)
    raise_overflow(found(np.full((40, 3), -1, np.int32)))  # nobody differs


@pytest.mark.parametrize("capacity, refused", [(4, True), (8, False), (None, False)])
def test_capacity_floor(capacity, refused):
    """A participant of 5 tokens, a capacity that is a multiple of 4."""
    make = partial(found, routing("none", 40, 3, 8))
    if refused:
        with pytest.raises(ValueError, match="capacity=4, tokens=5"):
            make(dataclasses.replace(CONFIG, capacity=capacity))
    else:
        make(dataclasses.replace(CONFIG, capacity=capacity))
    make(dataclasses.replace(CONFIG, capacity=capacity, overflow="drop"))
