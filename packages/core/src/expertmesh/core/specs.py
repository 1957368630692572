"""Algebra of PartitionSpecs. Pure functions on values; no devices.

An *entry* is one dimension's part of a spec: None, a mesh axis name, or a tuple of names (major first).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Entry = None | str | tuple[str, ...]
Spec = PartitionSpec | Sequence[Entry]


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The axis names of one entry, major first."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def make_entry(axes: Iterable[str]) -> Entry:
    """The entry that names `axes`, major first: None for none, a bare name for one."""
    axes = tuple(axes)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """All axis names of a spec in order of appearance."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def map_axes(spec: Spec, keep: Callable[[str], bool]) -> PartitionSpec:
    """The spec with only the axes for which `keep(axis)` holds."""
    return PartitionSpec(*(make_entry(filter(keep, entry_axes(entry))) for entry in spec))


def strip_axes(spec: Spec, axes: Collection[str]) -> PartitionSpec:
    """The spec without `axes`."""
    return map_axes(spec, lambda axis: axis not in axes)


def is_axis(value: object) -> bool:
    """Whether it is an axis's name, or a tuple of names, each once."""
    names = value if isinstance(value, tuple) else (value,)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def filter_axes(spec: Spec, allowed: Collection[str]) -> PartitionSpec:
    """The spec with only the axes in `allowed`."""
    return map_axes(spec, lambda axis: axis in allowed)


def merge_dim(a: Entry, b: Entry) -> Entry:
    """All axes of `a`, then those of `b` that `a` lacks."""
    first = entry_axes(a)
    return make_entry(first + tuple(axis for axis in entry_axes(b) if axis not in first))


def merge_known(typed: Spec, other: Spec, auto: Collection[str], ndim: int) -> PartitionSpec:
    """What a type says over Explicit axes and `other` over those in `auto`, one entry per dimension.

    Where `other` has all axes of a dimension that the type has, they are in its order.
    """
    entries = []
    for known, entry in zip(pad_spec(typed, ndim), pad_spec(other, ndim), strict=True):
        axes = [a for a in entry_axes(entry) if a in auto or a in entry_axes(known)]
        whole = set(entry_axes(known)) <= set(axes)
        entries.append(make_entry(axes) if whole else merge_dim(known, make_entry(axes)))
    return PartitionSpec(*entries)


def common_axes(a: Entry, b: Entry) -> tuple[str, ...]:
    """Axes in both entries, in the order of `a`."""
    return tuple(axis for axis in entry_axes(a) if axis in entry_axes(b))


def axis_size(mesh_shape: Mapping[str, int], entry: Entry) -> int:
    """Number of shards that `entry` cuts a dimension into.

    Raises:
      ValueError: an axis is not in the mesh.
    """
    for axis in entry_axes(entry):
        if axis not in mesh_shape:
            raise ValueError(
                f"axis_size: a spec must name axes of the mesh; got axis={axis!r}, "
                f"mesh axes={tuple(mesh_shape)}; rename the axis or build the mesh with it"
            )
    return prod(mesh_shape[axis] for axis in entry_axes(entry))


def pad_spec(spec: Spec, ndim: int) -> PartitionSpec:
    """The spec with one entry per dimension.

    Raises:
      ValueError: the spec has more entries than `ndim`.
    """
    entries = tuple(spec)
    if len(entries) > ndim:
        raise ValueError(
            f"pad_spec: a spec must have at most one entry per dimension; got spec={entries}, ndim={ndim}; "
            "drop the trailing entries"
        )
    return PartitionSpec(*entries, *[None] * (ndim - len(entries)))


def local_shape(shape: Sequence[int], spec: Spec, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one shard.

    Raises:
      ValueError: a dimension is not divisible by its number of shards (never floors), or an axis is unknown.
    """
    local = []
    for dim, (size, entry) in enumerate(zip(shape, pad_spec(spec, len(shape)), strict=True)):
        shards = axis_size(mesh_shape, entry)
        if size % shards:
            raise ValueError(
                f"local_shape: a dimension must be divisible by its number of shards; got shape={tuple(shape)}, "
                f"dim={dim} of size {size}, {shards} shards over {entry!r}; pad the dimension or drop the axis"
            )
        local.append(size // shards)
    return tuple(local)


def dividing_axes(
    axes: Iterable[str], sizes: Iterable[int], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The longest prefix of `axes` whose number of shards divides every size."""
    sizes, kept, shards = tuple(sizes), [], 1
    for axis in axes:
        shards *= mesh_shape[axis]
        if any(size % shards for size in sizes):
            break
        kept.append(axis)
    return tuple(kept)


def axes_of_type(mesh: AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    """The mesh's axes of one type, in its order."""
    return tuple(a for a, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if k == kind)


def mesh_of(x: jax.Array) -> AbstractMesh:
    """The mesh in the array's type, else the mesh in context; empty where there is none."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def constrain(x: jax.Array, spec: Spec) -> jax.Array:
    """Asks for a layout wherever that is possible: reshards over Explicit axes, constrains over Auto axes.

    Manual axes are dropped (the array is a shard already); without a mesh this is the identity.
    """
    mesh = mesh_of(x)
    spec = pad_spec(spec, x.ndim)
    axis_size({axis: 1 for axis in spec_axes(spec)} if mesh.empty else mesh.shape, spec_axes(spec))
    explicit, auto = (axes_of_type(mesh, kind) for kind in (AxisType.Explicit, AxisType.Auto))
    if explicit:
        x = jax.sharding.reshard(x, NamedSharding(mesh, filter_axes(spec, explicit)))
    if auto and set(auto) & set(spec_axes(spec)):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, filter_axes(spec, auto)))
    return x
