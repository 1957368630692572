"""The integers of one exchange on one device: where each choice goes and where each row comes from.

Dimension key: T tokens of this rank, K choices per token, G = R * T tokens of the EP group, R ranks in the EP group,
C receive rows per rank, E experts, e experts per rank. A choice of the group is numbered (s * T + t) * K + k.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.op import vary_like
from expertmesh.core.operands import routed_ids
from expertmesh.core.ops.gather_rows import gather_rows
from expertmesh.core.ops.permute import RowPlan, plan_rows
from expertmesh.core.ops.row_map import RowMap
from expertmesh.ep.capacity import worst_rows

Axis = tuple[str, ...] | None


class Route(NamedTuple):
    """What a transport needs to move rows; see Handle for the formulas. Without `host_GK` there is one level."""

    slot_TK: jax.Array
    source_C: jax.Array
    row_GK: jax.Array
    host_GK: jax.Array | None = None
    most_hosts: int = 1

    @property
    def token_C(self) -> jax.Array:
        """The token s * T + t of each row, -1 for padding."""
        return RowMap(self.row_GK, self.source_C).source_row


def group_size(axis: Axis) -> int:
    """R."""
    return jax.lax.axis_size(axis) if axis else 1


def group_rank(axis: Axis) -> jax.Array | int:
    """This device's rank in its EP group."""
    return jax.lax.axis_index(axis) if axis else 0


def outer_axis(axis: Axis) -> Axis:
    """The EP axis over hosts, of an exchange of two levels."""
    assert axis is not None
    return axis[:1]


def inner_axis(axis: Axis) -> Axis:
    """The EP axes inside a host."""
    assert axis is not None
    return axis[1:]


def all_gather(x: jax.Array, axis: Axis) -> jax.Array:
    """Concatenates the ranks' arrays, in rank order."""
    return jax.lax.all_gather(x, axis, tiled=True) if axis and _moves(x) else x


def sum_scatter(x: jax.Array, axis: Axis) -> jax.Array:
    """Adds the ranks' arrays and leaves each rank its part."""
    return jax.lax.psum_scatter(x, axis, tiled=True) if axis and _moves(x) else x


def _moves(x: jax.Array) -> bool:
    """StableHLO has no collective over a dimension of size 0, and without one the result is the same."""
    return bool(x.shape[0] > 0)


def take_rows(src_SD: jax.Array, index_NK: jax.Array) -> jax.Array:
    """Row n is the sum over k of src[index[n, k]]; an index that is not in src adds nothing."""
    rows_1ND: jax.Array = gather_rows(src_SD[None], index_NK[None])
    return rows_1ND[0]


def make_route(
    topk_idx_TK: jax.Array,
    *,
    num_experts: int,
    capacity: int | None,
    alignment: int,
    axis: Axis,
    two_level: bool,
    checksum: int,
) -> tuple[Route, RowPlan, jax.Array]:
    """Plans the whole group's rows on every rank, from the ids alone: payloads then move without a handshake.

    The third result is the first rank whose checksum is another than this one's, -1 for none: see `_ids_of_group`.

    Costs an all-gather of int32[T, K] over the EP axis, and a sort of G * K integers.
    """
    (num_tokens, top_k), size, rank = topk_idx_TK.shape, group_size(axis), group_rank(axis)
    if capacity is None:
        capacity = worst_capacity(num_experts, top_k, num_tokens, size, alignment)
    _check_countable(size, capacity, num_tokens * top_k, num_experts, alignment)
    ids_GK, stranger = _ids_of_group(topk_idx_TK, num_experts, axis, checksum)
    plan = plan_rows(
        ids_GK,
        num_experts=num_experts,
        capacity=capacity,
        alignment=alignment,
        num_ranks=size,
        rank=rank,
    )
    slot_GK = row_GK = plan.row_TK
    if size > 1:
        owner_GK = jax.lax.div(ids_GK, jnp.int32(num_experts // size))  # 0 of -1, which has no row
        slot_GK = jnp.where(plan.row_TK < 0, -1, owner_GK * capacity + plan.row_TK)
        row_GK = jnp.where(owner_GK == rank, plan.row_TK, -1)
    slot_TK = jax.lax.dynamic_slice_in_dim(slot_GK, rank * num_tokens, num_tokens)
    host_GK = _rows_of_host(slot_GK, capacity, axis) if two_level else None
    # Where nothing is exchanged, no choice has a row.
    num_dropped = jnp.where(stranger < 0, plan.num_dropped, jnp.int32(num_tokens * top_k))
    plan = plan._replace(num_dropped=num_dropped)
    return Route(slot_TK, plan.source_C, row_GK, host_GK), plan, stranger


def _ids_of_group(
    topk_idx_TK: jax.Array, num_experts: int, axis: Axis, checksum: int
) -> tuple[jax.Array, jax.Array]:
    """(ids_GK, stranger): `routed_ids` of several ranks, and the first rank that means another exchange, -1 for none.

    Ids travel with the checksum added, so that it costs no bytes. What is no id without this rank's own checksum is
    from a rank with another; a chance of (E + 1) in 2^CHECKSUM_BITS hides it. All ranks then see one, if perhaps not
    the same: ids are -1 in all, and nothing is exchanged.
    """
    size = group_size(axis)
    # Of one rank they are as given: the plan leaves out what is no expert's.
    ids_TK = topk_idx_TK if size == 1 else routed_ids(topk_idx_TK, None, num_experts)
    if size == 1 or ids_TK.size == 0:
        return all_gather(ids_TK, axis), vary_like((ids_TK,), jnp.int32(-1))
    known_GK = all_gather(ids_TK + jnp.int32(checksum), axis) - jnp.int32(checksum)
    first_R = known_GK.reshape(size, -1)[:, 0]
    other_R = (first_R < -1) | (first_R >= num_experts)
    stranger = jnp.where(jnp.any(other_R), jnp.argmax(other_R), -1).astype(jnp.int32)
    return jnp.where(stranger < 0, known_GK, -1), stranger


def _rows_of_host(slot_GK: jax.Array, capacity: int, axis: Axis) -> jax.Array:
    """`i * C + n` for choices with a row at rank i of this rank's host, -1 for others."""
    inside = inner_axis(axis)
    rows = group_size(inside) * capacity
    place_GK = slot_GK - group_rank(axis) // group_size(inside) * rows
    return jnp.where((place_GK >= 0) & (place_GK < rows), place_GK, -1)  # slots of none are below 0


def worst_capacity(
    num_experts: int, top_k: int, num_tokens: int, ep_size: int, alignment: int
) -> int:
    """`recv_capacity`, and 0 where nothing can arrive."""
    if num_tokens * top_k == 0:
        return 0
    return worst_rows(num_experts // ep_size, top_k, ep_size * num_tokens, alignment)


def _check_countable(
    size: int, capacity: int, num_choices: int, num_experts: int, alignment: int
) -> None:
    most = max(size * capacity, size * num_choices + num_experts * (alignment - 1))
    if most >= 2**31:
        raise ValueError(
            f"prepare: rows of an EP group must be countable in int32; got capacity={capacity}, ep_size={size}, "
            f"{num_choices} choices per rank, alignment={alignment}; dispatch the tokens in chunks or lower capacity"
        )


def flatten_leading(x: jax.Array, num_trailing: int = 1) -> jax.Array:
    """[..., *trailing] to [T, *trailing]."""
    leading = x.shape[: x.ndim - num_trailing]
    return x.reshape(prod(leading), *x.shape[x.ndim - num_trailing :])
