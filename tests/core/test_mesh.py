"""Mesh roles: fields, foreign objects, scope, and the jit key."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, current_resource, differentiable, global_shard_guard
from expertmesh.core.mesh import cast_sharded, filter_roles


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


def test_participants_over_other_axes():
    resource = MeshResource(dp_resource="dp", ep_resource="ep", cp_resource="cp")
    assert resource.axes("participants") == ("dp", "ep")
    with global_shard_guard(resource.with_participants(("dp", "cp", "ep"))) as changed:
        assert changed.axes("participants") == ("dp", "cp", "ep")
    for role in ("tokens", "experts", "sequence", "."):
        assert changed.axes(role) == resource.axes(role)
    assert changed.all_axes() == resource.all_axes()


def test_an_axis_plays_one_role():
    with pytest.raises(ValueError, match="axis 'x' in dp_resource and ep_resource"):
        MeshResource(dp_resource="x", ep_resource=("y", "x"))
    with pytest.raises(ValueError, match="axis 'x' in fsdp_resource and fsdp_resource"):
        MeshResource(fsdp_resource=("x", "x"))
    with pytest.raises(TypeError, match="ep_resource=3"):
        MeshResource(ep_resource=3)
    with pytest.raises(TypeError, match="ep_resource=\\('a', 3\\)"):
        MeshResource(ep_resource=("a", 3))
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


def test_axes_of_roles():
    spec = P(("dp", "tp"), "ep")
    assert filter_roles(spec, "tp", "experts") == P(None, None), "no resource, no roles"
    with global_shard_guard(MeshResource(dp_resource="dp", ep_resource="ep", tp_resource="tp")):
        assert filter_roles(spec, "tp") == P("tp", None)
        assert filter_roles(spec, "tp", "experts") == P("tp", "ep")


def weight(kind):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType[kind],))
    return jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("a")))


@pytest.mark.parametrize(
    "kind, dtype, spec, fsdp, constrained",
    [
        ("Auto", "bfloat16", None, "a", True),
        ("Auto", "bfloat16", P("a"), None, True),
        ("Auto", "bfloat16", P(), "a", False),
        ("Auto", "bfloat16", None, None, False),
        ("Auto", "float32", None, "a", False),
        ("Explicit", "bfloat16", P("a"), "a", False),
    ],
)
def test_a_narrow_copy_lies_where_its_weight_does(kind, dtype, spec, fsdp, constrained):
    """Asked for over Auto axes alone, where the copy is narrower; over Explicit ones its type says so."""
    with global_shard_guard(MeshResource(fsdp_resource=fsdp)):
        program = jax.make_jaxpr(lambda x: cast_sharded(x, dtype, spec, ("fsdp",)))(weight(kind))
    assert [v.aval.dtype for v in program.jaxpr.outvars] == [dtype]
    layouts = [e for e in program.eqns if e.primitive.name != "convert_element_type"]
    assert [e.primitive.name for e in layouts] == ["sharding_constraint"] * constrained
    assert all(e.params["sharding"].spec == P("a", None) for e in layouts)


def test_a_narrow_copy_without_a_resource_is_a_cast():
    x = weight("Auto")
    program = jax.make_jaxpr(lambda x: cast_sharded(x, "bfloat16", None, ("fsdp",)))(x)
    assert [e.primitive.name for e in program.eqns] == ["convert_element_type"]
