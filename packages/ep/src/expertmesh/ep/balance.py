"""Ranks made level by copies of experts: which slot each choice goes to, and the weights that the slots need.

Rank r has e + S slots: its own e experts, then S spare ones with copies of others'. `balance` plans the copies
(`copy_plan.py`) and turns choices of experts into choices of slots. An exchange over the E + R S slots is then the same
as one over experts, and so is a grouped GEMM with the weights of `copy_experts`, whose gradient is that of the experts.

    slot of choice j of expert x = x's own, if j < kept[x], else the copy in whose part of the rest j lies

Choices of an expert are numbered over the EP group by rank, token, k; copies of an expert are in order of their slots.

If tokens are split over other axes too, there are several EP groups. All groups hold the same copies, planned from
their summed counts, since the weights' other dimensions may be split over the groups. Each group sends a copy the same
share of its own choices as the plan sends of all choices. Groups are level as far as their choices are alike.

Dimension key: E experts, R ranks, e = E / R, S spare slots of a rank, T tokens of this rank, K choices per token, N = R
S copies.
"""

import dataclasses
import math
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.op import Op
from expertmesh.core.operands import check_numbers, routed_ids
from expertmesh.core.ops.groups import group_of
from expertmesh.core.ops.permute import plan_rows
from expertmesh.core.specs import axis_size, mesh_of
from expertmesh.core.vjp import differentiable
from expertmesh.ep import partition
from expertmesh.ep.capacity import most_rows
from expertmesh.ep.config import EpConfig
from expertmesh.ep.copy_plan import plan_copies
from expertmesh.ep.dispatch import prepare
from expertmesh.ep.route import Axis, Route, all_gather, flatten_leading, group_rank, group_size
from expertmesh.ep.transports import find_by_row
from expertmesh.ep.wire import PLAIN

__all__ = ["Balanced", "Copies", "balance", "copy_experts"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """What the spare slots hold.

    Attributes:
      expert: int32[R, S], the expert that each slot holds a copy of, -1 for none. The same on all devices; inside your
        own `shard_map`, on the devices of one EP group.
      axis: the EP axes (static).
      transport: the config's (static).
    """

    expert: jax.Array
    axis: Axis = dataclasses.field(metadata=dict(static=True))
    transport: str = dataclasses.field(metadata=dict(static=True))


class Balanced(NamedTuple):
    """Choices of slots.

    Attributes:
      topk_idx: int32[..., K], for `prepare`: slots in place of experts, -1 for a choice that is not routed.
      copies: for `copy_experts`.
      config: of the exchange over slots, for `prepare`.
    """

    topk_idx: jax.Array
    copies: Copies
    config: EpConfig


def balance(
    topk_idx: jax.Array,
    config: EpConfig,
    *,
    num_spare: int,
    least_rows: int = 0,
    capacity_factor: float = 1.0,
) -> Balanced:
    """Spreads the choices of each expert over its own rank and copies on other ranks, so that all ranks get equally
    many rows.

    Args:
      topk_idx: int[..., K] expert ids, as for `prepare`.
      config: of the exchange over experts.
      num_spare: S, spare slots of each rank.
      least_rows: a copy takes more rows; see `plan_copies`.
      capacity_factor: how many times its share of the choices a rank can receive, if `config.capacity` is None.

    Returns:
      Balanced. Its config is the given one for E + R S slots. The capacity is `ceil(capacity_factor T K) + least_rows`
      rows for the T tokens of a participant, and the padding that aligns the slots. Rows that copies cannot level are
      dropped, or an error, as with any capacity. In an EP group of one rank nothing changes.

    Raises:
      ValueError: what `prepare` refuses, or a `capacity_factor` below 1.

    Costs two sorts of T K integers, an all-gather of int32[E] over the EP axis, with several EP groups an all-reduce of
    int32[E], and what `plan_copies` costs.
    """
    EpConfig.check("balance", config=config)
    remedy = "use 1 for what level ranks need"
    check_numbers("balance", remedy, least=1, capacity_factor=capacity_factor)
    axis = partition.resolve_axis(config, topk_idx)
    num_ranks = axis_size(mesh_of(topk_idx).shape, axis)
    if num_ranks == 1 or num_spare == 0:
        none = jnp.zeros((num_ranks, 0), jnp.int32)
        return Balanced(topk_idx, Copies(none, axis, config.transport), config)
    options = dict(num_experts=config.num_experts, num_spare=num_spare, least_rows=least_rows)
    slots, expert = _balance(topk_idx, **options, axis=axis, outer=())
    num_slots = config.num_experts + num_ranks * num_spare
    slot_config = dataclasses.replace(config, num_experts=num_slots)
    if config.capacity is None and topk_idx.size:
        # The number of participants follows from the layout, which only `prepare` knows.
        handle = jax.eval_shape(lambda idx: prepare(idx, slot_config), topk_idx)
        (participants, worst), held = handle.source.shape, handle.group_sizes.shape[1]
        level = math.ceil(capacity_factor * (topk_idx.size // participants)) + least_rows
        capacity = min(most_rows(held, level, config.alignment), worst)
        slot_config = dataclasses.replace(slot_config, capacity=capacity)
    return Balanced(slots, Copies(expert, axis, config.transport), slot_config)


def copy_experts(
    weight: jax.Array,
    copies: Copies,
    *,
    dtype: DTypeLike | None = None,
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """The weights of all slots: each rank's own experts, then the copies that its spare slots hold.

    Args:
      weight: [E, ...], any dtype of whole bytes; differentiable if floating, of 16 bits or more. E is split over the EP
        axes, other dimensions over any axes.
      copies: of `balance`.
      dtype: in which copies travel, such as that of the GEMMs; None: that of the weight.
      spec: where the weight is over Auto axes under a MeshResource.

    Returns:
      [E + R S, ...] in the dtype of the weight, split as it is; zeros in a slot that holds nothing. The cotangent of an
      expert is the sum of its own slot's and its copies', in order of ranks, in float32 (in float64 if it is float64).

    Costs an exchange. Under "nvlink", or where "auto" stands for it, and under "ragged" it moves existing copies only;
    else one block of min(e, S) weights for each pair of ranks, whatever the plan is. The backward exchanges their
    cotangents in float32. The window of "nvlink" must hold, twice, the copies of S experts, and 256 MiB of cotangents.
    """
    if not copies.axis or not copies.expert.shape[1]:
        return weight
    differentiated = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize > 1
    out: jax.Array = (_copy if differentiated else _copy_value)(
        weight,
        copies.expert,
        axis=copies.axis,
        transport=copies.transport,
        dtype=jnp.dtype(dtype or weight.dtype),
        spec=spec,
    )
    return out


# ---- choices


def _balance_reference(
    topk_idx: jax.Array,
    *,
    num_experts: int,
    num_spare: int,
    least_rows: int,
    axis: Axis,
    outer: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    size, rank = group_size(axis), group_rank(axis)
    ids_TK = flatten_leading(routed_ids(topk_idx, None, num_experts))
    own = plan_rows(ids_TK, num_experts=num_experts, capacity=max(ids_TK.size, 1))
    counts_RE = all_gather(own.tokens_per_expert_e[None], axis)
    total_E = jnp.sum(counts_RE, axis=0, dtype=jnp.int32)
    over_all_E = jax.lax.psum(total_E, outer) if outer else total_E
    plan = plan_copies(over_all_E, num_ranks=size, num_spare=num_spare, least_rows=least_rows)
    parts_RS = _parts(plan.rows, plan.expert, total_E, over_all_E) if outer else plan.rows
    kept_E = _kept(total_E, plan.expert, parts_RS)
    before_E = jnp.sum(
        jnp.where(jnp.arange(size)[:, None] < rank, counts_RE, 0), axis=0, dtype=jnp.int32
    )
    first_E = before_E - _exclusive(own.tokens_per_expert_e)
    slot_TK = _slots(ids_TK, own.row_TK, first_E, kept_E, plan.expert, parts_RS)
    return slot_TK.reshape(topk_idx.shape), plan.expert


def _exclusive(x_N: jax.Array) -> jax.Array:
    """The sum of those before each."""
    return jnp.cumsum(x_N, dtype=jnp.int32) - x_N


def _parts(
    rows_RS: jax.Array, expert_RS: jax.Array, total_E: jax.Array, over_all_E: jax.Array
) -> jax.Array:
    """What this EP group sends to each copy, of what all groups send; not more than it has."""
    share_E = total_E.astype(jnp.float32) / jnp.maximum(over_all_E, 1)
    rows_RS = jnp.floor(rows_RS * share_E[expert_RS]).astype(jnp.int32)
    return jnp.where(expert_RS < 0, 0, rows_RS)


def _kept(total_E: jax.Array, expert_RS: jax.Array, parts_RS: jax.Array) -> jax.Array:
    """The rows that stay with each expert's own rank."""
    is_copy_EN = expert_RS.reshape(-1) == jnp.arange(total_E.size, dtype=jnp.int32)[:, None]
    sent_E = jnp.sum(jnp.where(is_copy_EN, parts_RS.reshape(-1), 0), axis=1, dtype=jnp.int32)
    return jnp.maximum(total_E - sent_E, 0)


def _slots(
    ids_TK: jax.Array,
    row_TK: jax.Array,
    first_E: jax.Array,
    kept_E: jax.Array,
    expert_RS: jax.Array,
    parts_RS: jax.Array,
) -> jax.Array:
    """The slot of each choice; row + first of its expert is its number among the group's of that expert."""
    (num_ranks, num_spare), num_experts = expert_RS.shape, kept_E.size
    num_local = num_experts // num_ranks
    copy_N = jnp.arange(expert_RS.size, dtype=jnp.int32)
    expert_N = jnp.where(expert_RS < 0, num_experts, expert_RS).reshape(-1)
    expert_N, order_N = jax.lax.sort((expert_N, copy_N), num_keys=1)
    end_N = jnp.cumsum(parts_RS.reshape(-1)[order_N], dtype=jnp.int32)
    # Where an expert's copies begin among all, in copies and in rows.
    copies_E = group_of(expert_N, jnp.arange(num_experts, dtype=jnp.int32) - 1)
    begin_E = jnp.concatenate([jnp.zeros(1, jnp.int32), end_N])[copies_E]
    slot_N = order_N // num_spare * (num_local + num_spare) + num_local + order_N % num_spare
    x_TK = jnp.maximum(ids_TK, 0)
    beyond_TK = row_TK + first_E[x_TK] - kept_E[x_TK]
    found_TK = group_of(end_N, begin_E[x_TK] + beyond_TK)
    copied_TK = slot_N[jnp.minimum(found_TK, slot_N.size - 1)]
    own_TK = x_TK + x_TK // num_local * num_spare
    slot_TK = jnp.where(beyond_TK < 0, own_TK, copied_TK)
    return jnp.where(ids_TK < 0, -1, slot_TK).astype(jnp.int32)


_balance = Op(
    "ep_balance",
    _balance_reference,
    "t... k -> t... k, r s",
    plan=partition.plan_balance,
)


# ---- weights


def _route(expert_RS: jax.Array, num_local: int, axis: Axis) -> Route:
    """Experts as tokens and spare slots as rows; choice r of an expert is its copy on rank r."""
    (num_ranks, num_spare), rank = expert_RS.shape, group_rank(axis)
    slot_S = jnp.arange(num_spare, dtype=jnp.int32)
    expert_E = jnp.arange(num_ranks * num_local, dtype=jnp.int32)
    is_copy_ERS = expert_RS == expert_E[:, None, None]
    slot_ER = jnp.max(jnp.where(is_copy_ERS, slot_S, -1), axis=-1)
    rank_R = jnp.arange(num_ranks, dtype=jnp.int32)
    flat_ER = jnp.where(slot_ER < 0, -1, rank_R * num_spare + slot_ER)
    here_S = expert_RS[rank]
    return Route(
        slot_TK=jax.lax.dynamic_slice_in_dim(flat_ER, rank * num_local, num_local),
        source_C=jnp.where(here_S < 0, -1, here_S * num_ranks + rank).astype(jnp.int32),
        row_GK=jnp.where(rank_R == rank, slot_ER, -1),
    )


def _copy_reference(
    weight: jax.Array, expert_RS: jax.Array, *, axis: Axis, transport: str, dtype: DTypeLike
) -> jax.Array:
    shape, num_spare = weight.shape, expert_RS.shape[1]
    sent_TD = weight.reshape(shape[0], prod(shape[1:])).astype(dtype)
    in_bytes = sent_TD.dtype.itemsize == 1
    if in_bytes:
        sent_TD = jax.lax.bitcast_convert_type(sent_TD, jnp.uint8)
    route = _route(expert_RS, shape[0], axis)
    move = find_by_row(transport, route, sent_TD.dtype, axis).dispatch
    copies_SD = move(sent_TD, route, axis=axis)
    if in_bytes:
        copies_SD = jax.lax.bitcast_convert_type(copies_SD, dtype)
    copies = copies_SD.astype(weight.dtype).reshape(num_spare, *shape[1:])
    return jnp.concatenate([weight, copies])


def _add_reference(
    grads: jax.Array, expert_RS: jax.Array, *, axis: Axis, transport: str
) -> jax.Array:
    num_local = grads.shape[0] - expert_RS.shape[1]
    own, copies = grads[:num_local], grads[num_local:]
    wide = jnp.promote_types(grads.dtype, jnp.float32)
    rows_SD = copies.reshape(copies.shape[0], prod(copies.shape[1:])).astype(wide)
    route = _route(expert_RS, num_local, axis)
    add = find_by_row(transport, route, wide, axis).combine
    sums_TD = add(rows_SD, route, axis=axis, wire=PLAIN)
    return (own.astype(wide) + sums_TD.reshape(own.shape)).astype(grads.dtype)


_copy_op = Op(
    "ep_copy_experts", _copy_reference, "x d..., r s -> y d...", plan=partition.plan_copies
)
_add_op = Op("ep_add_copies", _add_reference, "y d..., r s -> x d...", plan=partition.plan_copies)


def _copy_fwd(
    weight: jax.Array,
    expert: jax.Array,
    *,
    axis: Axis,
    transport: str,
    dtype: DTypeLike,
    spec: PartitionSpec | None,
) -> tuple[jax.Array, jax.Array]:
    options = dict(axis=axis, transport=transport, dtype=dtype)
    out = _copy_op(weight, expert, operand_specs=(spec, None), result_specs=(spec,), **options)
    return out, expert


def _copy_bwd(
    expert: jax.Array,
    grads: jax.Array,
    *,
    axis: Axis,
    transport: str,
    dtype: DTypeLike,
    spec: PartitionSpec | None,
) -> tuple[jax.Array, None]:
    del dtype
    options = dict(axis=axis, transport=transport)
    d_weight = _add_op(grads, expert, operand_specs=(spec, None), result_specs=(spec,), **options)
    return d_weight, None


def _copy_value(*operands: jax.Array, **options: Any) -> jax.Array:
    return _copy_fwd(*operands, **options)[0]


_copy = differentiable(_copy_fwd, _copy_bwd)
