"""prepare, dispatch, combine: tokens to the devices that hold their experts, and back.

Dimension key: T tokens of a participant (its shard of the leading dimensions, flattened), K choices per token, D
features, E experts, R ranks of the EP group, e = E / R experts per participant, P participants (outer axes x EP),
C receive rows per participant, G = R * T tokens of an EP group. Participant p = (outer index) * R + r has rank r.

Rows of a participant are ordered by expert, then source rank, then token, then k; each expert's rows are padded to a
multiple of the alignment; rows at positions >= C are dropped, so the highest experts and latest arrivals first. That
order depends on the choices alone: not on the transport, the mesh mode or the run, and the backward drops the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.op import Op
from expertmesh.core.operands import (
    FLOATS,
    INTEGERS,
    check_arrays,
    check_out_dtype,
    check_type,
    debug_check_ids,
)
from expertmesh.core.ops.row_map import RowMap, holds_token, move_values
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.specs import mesh_of
from expertmesh.core.vjp import differentiable
from expertmesh.ep import partition
from expertmesh.ep.agreement import checksum, facts_of, say_prepared
from expertmesh.ep.config import EpConfig, check_transport
from expertmesh.ep.route import Axis, Route, all_gather, flatten_leading, make_route, sum_scatter
from expertmesh.ep.transports import find_transport
from expertmesh.ep.transports.names import parse
from expertmesh.ep.wire import Wire, from_bytes, scale_of_zeros, to_bytes, travels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """One exchange: where each row goes. A value; made by `prepare`.

    With `n(s, t, k)` the position of choice k of token t of rank s among all rows of its expert's rank (padding
    included), "here" = participant p of rank r, and choices numbered `c = (s * T + t) * K + k`:

    Attributes:
      slot: int32[..., K]; `(topk_idx // e) * C + n`, or -1 if not routed or n >= C. Sharded like topk_idx.
      source: int32[P, C]; the c whose row is row n here, -1 for padding.
      row: int32[P, G, K]; `row[p, s * T + t, k] = n` for choices whose expert is here, -1 for all others and dropped.
      tokens_per_expert: int32[P, e]; number of choices of each expert here, dropped ones included.
      group_sizes: int32[P, e]; `min(end[x], C) - min(end[x - 1], C)`, where
        `end[x] = sum_{x' <= x} roundup(tokens_per_expert[x'], alignment)`.
      total_recv: int32[P]; `end[e - 1]`: the capacity that would have dropped nothing here.
      num_dropped: int32[P]; choices of experts here that have no row.
      stranger: int32[P]; the first rank of the EP group whose process prepared another exchange than the one here, by
        options, sizes or versions; -1 if there is none. If there is one nothing is exchanged, and each participant's
        own choices count as dropped.
      axis: the EP axes, major first; None where one participant holds everything (static).
      ep_size: R (static).
      transport, overflow: the config's (static); "two_level" where "auto" stands for it.
      host_row: int32[P, G, K]; of choices with a row at the i-th rank of the participant's host `i * C + n`, -1 for all
        others. None where the exchange has one level.
      most_hosts: hosts that a token's rows are expected on at most; 1 where the exchange has one level (static).
    """

    slot: jax.Array
    source: jax.Array
    row: jax.Array
    tokens_per_expert: jax.Array
    group_sizes: jax.Array
    total_recv: jax.Array
    num_dropped: jax.Array
    stranger: jax.Array
    axis: Axis = dataclasses.field(metadata=dict(static=True))
    ep_size: int = dataclasses.field(metadata=dict(static=True))
    overflow: str = dataclasses.field(metadata=dict(static=True))
    transport: str = dataclasses.field(metadata=dict(static=True))
    host_row: jax.Array | None = None
    most_hosts: int = dataclasses.field(default=1, metadata=dict(static=True))

    @property
    def maps(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where single values go."""
        return self.slot, self.source, self.row

    @property
    def row_maps(self) -> tuple[jax.Array | None, ...]:
        """The operands of every transport."""
        return *self.maps, self.host_row


def _route(
    slot: jax.Array,
    source_1C: jax.Array,
    row_1GK: jax.Array,
    host_1GK: jax.Array | None,
    most_hosts: int,
) -> Route:
    host_GK = None if host_1GK is None else host_1GK[0]
    return Route(flatten_leading(slot), source_1C[0], row_1GK[0], host_GK, most_hosts)


def _prepare_reference(
    topk_idx: jax.Array,
    *,
    num_experts: int,
    capacity: int | None,
    alignment: int,
    axis: Axis,
    two_level: bool,
    checksum: int,
) -> tuple[jax.Array | None, ...]:
    route, plan, stranger = make_route(
        flatten_leading(topk_idx),
        num_experts=num_experts,
        capacity=capacity,
        alignment=alignment,
        axis=axis,
        two_level=two_level,
        checksum=checksum,
    )
    each = (
        route.source_C,
        route.row_GK,
        plan.tokens_per_expert_e,
        plan.group_sizes_e,
        plan.total,
        plan.num_dropped,
        stranger,
    )
    host_row = None if route.host_GK is None else route.host_GK[None]
    return route.slot_TK.reshape(topk_idx.shape), *(x[None] for x in each), host_row


def _prepare_like(topk_idx: jax.Array, *, two_level: bool, **options: Any) -> tuple[Any, ...]:
    del options
    return *(topk_idx,) * 8, topk_idx if two_level else None


def _dispatch_reference(
    tokens: jax.Array,
    slot: jax.Array,
    source_1C: jax.Array,
    row_1GK: jax.Array,
    host_1GK: jax.Array | None,
    *,
    axis: Axis,
    transport: str,
    most_hosts: int,
) -> jax.Array:
    route = _route(slot, source_1C, row_1GK, host_1GK, most_hosts)
    move = find_transport(transport, route, tokens.dtype, axis, function="dispatch").dispatch
    return move(flatten_leading(tokens), route, axis=axis)[None]


def _combine_reference(
    rows_1CD: jax.Array,
    slot: jax.Array,
    source_1C: jax.Array,
    row_1GK: jax.Array,
    host_1GK: jax.Array | None,
    *,
    axis: Axis,
    transport: str,
    most_hosts: int,
    wire_format: TensorFormat | str | None,
) -> jax.Array:
    route = _route(slot, source_1C, row_1GK, host_1GK, most_hosts)
    chosen = find_transport(transport, route, rows_1CD.dtype, axis, wire_format, function="combine")
    tokens_TD = chosen.combine(rows_1CD[0], route, axis=axis, wire=Wire(wire_format))
    return tokens_TD.reshape(*slot.shape[:-1], rows_1CD.shape[-1])


def _dispatch_quantized_reference(
    data: jax.Array,
    scale: jax.Array,
    slot: jax.Array,
    source_1C: jax.Array,
    row_1GK: jax.Array,
    host_1GK: jax.Array | None,
    *,
    axis: Axis,
    transport: str,
    most_hosts: int,
    format: TensorFormat,
) -> tuple[jax.Array, jax.Array]:
    route = _route(slot, source_1C, row_1GK, host_1GK, most_hosts)
    parts_T = flatten_leading(data), flatten_leading(scale)
    chosen = find_transport(transport, route, jnp.uint8, axis, function="dispatch")
    if hasattr(chosen, "dispatch_parts"):
        data_CD, scale_CB = chosen.dispatch_parts(parts_T, route, axis=axis)
    else:
        bytes_C = chosen.dispatch(to_bytes(*parts_T), route, axis=axis)
        data_CD, scale_CB = from_bytes(bytes_C, data.shape[-1], data.dtype, scale.dtype)
    holds_token_C1 = holds_token(route.source_C)[:, None]
    scale_CB = jnp.where(holds_token_C1, scale_CB, scale_of_zeros(format))
    return data_CD[None], scale_CB[None]


def _dispatch_values_reference(
    values: jax.Array, slot: jax.Array, source_1C: jax.Array, row_1GK: jax.Array, *, axis: Axis
) -> jax.Array:
    del slot
    values_GK = all_gather(flatten_leading(values), axis)
    return move_values(values_GK[None], RowMap(row_1GK, source_1C))


def _combine_values_reference(
    values_1C: jax.Array, slot: jax.Array, source_1C: jax.Array, row_1GK: jax.Array, *, axis: Axis
) -> jax.Array:
    here_GK = move_values(values_1C, RowMap(row_1GK, source_1C).inverse)[0]
    # Each choice has a row on one rank only, so the sum is exact.
    return sum_scatter(here_GK, axis).reshape(slot.shape)


_prepare = Op(
    "ep_prepare",
    _prepare_reference,
    "t... k -> t... k, p c, p g k, p e, p e, p, p, p, p g k",
    plan=partition.plan_prepare,
    results_like=_prepare_like,
)
_dispatch_rows = Op(
    "ep_dispatch",
    _dispatch_reference,
    "t... d, t... k, p c, p g k, p g k -> p c d",
    plan=partition.plan_dispatch,
)
_combine_rows = Op(
    "ep_combine",
    _combine_reference,
    "p c d, t... k, p c, p g k, p g k -> t... d",
    plan=partition.plan_combine,
)
_dispatch_quantized = Op(
    "ep_dispatch_quantized",
    _dispatch_quantized_reference,
    "t... d, t... b, t... k, p c, p g k, p g k -> p c d, p c b",
    plan=partition.plan_dispatch_quantized,
)
_dispatch_values = Op(
    "ep_dispatch_values",
    _dispatch_values_reference,
    "t... k, t... k, p c, p g k -> p c",
    plan=partition.plan_dispatch_values,
)
_combine_values = Op(
    "ep_combine_values",
    _combine_values_reference,
    "p c, t... k, p c, p g k -> t... k",
    plan=partition.plan_combine_values,
)


def prepare(topk_idx: jax.Array, config: EpConfig) -> Handle:
    """Plans an exchange: which row of which participant each choice gets.

    Args:
      topk_idx: int[..., K] expert ids, at least one leading dimension, which axes may shard in any way; an id outside
        [0, E) (such as -1) is not routed; equal ids of one token are separate rows.
      config: EpConfig.

    Returns:
      Handle; its [P, ...] arrays are sharded over (outer axes..., EP axes...). P is the number of participants: 1
      without a mesh, and over Auto axes without a MeshResource, where every device then holds everything.

    Raises:
      TypeError: topk_idx is not an array of integers.
      ValueError: no leading dimension; a MeshResource without an EP axis; an EP axis that the mesh lacks; experts not
        divisible by the EP size; tokens not divisible by all axes that shard them; under overflow="error" a capacity
        below the tokens of one participant; more rows than int32 counts.

    Processes that prepare different exchanges exchange nothing: `Handle.stranger` says so, and `raise_overflow` raises.
    Under `config.debug` and `jax.experimental.checkify.checkify` an id >= E is an error.
    Warns (RuntimeWarning) if topk_idx is sharded in K, which is then gathered.
    Costs one all-gather of int32[T, K] over the EP axis; over Auto axes without a MeshResource, one of topk_idx.
    """
    EpConfig.check("prepare", config=config)
    check_arrays("prepare", INTEGERS, topk_idx=topk_idx)
    if topk_idx.ndim < 2:
        raise ValueError(
            f"prepare: topk_idx must be [..., K] with a dimension of tokens; got shape={topk_idx.shape}; "
            "add it with topk_idx[None]"
        )
    axis = partition.resolve_axis(config, topk_idx)
    if config.debug:
        debug_check_ids("prepare", topk_idx, config.num_experts)
    transport = partition.resolve_transport(config, axis, topk_idx)
    two_level = partition.is_two_level(transport, axis)
    slot, source, row, tokens_per_expert, group_sizes, *counts, host_row = _prepare(
        topk_idx,
        num_experts=config.num_experts,
        capacity=config.capacity,
        alignment=config.alignment,
        axis=axis,
        two_level=two_level,
        checksum=_checksum(config, topk_idx) if axis else 0,
    )
    total_recv, num_dropped, stranger = counts
    handle = Handle(
        slot=slot,
        source=source,
        row=row,
        tokens_per_expert=tokens_per_expert,
        group_sizes=group_sizes,
        total_recv=total_recv,
        num_dropped=num_dropped,
        stranger=stranger,
        axis=axis,
        ep_size=config.num_experts // tokens_per_expert.shape[-1],
        overflow=config.overflow,
        transport=transport,
        host_row=host_row,
        most_hosts=partition.hosts_of_token(config, axis, topk_idx) if two_level else 1,
    )
    _check_floor(config, handle)
    return handle


def dispatch(handle: Handle, tokens: Any, *, transport: str | None = None) -> Any:
    """Copies each token to its rows: rows[p, n] = the token of choice source[p, n], 0 for padding.

    Args:
      handle: from `prepare`.
      tokens: [..., D], leading dimensions as in topk_idx; real numbers of whole bytes: bfloat16, float16, float32, and
        what quantized payloads and scales are held in (differentiable if floating). Or a QuantizedArray of 8 bits with
        blocks inside a token (not differentiable): its data and scales travel as one array of bytes.
      transport: overrides the config's.

    Returns:
      [P, C, D] in the tokens' dtype, sharded over (outer..., EP) and as D was. Padding rows are exactly 0. The
      cotangent of tokens is `combine` of the rows' cotangent. For a QuantizedArray the result is, bit for bit, the
      QuantizedArray that quantizing the rows would give.

    Raises:
      TypeError: no array, or any other dtype.
      ValueError: tokens do not fit the handle, or an unknown transport, or one that the platform lacks; a
        QuantizedArray whose scales do not belong to single tokens.

    Costs what the transport costs; if tokens are sharded unlike topk_idx, a reshard, with a RuntimeWarning if D is
    sharded over axes of the tokens.
    """
    check_type("dispatch", Handle, "pass what prepare made", handle=handle)
    check_arrays("dispatch", quantized=True, tokens=tokens)
    transport = _transport("dispatch", handle, transport)
    _check_shape("dispatch", "tokens", tokens.shape[:-1], handle.slot.shape[:-1])
    if isinstance(tokens, QuantizedArray):
        return _dispatched_quantized(handle, tokens, transport)
    _check_payload("dispatch", tokens.dtype)
    return _dispatch(tokens, handle, transport=transport)


def _dispatched_quantized(handle: Handle, tokens: QuantizedArray, transport: str) -> QuantizedArray:
    _check_travels("dispatch", "tokens", tokens.format)
    data, scale = _dispatch_quantized(
        tokens.data,
        tokens.scale,
        *handle.row_maps,
        axis=handle.axis,
        transport=transport,
        most_hosts=handle.most_hosts,
        format=tokens.format,
    )
    return dataclasses.replace(tokens, data=data, scale=scale, block=(1, 1, tokens.block[-1]))


def combine(
    handle: Handle,
    rows: jax.Array,
    *,
    transport: str | None = None,
    wire_format: TensorFormat | DTypeLike | None = None,
) -> jax.Array:
    """Adds up each token's rows: out[t] = sum_k rows[participant and row of slot[t, k]], unweighted.

    Args:
      handle: from `prepare`.
      rows: float[P, C, D], such as the experts' outputs times `dispatch_weights`. Padding rows are never read.
      transport: overrides the config's.
      wire_format: an 8-bit format with blocks inside a token, or a floating dtype of 16 bits or more, in which each
        rank's sum for a token travels. Sums are added in float32 where they arrive. Not differentiable. None: sums
        travel in float32 (in the rows' dtype if K is 1, for "all_to_all" and "ragged").

    Returns:
      [..., D] in the rows' dtype, summed in float32; 0 for a token without rows. The cotangent of rows is `dispatch`
      of the output's cotangent: exactly 0 for padding.

    Raises:
      TypeError: rows are not an array of floats; a `wire_format` that is neither a format nor a dtype.
      ValueError: rows do not fit the handle, or an unknown transport, or one that the platform lacks; a `wire_format`
        whose scales do not belong to single tokens, of a dtype other than floats of 16 bits or more, or together with
        "ring", which adds on the way.

    Costs what the transport costs.
    """
    check_type("combine", Handle, "pass what prepare made", handle=handle)
    check_arrays("combine", FLOATS, rows=rows)
    _check_shape("combine", "rows", rows.shape[:-1], handle.source.shape)
    transport = _transport("combine", handle, transport)
    if wire_format is None:
        return _combine(rows, handle, transport=transport)
    wire_format = _wire_format(wire_format)
    if parse(transport).adds_on_the_way:
        raise ValueError(
            "combine: wire_format must go with a transport that does not add on the way; "
            f"got transport={transport!r}; use 'auto' or 'all_to_all'"
        )
    return _combine_fwd(rows, handle, transport=transport, wire_format=wire_format)[0]


def _wire_format(given: TensorFormat | DTypeLike) -> TensorFormat | str:
    """A format whose rows can be moved, or the name of a dtype in which sums can be."""
    if not isinstance(given, TensorFormat):
        return check_out_dtype("combine", given, "wire_format").name
    _check_travels("combine", "wire_format", given)
    return given


def dispatch_weights(handle: Handle, topk_weights: jax.Array) -> jax.Array:
    """Moves each choice's weight to its row: out[p, n] = topk_weights of choice source[p, n], 0 for padding.

    Args:
      handle: from `prepare`.
      topk_weights: float[..., K], shaped like topk_idx; converted to float32.

    Returns:
      float32[P, C]. The cotangent of a weight is exactly its row's cotangent, 0 if it has no row.

    Raises:
      TypeError: topk_weights is not an array of floats.
      ValueError: topk_weights does not fit the handle.

    Costs an all-gather of float32[T, K] over the EP axis, and its transpose a reduce-scatter.
    """
    check_type("dispatch_weights", Handle, "pass what prepare made", handle=handle)
    check_arrays("dispatch_weights", FLOATS, topk_weights=topk_weights)
    _check_shape("dispatch_weights", "topk_weights", topk_weights.shape, handle.slot.shape)
    return _dispatch_weights(topk_weights.astype(jnp.float32), handle)


def _dispatch_fwd(tokens: jax.Array, handle: Handle, *, transport: str) -> tuple[jax.Array, Handle]:
    options = dict(axis=handle.axis, transport=transport, most_hosts=handle.most_hosts)
    return _dispatch_rows(tokens, *handle.row_maps, **options), handle


def _dispatch_bwd(handle: Handle, d_rows: jax.Array, *, transport: str) -> tuple[jax.Array, None]:
    return _combine_fwd(d_rows, handle, transport=transport)[0], None


def _combine_fwd(
    rows: jax.Array,
    handle: Handle,
    *,
    transport: str,
    wire_format: TensorFormat | str | None = None,
) -> tuple[jax.Array, Handle]:
    options = dict(
        axis=handle.axis,
        transport=transport,
        most_hosts=handle.most_hosts,
        wire_format=wire_format,
    )
    # A float of 8 bits, a cotangent of tokens of such: it is added up in float32, whatever the transport.
    values = rows.astype(jnp.float32) if rows.dtype.itemsize < 2 else rows
    return _combine_rows(values, *handle.row_maps, **options).astype(rows.dtype), handle


def _combine_bwd(handle: Handle, d_tokens: jax.Array, *, transport: str) -> tuple[jax.Array, None]:
    return _dispatch_fwd(d_tokens, handle, transport=transport)[0], None


def _dispatch_weights_fwd(weights: jax.Array, handle: Handle) -> tuple[jax.Array, Handle]:
    return _dispatch_values(weights, *handle.maps, axis=handle.axis), handle


def _dispatch_weights_bwd(handle: Handle, d_rows: jax.Array) -> tuple[jax.Array, None]:
    return _combine_values(d_rows, *handle.maps, axis=handle.axis), None


_dispatch = differentiable(_dispatch_fwd, _dispatch_bwd)
_combine = differentiable(_combine_fwd, _combine_bwd)
_dispatch_weights = differentiable(_dispatch_weights_fwd, _dispatch_weights_bwd)


def _transport(function: str, handle: Handle, name: str | None) -> str:
    name = handle.transport if name is None else name
    check_transport(function, name)
    return name


def _check_payload(function: str, dtype: DTypeLike) -> None:
    number = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
    bits = number and (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits
    if bits < 8:
        raise TypeError(
            f"{function}: tokens must be real numbers of whole bytes (floating or integer, 8 bits or more); "
            f"got dtype={dtype}; view or pack them as uint8"
        )


def _check_travels(function: str, name: str, format: TensorFormat) -> None:
    if not travels(format):
        raise ValueError(
            f"{function}: {name} must be of 8 bits with scales for blocks inside a token; got format={format}; "
            "move the array before it is quantized"
        )


def _checksum(config: EpConfig, topk_idx: jax.Array) -> int:
    """Of what all processes must prepare alike."""
    *leading, top_k = topk_idx.shape
    facts = facts_of(config, leading, top_k, mesh_of(topk_idx).shape)
    say_prepared(facts)
    return checksum(facts)


def _check_floor(config: EpConfig, handle: Handle) -> None:
    """Fewer rows than one participant's own tokens overflow even under balanced routing."""
    tokens_per_rank = handle.row.shape[1] // handle.ep_size
    if config.overflow == "error" and handle.source.shape[1] < tokens_per_rank:
        raise ValueError(
            "prepare: under overflow='error' capacity must be at least the tokens of one participant; got "
            f"capacity={config.capacity}, tokens={tokens_per_rank}; use recv_capacity, or overflow='drop'"
        )


def _check_shape(function: str, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ValueError(
            f"{function}: {name} must fit the handle; got leading dimensions {shape} of {name}, handle: {wanted}; "
            "use the handle that was prepared for these tokens"
        )
