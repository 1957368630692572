"""The spec algebra: properties over random meshes, shapes and specs, and its errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
