"""Ids of experts travel with a checksum of the exchange: ranks that prepared another one exchange nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from expertmesh.ep.route import make_route

T, K, E = 3, 2, 8
AXIS = ("ep",)


@partial(jax.jit, static_argnames="ranks")
def routes(ids, checksums, *, ranks=4):
    """Of each rank: its slots [T, K], the sources of its rows [C], dropped choices and the stranger."""
    mesh = jax.make_mesh((ranks,), AXIS, axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])

    def one(ids_TK, checksum):
        options = dict(num_experts=E, capacity=None, alignment=1, axis=AXIS, two_level=False)
        route, plan, stranger = make_route(ids_TK[0], **options, checksum=checksum[0])
        found = route.slot_TK, route.source_C, plan.num_dropped, stranger
        return jax.tree.map(lambda x: x[None], found)

    spec = PartitionSpec(AXIS)
    return jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)(ids, checksums)


def ids_of(ranks):
    """Each expert, the last and none among the first ids of ranks."""
    ids = np.random.default_rng(0).integers(0, E, (ranks, T, K)).astype(np.int32)
    ids[0, 0, 0], ids[-1, 0, 0], ids[-1, 1, 1] = E - 1, -1, E - 1
    return jnp.asarray(ids)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_checksum_changes_nothing(ranks):
    ids = ids_of(ranks)
    plain, found = (
        routes(ids, jnp.full(ranks, number, jnp.int32), ranks=ranks) for number in (0, 2**20 + 77)
    )
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)
    slots, _, dropped, stranger = found
    np.testing.assert_array_equal(slots < 0, ids < 0)
    assert not dropped.any() and (stranger == -1).all() and stranger.dtype == jnp.int32


@pytest.mark.parametrize(
    "checksums, strangers",
    [
        ([50, 50, 90, 50], [2, 2, 0, 2]),
        ([90, 50, 50, 50], [1, 0, 0, 0]),
        ([50, 50, 50, 50 + E + 1], [3, 3, 3, 0]),  # the least difference that any id shows
        ([50 + E + 1, 50, 50, 50], [1, 0, 0, 0]),
        ([50, 90], [1, 0]),
    ],
)
def test_ranks_that_differ_exchange_nothing(checksums, strangers):
    """Each names the first whose checksum is another than its own."""
    ranks = len(checksums)
    given = ids_of(ranks), jnp.asarray(checksums, jnp.int32)
    slots, source, dropped, stranger = routes(*given, ranks=ranks)
    np.testing.assert_array_equal(stranger, strangers)
    assert (slots == -1).all() and (source < 0).all()
    np.testing.assert_array_equal(dropped, [T * K] * ranks)


def test_no_tokens_have_no_stranger():
    _, _, dropped, stranger = routes(ids_of(4)[:, :0], jnp.arange(4, dtype=jnp.int32))
    assert not dropped.any() and (stranger == -1).all()
