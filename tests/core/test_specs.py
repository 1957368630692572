"""The spec algebra: properties over random meshes, shapes and specs, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import specs

MESH = {"dp": 2, "fsdp": 3, "ep": 4, "tp": 1}


@st.composite
def spec(draw, max_dims=4):
    """A legal spec: each axis at most once."""
    axes = draw(st.permutations(list(MESH)))
    cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=0, max_size=max_dims)))
    parts = [axes[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    return P(*(specs.make_entry(part) for part in parts))


entries = st.one_of(
    st.none(),
    st.sampled_from(list(MESH)),
    st.lists(st.sampled_from(list(MESH)), unique=True, min_size=2).map(tuple),
)


@given(spec(), st.sets(st.sampled_from(list(MESH))))
def test_strip_and_filter_are_idempotent_and_complementary(s, axes):
    stripped, kept = specs.strip_axes(s, axes), specs.filter_axes(s, axes)
    assert specs.strip_axes(stripped, axes) == stripped
    assert specs.filter_axes(kept, axes) == kept
    assert set(specs.spec_axes(stripped)).isdisjoint(axes)
    assert set(specs.spec_axes(kept)) <= axes
    assert set(specs.spec_axes(stripped)) | set(specs.spec_axes(kept)) == set(specs.spec_axes(s))


@given(entries, entries)
def test_merge_keeps_order_and_never_repeats(a, b):
    merged = specs.entry_axes(specs.merge_dim(a, b))
    assert len(set(merged)) == len(merged)
    assert merged[: len(specs.entry_axes(a))] == specs.entry_axes(a)
    assert set(merged) == set(specs.entry_axes(a)) | set(specs.entry_axes(b))
    assert specs.merge_dim(a, a) == specs.make_entry(specs.entry_axes(a))


@given(entries, entries)
def test_common_axes(a, b):
    common = specs.common_axes(a, b)
    assert set(common) == set(specs.entry_axes(a)) & set(specs.entry_axes(b))
    assert common == tuple(axis for axis in specs.entry_axes(a) if axis in common)


@given(spec(), st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_local_times_shards_is_global(s, factors):
    s = specs.pad_spec(s, 4)
    shards = [specs.axis_size(MESH, entry) for entry in s]
    shape = [f * n for f, n in zip(factors, shards, strict=True)]
    local = specs.local_shape(shape, s, MESH)
    assert list(np.multiply(local, shards)) == shape


@given(
    st.lists(st.sampled_from(list(MESH)), unique=True),
    st.lists(st.integers(0, 48), min_size=1, max_size=3),
)
def test_dividing_axes_is_the_longest_prefix(axes, sizes):
    kept = specs.dividing_axes(axes, sizes, MESH)
    assert tuple(axes[: len(kept)]) == kept
    assert all(size % specs.axis_size(MESH, kept) == 0 for size in sizes)
    longer = tuple(axes[: len(kept) + 1])
    if len(longer) > len(kept):
        assert any(size % specs.axis_size(MESH, longer) for size in sizes)


def test_entry_forms():
    assert specs.make_entry([]) is None
    assert specs.make_entry(["dp"]) == "dp"
    assert specs.entry_axes(("dp", "ep")) == ("dp", "ep")
    assert specs.pad_spec(P("dp"), 3) == P("dp", None, None)


def test_local_shape_never_floors():
    with pytest.raises(ValueError, match=r"10.*4 shards over 'ep'"):
        specs.local_shape((10, 2), P("ep"), MESH)


def test_unknown_axis_names_the_mesh():
    with pytest.raises(ValueError, match=r"axis='expert'.*'dp', 'fsdp', 'ep', 'tp'"):
        specs.axis_size(MESH, "expert")


def test_too_many_entries():
    with pytest.raises(ValueError, match="ndim=1"):
        specs.pad_spec(P("dp", "ep"), 1)


@pytest.mark.parametrize(
    "typed, other, want",
    [
        (P(), P(("a", "x")), P("a", None)),
        (P("e"), P(), P("e", None)),
        (P("e"), P("e"), P("e", None)),
        (P("e"), P("a", "b"), P(("e", "a"), "b")),
        (P("e"), P(("a", "e")), P(("a", "e"), None)),
        (P(("e", "f")), P(("f", "a", "e")), P(("f", "a", "e"), None)),
        (P(("e", "f")), P(("f", "e")), P(("f", "e"), None)),
        (P(("e", "f")), P(("f", "a")), P(("e", "f", "a"), None)),
    ],
)
def test_merge_known(typed, other, want):
    """Over Explicit e and f the type is right, over Auto a and b the other; x is in neither."""
    assert specs.merge_known(typed, other, {"a", "b"}, 2) == want


def make_mesh(**kinds):
    kinds = {axis: AxisType[kind] for axis, kind in kinds.items()}
    return jax.make_mesh((2,) * len(kinds), tuple(kinds), axis_types=tuple(kinds.values()))


def test_the_mesh_of_an_array_comes_before_the_one_in_context():
    mine, other = make_mesh(a="Explicit"), make_mesh(b="Explicit")
    x = jax.device_put(jnp.ones(4), NamedSharding(mine, P("a")))
    assert specs.mesh_of(np.ones(4)).empty
    with jax.set_mesh(other):
        assert specs.mesh_of(np.ones(4)).axis_names == ("b",)
        assert specs.mesh_of(x).axis_names == ("a",)
    assert specs.axes_of_type(make_mesh(a="Auto", b="Explicit").abstract_mesh, AxisType.Auto) == (
        "a",
    )


@pytest.mark.parametrize(
    "kinds, spec",
    [
        (dict(a="Explicit", b="Explicit"), P("a", "b")),
        (dict(a="Auto", b="Auto"), P("a", "b")),
        (dict(a="Explicit", b="Auto"), P("a", "b")),
        (dict(a="Explicit", b="Auto"), P("b", "a")),
        (dict(a="Explicit", b="Auto"), P(("a", "b"))),
    ],
)
def test_constrain_asks_for_the_layout(kinds, spec):
    mesh = make_mesh(**kinds)
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P()))
    out = jax.jit(lambda x: specs.constrain(x, spec))(x)
    np.testing.assert_array_equal(out, x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_constrain_asks_for_no_layout_over_auto_axes_that_the_spec_lacks():
    """Else a replicated array would be gathered where the compiler had it sharded."""
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(make_mesh(a="Auto"), P("a")))
    assert not jax.make_jaxpr(lambda x: specs.constrain(x, P()))(x).eqns
    assert len(jax.make_jaxpr(lambda x: specs.constrain(x, P("a")))(x).eqns) == 1


def test_constrain_of_what_has_no_layout_to_ask_for():
    x = jnp.ones((4, 4))
    assert specs.constrain(x, P("anything", ("a", "b"))) is x
    shard = jax.shard_map(
        lambda x: specs.constrain(x, P("a")),
        mesh=make_mesh(a="Auto"),
        in_specs=P("a"),
        out_specs=P("a"),
    )
    np.testing.assert_array_equal(shard(x), x)
    with pytest.raises(ValueError, match="ndim=2"):
        specs.constrain(x, P(None, None, "a"))
    placed = jax.device_put(x, NamedSharding(make_mesh(a="Explicit"), P()))
    with pytest.raises(ValueError, match="axis='b'"):
        specs.constrain(placed, P("b"))


def test_fewer_entries_than_dimensions():
    assert specs.local_shape((8, 5), P("ep"), MESH) == (2, 5)
