"""bootstrap: an eager check of everything that can be wrong with an exchange, and never needed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.ep import EpConfig, bootstrap, dispatch, prepare

CONFIG = EpConfig(num_experts=8, axis="ep", alignment=4)


def tokens(shape=(8, 4, 6), spec=("dp", "ep"), dtype=jnp.bfloat16, kind=AxisType.Explicit):
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@covering("transport", ["auto", "ring", "all_to_all"], covers=["all_to_all"])
def test_what_it_finds(transport):
    config = dataclasses.replace(CONFIG, transport=transport)
    group = bootstrap(config, tokens(), top_k=2)
    assert dataclasses.asdict(group) == dict(
        ep_size=4,
        num_participants=8,
        tokens_per_rank=4,
        experts_per_rank=2,
        capacity=32,  # 16 tokens for each of 2 experts
        max_rows=40,  # 32 choices of one expert or of both, with padding
        transport="ring" if transport == "auto" else transport,
    )


def test_on_arrays_roles_and_one_device():
    with global_shard_guard(MeshResource(dp_resource="dp", ep_resource="ep")):
        config = EpConfig(num_experts=8, capacity=8)
        group = bootstrap(config, tokens((32, 6), (("dp", "ep"),), kind=AxisType.Auto), top_k=2)
    assert (group.ep_size, group.num_participants, group.capacity) == (4, 8, 8)
    group = bootstrap(EpConfig(num_experts=3), jnp.full((5, 2), jnp.nan), top_k=1)
    assert (group.ep_size, group.num_participants, group.transport) == (1, 1, "local")


def test_under_jit_it_says_how_to_call():
    with pytest.raises(RuntimeError, match="outside jit.*call bootstrap\\(config, jax.ShapeDtype"):
        jax.jit(lambda x: bootstrap(EpConfig(num_experts=3), x, top_k=1) and x)(jnp.ones((4, 2)))


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: bootstrap(CONFIG, tokens((6, 3, 6), ()), top_k=2), ValueError, "(6, 3), sharded"),
        (
            lambda: bootstrap(dataclasses.replace(CONFIG, num_experts=6), tokens(), top_k=2),
            ValueError,
            "num_experts=6, ep_size=4, axis='ep'",
        ),
        (
            lambda: bootstrap(dataclasses.replace(CONFIG, axis="model"), tokens(), top_k=2),
            ValueError,
            "axis='model', mesh axes=('dp', 'ep')",
        ),
        (
            lambda: bootstrap(dataclasses.replace(CONFIG, capacity=44), tokens(), top_k=2),
            ValueError,
            "capacity=44, max_rows=40",
        ),
        (
            lambda: bootstrap(
                EpConfig(num_experts=8, axis="ep", capacity=3, overflow="error"), tokens(), top_k=2
            ),
            ValueError,
            "capacity=3, tokens=4",
        ),
        (
            lambda: bootstrap(dataclasses.replace(CONFIG, transport="ragged"), tokens(), top_k=2),
            ValueError,
            "XLA:CPU",
        ),
        (lambda: bootstrap(CONFIG, tokens(dtype=jnp.complex64), top_k=2), TypeError, "complex64"),
        (lambda: bootstrap(CONFIG, tokens(), top_k=0), ValueError, "top_k=0"),
        (lambda: bootstrap(CONFIG, tokens(), top_k=True), TypeError, "top_k=True"),
        (lambda: bootstrap(CONFIG, tokens(), top_k=2.0), TypeError, "top_k=2.0"),
    ],
)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value)


def test_wrong_values_are_an_error(monkeypatch):
    """As from a link that delivers to the wrong peer."""

    all_to_all = jax.lax.all_to_all

    def turned(blocks, axis, *dims, tiled):
        size = jax.lax.axis_size(axis)
        return jnp.roll(all_to_all(blocks, axis, *dims, tiled=tiled), len(blocks) // size, axis=0)

    monkeypatch.setattr(jax.lax, "all_to_all", turned)
    config = EpConfig(num_experts=8, axis="ep", alignment=2, transport="all_to_all")
    with pytest.raises(RuntimeError, match="transport='all_to_all', ep_size=4"):
        bootstrap(config, tokens((8, 12, 5)), top_k=3)  # sizes that no other test compiles


def test_nothing_depends_on_it():
    """Groups of other sizes may be checked between the steps of one; no step needs a check."""
    mesh = jax.make_mesh((8,), ("ep",))
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = jax.device_put(np.arange(32, dtype=np.int32).reshape(16, 2) % 8, sharding)
    x = jax.device_put(np.arange(48, dtype=np.float32).reshape(16, 3), sharding)
    step = jax.jit(lambda i, x: dispatch(prepare(i, EpConfig(num_experts=8, axis="ep")), x))
    before = step(idx, x)
    bootstrap(CONFIG, tokens(), top_k=2)
    bootstrap(CONFIG, tokens(), top_k=2)
    np.testing.assert_array_equal(step(idx, x), before)
