"""How EP ops are laid out over a mesh. Pure functions of specs; tested without devices.

Tokens `[..., D]` have leading dimensions (batch, sequence, ...) that any axes may shard. *Participants* are the shards
of the leading dimensions once the EP axes are among their axes; per-participant arrays are sharded over
`(outer..., ep...)`, ep innermost, where outer are the other axes of the leading dimensions in order of appearance.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from expertmesh.core.mesh import MeshResource, current_resource
from expertmesh.core.op import Plan, Query
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.specs import (
    Entry,
    Spec,
    axes_of_type,
    axis_size,
    dividing_axes,
    entry_axes,
    make_entry,
    merge_known,
    mesh_of,
    strip_axes,
)
from expertmesh.ep import hosts
from expertmesh.ep.capacity import most_hosts
from expertmesh.ep.config import EpConfig
from expertmesh.ep.route import Axis, outer_axis
from expertmesh.ep.transports.names import TWO_LEVEL, parse


def resolve_axis(config: EpConfig, x: jax.Array) -> Axis:
    """The EP axes of a call on x; None where the compiler alone knows layouts, so that one rank holds everything.

    Raises:
      ValueError: a MeshResource that names no EP axis, an axis that the mesh does not have, or a number of experts that
        the EP size does not divide.
    """
    resource = current_resource()
    if config.axis is None and resource is not None and not entry_axes(resource.ep_resource):
        raise ValueError(
            "prepare: the MeshResource must name the ep axis; got ep_resource=None and EpConfig(axis=None); "
            "set MeshResource(ep_resource=...), or EpConfig(axis=()) for no EP"
        )
    named = resource.ep_resource if config.axis is None and resource is not None else config.axis
    mesh = mesh_of(x)
    for name in entry_axes(named):
        if name not in mesh.axis_names:
            raise ValueError(
                f"prepare: the EP axis must be an axis of the mesh; got axis={name!r}, mesh axes={mesh.axis_names}; "
                "call it under jax.set_mesh or on arrays placed on the mesh, or use EpConfig(axis=()) for no EP"
            )
    if resource is None and all(kind == AxisType.Auto for kind in mesh.axis_types):
        return None
    size = axis_size(mesh.shape, named)
    if config.num_experts % size:
        raise ValueError(
            "prepare: num_experts must be divisible by the EP size; got "
            f"num_experts={config.num_experts}, ep_size={size}, axis={named!r}; change one of them"
        )
    return entry_axes(named)


def is_two_level(transport: str, axis: Axis) -> bool:
    """Whether an exchange goes between hosts and then inside them: that takes two EP axes."""
    return parse(transport).is_two_level and len(axis or ()) > 1


def resolve_transport(config: EpConfig, axis: Axis, x: jax.Array) -> str:
    """The config's; for "auto" "two_level" where the first EP axis is known to go over hosts."""
    if config.transport != "auto" or len(axis or ()) < 2:
        return config.transport
    mesh = mesh_of(x)
    assert axis is not None
    return TWO_LEVEL if hosts.are_over(hosts.of_mesh(mesh), mesh.axis_names, axis) else "auto"


def hosts_of_token(config: EpConfig, axis: Axis, topk_idx: jax.Array) -> int:
    """Hosts that a token's experts are on at most, under the config's groups."""
    num_hosts = axis_size(mesh_of(topk_idx).shape, outer_axis(axis))
    top_k = topk_idx.shape[-1]
    return most_hosts(config.num_experts, num_hosts, top_k, config.num_groups, config.group_topk)


class Layout(NamedTuple):
    """Specs shared by all ops of one exchange."""

    leading: tuple[Entry, ...]
    participants: Entry


def plan_layout(
    spec: Sequence[Entry], sizes: Sequence[int], mesh_shape: Mapping[str, int], axis: Axis
) -> Layout:
    """Leading dimensions as `spec` has them, split over the EP axes too. Idempotent.

    An axis that does not cut its dimension into equal shards, and an EP axis that `spec` lacks, goes to the first
    dimension that it cuts so, innermost.

    Args:
      spec: one entry per leading dimension.
      sizes: the leading dimensions.
      mesh_shape: axis -> size of the axes that are not Manual.
      axis: the EP axes; Manual ones split the tokens already. None: everything is whole.

    Raises:
      ValueError: an axis cuts no leading dimension into equal shards.
    """
    if axis is None:
        return Layout((None,) * len(sizes), None)
    named = [[a for a in entry_axes(entry) if a in mesh_shape] for entry in spec]
    axes = [
        dividing_axes(wanted, [size], mesh_shape) for wanted, size in zip(named, sizes, strict=True)
    ]
    ep = tuple(a for a in axis if a in mesh_shape)
    for name in (*sum(named, []), *ep):
        if name not in sum(axes, ()):
            axes = _split_over(name, axes, sizes, mesh_shape)
    outer = tuple(a for a in sum(axes, ()) if a not in ep)
    return Layout(tuple(map(make_entry, axes)), make_entry(outer + ep))


def resource_of_rows(slot: jax.Array, axis: Axis) -> MeshResource | None:
    """The resource in context, by which rows [P, C, ...] lie where the exchange leaves them.

    The role of tokens alone does not say so: a sequence that is split over other axes has participants on these too.

    Args:
      slot: [..., K], of the handle.
      axis: of the handle.
    """
    resource, mesh = current_resource(), mesh_of(slot)
    if resource is None or mesh.empty:
        return resource
    explicit, auto = (axes_of_type(mesh, kind) for kind in (AxisType.Explicit, AxisType.Auto))
    roles = resource.entry("tokens"), resource.entry("sequence")
    leading = merge_known(jax.typeof(slot).sharding.spec, roles, auto, slot.ndim)[:-1]
    mesh_shape = {name: mesh.shape[name] for name in (*explicit, *auto)}
    layout = plan_layout(leading, slot.shape[:-1], mesh_shape, axis)
    return resource.with_participants(entry_axes(layout.participants))


_Axes = list[tuple[str, ...]]  # of each dimension


def _split_over(
    name: str, axes: _Axes, sizes: Sequence[int], mesh_shape: Mapping[str, int]
) -> _Axes:
    """Adds an axis, innermost, to the first dimension that it divides."""
    for dim, size in enumerate(sizes):
        wanted = (*axes[dim], name)
        if size % prod(mesh_shape[a] for a in wanted) == 0:
            return [*axes[:dim], wanted, *axes[dim + 1 :]]
    held = {a: mesh_shape[a] for dim in axes for a in dim}
    raise ValueError(
        "prepare: tokens must be divisible over all axes that shard them, the EP axis among them; got leading "
        f"dimensions {tuple(sizes)}, sharded over {held}, and {[name]} of {[mesh_shape[name]]} shards to add; "
        "pad the batch, or use EpConfig(axis=()) for no EP"
    )


def _features(function: str, query: Query, layout: Layout, block: int = 1) -> Entry:
    """The features of operand 0 stay as they are sharded, where the tokens do not use the axis and cut no block."""
    axes = [a for a in entry_axes(query.operand_specs[0][-1]) if a in query.mesh_shape]
    taken, size = entry_axes(layout.participants), query.shapes[0][-1]
    usable = [a for a in axes if a not in taken and size % block == 0]
    free = dividing_axes(usable, [size // block], query.mesh_shape)
    if set(axes) & set(taken):
        _warn_resharded(function, query.operand_specs[0], (*layout.leading, make_entry(free)))
    return make_entry(free)


def _warn_resharded(function: str, spec: Spec, expected: Spec) -> None:
    warnings.warn(
        f"{function}: the last dimension must not be sharded over axes that shard tokens, nor K at all; "
        f"got {PartitionSpec(*spec)}, resharded to {PartitionSpec(*expected)}; place it so",
        RuntimeWarning,
        stacklevel=2,
    )


def _route_specs(layout: Layout, num_maps: int = 3) -> tuple[PartitionSpec, ...]:
    """Specs of slot [..., K], source [P, C], row [P, G, K] and, of two levels, host_row [P, G, K]."""
    each = layout.participants
    rows = PartitionSpec(each, None, None)
    return (
        PartitionSpec(*layout.leading, None),
        PartitionSpec(each, None),
        *(rows,) * (num_maps - 2),
    )


def _layout_like(query: Query, operand: int) -> Layout:
    """The layout that operand [..., K] has."""
    spec, sizes = query.operand_specs[operand], query.shapes[operand]
    axis = query.options["axis"]
    assert axis is None or isinstance(axis, tuple)
    return plan_layout(tuple(spec)[:-1], sizes[:-1], query.mesh_shape, axis)


def plan_prepare(query: Query) -> Plan:
    """topk_idx[..., K] -> the arrays of a Handle, in their order; host_row, of two levels, is the last."""
    layout = _layout_like(query, 0)
    maps = _route_specs(layout)
    if layout.participants and entry_axes(query.operand_specs[0][-1]):
        _warn_resharded("prepare", query.operand_specs[0], maps[0])
    each = layout.participants
    counts = (PartitionSpec(each, None),) * 2 + (PartitionSpec(each),) * 3
    host_row = maps[-1:] if query.options.get("two_level") else ()
    return Plan((maps[0],), (*maps, *counts, *host_row))


def plan_dispatch(query: Query) -> Plan:
    """tokens[..., D], the maps -> rows[P, C, D]. The handle's layout leads."""
    layout = _layout_like(query, 1)
    d = _features("dispatch", query, layout)
    tokens, rows = PartitionSpec(*layout.leading, d), PartitionSpec(layout.participants, None, d)
    return Plan((tokens, *_route_specs(layout, len(query.shapes) - 1)), (rows,))


def plan_dispatch_quantized(query: Query) -> Plan:
    """data[..., D], scale[..., B], the maps -> data[P, C, D], scale[P, C, B]; B is split as D is."""
    layout = _layout_like(query, 2)
    d = _features("dispatch", query, layout, query.options["format"].block[1])
    tokens, rows = PartitionSpec(*layout.leading, d), PartitionSpec(layout.participants, None, d)
    maps = _route_specs(layout, len(query.shapes) - 2)
    return Plan((tokens, tokens, *maps), (rows, rows))


def plan_combine(query: Query) -> Plan:
    """rows[P, C, D], the maps -> tokens[..., D]. The handle's layout leads."""
    layout = _layout_like(query, 1)
    wire_format = query.options.get("wire_format")
    blocks = wire_format.block if isinstance(wire_format, TensorFormat) else None
    d = _features("combine", query, layout, blocks[1] if blocks else 1)
    tokens, rows = PartitionSpec(*layout.leading, d), PartitionSpec(layout.participants, None, d)
    return Plan((rows, *_route_specs(layout, len(query.shapes) - 1)), (tokens,))


def plan_dispatch_values(query: Query) -> Plan:
    """values[..., K], slot, source, row -> [P, C]."""
    maps = _route_specs(_layout_like(query, 1))
    return Plan((maps[0], *maps), (maps[1],))


def plan_combine_values(query: Query) -> Plan:
    """[P, C], slot, source, row -> values[..., K]."""
    maps = _route_specs(_layout_like(query, 1))
    return Plan((maps[1], *maps), (maps[0],))


def plan_balance(query: Query) -> Plan:
    """topk_idx[..., K] -> slots[..., K], expert[R, S]; the axes that part the EP groups are an option."""
    layout = _layout_like(query, 0)
    ep = query.options["axis"]
    outer = tuple(axis for axis in entry_axes(layout.participants) if axis not in ep)
    choices = PartitionSpec(*layout.leading, None)
    return Plan((choices,), (choices, PartitionSpec(None, None)), options={"outer": outer})


def plan_copies(query: Query) -> Plan:
    """weights[E, ...], expert[R, S] -> weights[E + R * S, ...], or back: over the EP axes along E, else as they are."""
    ep = [axis for axis in query.options["axis"] if axis in query.mesh_shape]
    _, *others = zip(strip_axes(query.operand_specs[0], ep), query.shapes[0], strict=True)
    cut = (dividing_axes(entry_axes(entry), [n], query.mesh_shape) for entry, n in others)
    weights = PartitionSpec(make_entry(tuple(ep)), *map(make_entry, cut))
    return Plan((weights, PartitionSpec(None, None)), (weights,))
