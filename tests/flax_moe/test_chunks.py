"""Tokens in parts: which token is in which, the dimension that is split, layouts that stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, global_shard_guard
from expertmesh.flax_moe.chunks import merge_chunks, split_chunks


@pytest.mark.parametrize("shape, dim", [((8, 3, 5), 0), ((3, 8, 5), 1), ((3, 5, 4, 2), 2)])
def test_parts_by_the_formula(shape, dim):
    """part[j][..., i, ...] = x[..., 4 i + j, ...] of every operand, along the first dimension that 4 divides."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    others = x[..., :1] + 0.5
    (parts, more), found = split_chunks("moe", (jnp.asarray(x), jnp.asarray(others)), 4)
    assert found == dim
    for j in range(4):
        np.testing.assert_array_equal(parts[j], x.take(range(j, shape[dim], 4), dim))
        np.testing.assert_array_equal(more[j], others.take(range(j, shape[dim], 4), dim))
    np.testing.assert_array_equal(merge_chunks(parts, dim), x)


def mesh_of(a, b, sizes=(2, 2)):
    return jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType[a], AxisType[b]))


@pytest.mark.parametrize(
    "kinds, spec, resource, tokens, dim",
    [
        (("Explicit", "Explicit"), P("a"), None, (4, 8), 0),
        (("Explicit", "Explicit"), P(("a", "b")), None, (4, 8), 1),  # one token a shard
        (("Explicit", "Explicit"), P(None, "b"), None, (2, 8), 0),
        (("Explicit", "Explicit"), P("a", "b"), None, (2, 4), 1),
        (("Explicit", "Explicit"), P("a"), None, (2, 3, 4), 2),
        (("Explicit", "Explicit", (2, 1)), P(("a", "b")), None, (4, 2), 0),  # b divides anything
        (("Explicit", "Explicit", (1, 2)), P(("a", "b")), None, (4, 2), 0),
        (("Auto", "Auto"), P(), MeshResource(dp_resource="a"), (4, 2), 0),
        (("Auto", "Auto"), P(), MeshResource(dp_resource=("a", "b")), (4, 2), 1),
        (("Auto", "Auto"), P(None, "b"), MeshResource(cp_resource="b"), (3, 4), 1),
        (("Auto", "Auto"), P("a", "b"), MeshResource(dp_resource="a", cp_resource="b"), (2, 4), 1),
        (("Auto", "Auto"), P(None, "b"), MeshResource(cp_resource="b"), (3, 2, 4), 2),
        (("Auto", "Auto"), P(), MeshResource(cp_resource="b"), (4,), 0),
        (("Auto", "Auto"), P(), None, (8, 4), 0),
        (("Auto", "Auto"), P(), None, (4, 8), 1),  # any of four devices may shard any dimension
    ],
)
def test_every_shard_has_as_many_tokens_of_each_part(kinds, spec, resource, tokens, dim):
    mesh = mesh_of(*kinds)
    x = jnp.arange(np.prod(tokens) * 2.0).reshape(*tokens, 2)
    placed = jax.device_put(x, NamedSharding(mesh, spec))

    @jax.jit
    def there_and_back(x):
        (parts,), found = split_chunks("moe", (x,), 2)
        assert found == dim
        return parts, merge_chunks(parts, found)

    with global_shard_guard(resource):
        parts, back = there_and_back(placed)
    np.testing.assert_array_equal(back, x)
    if kinds[0] == "Explicit":
        padded = (*spec, *(None,) * (x.ndim - len(spec)))
        assert parts.sharding.spec == P(None, *padded) and back.sharding.spec == P(*padded)


def test_inside_a_shard_map_the_tokens_are_a_shards():
    x = jnp.arange(16.0).reshape(8, 2)

    def local(x):
        (parts,), dim = split_chunks("moe", (x,), 2)
        return merge_chunks(parts, dim)

    for resource in (None, MeshResource(dp_resource=("a", "b"))):
        with global_shard_guard(resource):
            function = jax.shard_map(
                local, mesh=mesh_of("Auto", "Auto"), in_specs=P(("a", "b")), out_specs=P(("a", "b"))
            )
            np.testing.assert_array_equal(jax.jit(function)(x), x)


def test_parts_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"moe: num_chunks .* num_chunks=4, tokens \(6, 3\) over \[1, 1\]"
    ):
        split_chunks("moe", (jnp.ones((6, 3, 4)),), 4)
