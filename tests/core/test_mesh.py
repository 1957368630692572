"""Mesh roles: fields, foreign objects, scope, and the jit key."""

import types

import jax
import jax.numpy as jnp
import pytest

from expertmesh.core import MeshResource, current_resource, differentiable, global_shard_guard


def test_roles_of_dimensions():
    resource = MeshResource(
        dp_resource="dp", fsdp_resource=("f0", "f1"), ep_resource="ep", tp_resource="tp"
    )
    assert resource.axes("tokens") == ("dp", "f0", "f1", "ep"), "ep is innermost"
    assert resource.entry("experts") == "ep"
    assert resource.entry("fsdp") == ("f0", "f1")
    assert resource.entry("sequence") is None
    with pytest.raises(ValueError, match="role must be one of .*tokens.*; got role='rows'"):
        resource.axes("rows")


def test_an_axis_plays_one_role():
    with pytest.raises(ValueError, match="axis 'x' in dp_resource and ep_resource"):
        MeshResource(dp_resource="x", ep_resource=("y", "x"))
    with pytest.raises(ValueError, match="axis 'x' in fsdp_resource and fsdp_resource"):
        MeshResource(fsdp_resource=("x", "x"))
    with pytest.raises(TypeError, match="ep_resource=3"):
        MeshResource(ep_resource=3)
    with pytest.raises(TypeError):
        MeshResource("dp")


def test_foreign_resource_objects_are_accepted():
    theirs = types.SimpleNamespace(dp_resource=None, fsdp_resource="fsdp", tp_resource=None)
    with global_shard_guard(theirs) as ours:
        assert ours == MeshResource(fsdp_resource="fsdp") == current_resource()
    with pytest.raises(TypeError, match="dp_resource"):
        MeshResource.of("fsdp")


def test_the_guard_nests_and_restores():
    outer, inner = MeshResource(dp_resource="a"), MeshResource(dp_resource="b")
    assert current_resource() is None
    with global_shard_guard(outer):
        with pytest.raises(RuntimeError), global_shard_guard(inner):
            assert current_resource() == inner
            raise RuntimeError
        assert current_resource() == outer
        with global_shard_guard(None):
            assert current_resource() is None
    assert current_resource() is None


def test_the_resource_is_part_of_the_jit_key():
    seen = []

    @jax.jit
    def f(x):
        seen.append(current_resource())
        return x + 1

    for resource in (None, MeshResource(dp_resource="a"), None, MeshResource(dp_resource="a")):
        with global_shard_guard(resource):
            f(jnp.ones(2))
    assert seen == [None, MeshResource(dp_resource="a")]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_a_backward_runs_under_the_resource_of_its_forward(wrap):
    """Whichever is in context when it is traced, and also where the forward is computed again."""
    seen = []

    def forward(x):
        seen.append(("forward", current_resource()))
        return 2 * x, None

    def backward(_, cotangent):
        seen.append(("backward", current_resource()))
        return (2 * cotangent,)

    double, inner = differentiable(forward, backward), MeshResource(dp_resource="a")

    @wrap
    def guarded(x):
        with global_shard_guard(inner):
            return double(x)

    _, pull = jax.vjp(guarded, jnp.ones(2))
    with global_shard_guard(MeshResource(dp_resource="b")):
        pull(jnp.ones(2))
    assert {resource for _, resource in seen} == {inner}
    assert {rule for rule, _ in seen} == {"forward", "backward"}
