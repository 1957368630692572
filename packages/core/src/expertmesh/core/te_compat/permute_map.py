"""Plans rows from a routing map: any number of experts for each token, at most one row for each (token, expert).

    rank(t, e) = #{t' < t: map[t', e]},  row[t, e] = offset[e] + rank(t, e)

Dimension key: P token groups, T tokens, E experts, e experts in the order of rows, N rows. A choice is one (token,
expert) pair, numbered t * E + e.
"""

import operator

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import FLAGS, check_arrays
from expertmesh.core.ops.permute import (
    PermutePlan,
    check_rows,
    choices_of_rows,
    group_roll,
    padded_rows,
)

__all__ = ["plan_permute_map"]


def plan_permute_map(
    routing_map: jax.Array,
    *,
    top_k: int | None = None,
    num_rows: int | None = None,
    alignment: int = 1,
    roll: int | jax.Array = 0,
    drop: bool = False,
) -> PermutePlan:
    """`plan_permute` of a routing map: experts ascend, inside an expert tokens.

    The plan is one with K = E, whose choice e is expert e, so `permute(x, plan)` copies tokens,
    `move_values(probs, plan)` brings probs[P, T, E] to the rows, and `unpermute(y, plan, probs)` adds up
    `sum_e probs[t, e] * y[row[t, e]]`. A routed entry has a row whatever its probability is, 0 too. An entry that is
    not routed adds nothing, and its probability has gradient 0. A token without experts comes back as 0.

    Args:
      routing_map: bool or int[P, T, E] or [T, E]; nonzero is routed.
      top_k: no token has more experts than this; default E. It sets the default of num_rows only. Where the map breaks
        it, rows may be dropped, which `num_dropped` of the plan counts.
      num_rows: N. Default: `padded_rows(T * top_k, E, alignment)`.
      alignment, roll, drop: as for `plan_permute`.

    Returns:
      PermutePlan, with row int32[P, T, E].

    Raises:
      TypeError: routing_map is neither of bools nor of integers, roll is not an integer, or a size is not an integer.
      ValueError: rank not 2 or 3, no experts, top_k, num_rows or alignment below 1, num_rows below the default without
        drop, roll not of rank 0 or [P], or T * E or the rows more than int32 counts.

    Costs no communication when P is sharded; T and E are held whole, so a map that is sharded over its experts is
    gathered. Time and memory are O(T * E) for the plan; `unpermute` takes as long as the fullest token has experts.
    """
    _check_map(routing_map)
    alignment = operator.index(alignment)
    num_tokens, num_experts = routing_map.shape[-2:]
    top_k = num_experts if top_k is None else min(operator.index(top_k), num_experts)
    if top_k < 1:
        raise ValueError(
            f"plan_permute_map: top_k and the number of experts must be >= 1; got top_k={top_k}, "
            f"routing_map.shape={routing_map.shape}; leave top_k out for any number"
        )
    worst = padded_rows(num_tokens * top_k, num_experts, alignment)
    num_rows = check_rows("plan_permute_map", num_rows, worst, num_tokens * num_experts, drop)
    map_PTE = routing_map if routing_map.ndim == 3 else routing_map[None]
    roll_P = group_roll("plan_permute_map", roll, map_PTE.shape[0], num_experts)
    roll_P = jnp.zeros(map_PTE.shape[0], jnp.int32) if roll_P is None else roll_P
    out = _plan(map_PTE, roll_P, num_rows=num_rows, alignment=alignment)
    return PermutePlan(*(out if routing_map.ndim == 3 else (x[0] for x in out)))


def _plan_reference(
    map_PTE: jax.Array, roll_P: jax.Array, *, num_rows: int, alignment: int
) -> tuple[jax.Array, ...]:
    def plan(map_TE: jax.Array, roll: jax.Array) -> tuple[jax.Array, ...]:
        return _plan_group(map_TE != 0, roll, num_rows, alignment)

    return jax.vmap(plan)(map_PTE, roll_P)


def _plan_group(
    map_TE: jax.Array, roll: jax.Array, num_rows: int, alignment: int
) -> tuple[jax.Array, ...]:
    """A count over (expert, token) in the order of rows numbers the entries: no sort, no scatter."""
    num_tokens, num_experts = map_TE.shape
    expert_e = (jnp.arange(num_experts, dtype=jnp.int32) + roll) % num_experts
    map_eT = map_TE.T[expert_e]
    seen_eT = jnp.cumsum(map_eT.reshape(-1), dtype=jnp.int32).reshape(map_eT.shape)
    count_e = jnp.sum(map_eT, axis=1, dtype=jnp.int32)
    start_e = jnp.cumsum(count_e, dtype=jnp.int32) - count_e
    size_e = -(-count_e // alignment) * alignment
    end_e = jnp.cumsum(size_e, dtype=jnp.int32)
    offset_e = end_e - size_e
    row_eT = seen_eT - 1 + (offset_e - start_e)[:, None]
    row_eT = jnp.where(map_eT & (row_eT < num_rows), row_eT, -1)
    place_E = (jnp.arange(num_experts, dtype=jnp.int32) - roll) % num_experts

    entry_M = jnp.arange(map_TE.size, dtype=jnp.int32)
    entry_N = choices_of_rows(entry_M, start_e, count_e, offset_e, end_e, num_rows)
    at_N = jnp.searchsorted(seen_eT.reshape(-1), entry_N + 1).astype(jnp.int32)
    place_N, token_N = at_N // max(num_tokens, 1), at_N % max(num_tokens, 1)
    source_N = jnp.where(entry_N < 0, -1, token_N * num_experts + expert_e[place_N])
    sizes_e = jnp.minimum(end_e, num_rows) - jnp.minimum(offset_e, num_rows)
    return row_eT[place_E].T, source_N, count_e, sizes_e


# Not the factor e: its role would be that of experts that a mesh axis shards.
_plan = Op(
    "plan_permute_map", _plan_reference, "p t m, p -> p t m, p n, p m, p m", whole=("t", "m")
)


def _check_map(routing_map: jax.Array) -> None:
    check_arrays("plan_permute_map", FLAGS, routing_map=routing_map)
    if routing_map.ndim not in (2, 3):
        raise ValueError(
            f"plan_permute_map: routing_map must be [P, T, E] or [T, E]; got shape={routing_map.shape}; "
            "reshape the leading dimensions into groups P"
        )
