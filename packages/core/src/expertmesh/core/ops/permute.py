"""Groups a shard's rows by expert (permute) and adds them up again per token (unpermute).

Dimension key: P token groups, T tokens, K choices per token, N rows, E experts, D features; e experts of one rank, C
rows of one rank. A choice is one (token, k) pair, numbered t * K + k. A row is a choice's copy of its token. Rows are
ordered by expert, then token, then k.
"""

import dataclasses
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import (
    FLOATS,
    INTEGERS,
    check_arrays,
    check_type,
    exceeds,
    is_routed,
    wide_ids,
)
from expertmesh.core.ops.groups import each_participant, group_of
from expertmesh.core.ops.row_map import (
    RowMap,
    check_fit,
    check_places,
    check_summed,
    holds_token,
    move_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PermutePlan(RowMap):
    """A RowMap from tokens to rows in groups. Made by `plan_permute`; without the P where topk_idx had none.

    With `rank(t, k)` the number of choices of the same expert before (t, k), and
    `offset[e] = sum_{e' < e} roundup(tokens_per_expert[e'], alignment)`:

    A plan of a routing map (`plan_permute_map`) has K = E: choice e of a token is expert e.

    Attributes:
      row: int32[P, T, K]; `offset[topk_idx[t, k]] + rank(t, k)`; -1 if not routed, or if that is >= num_rows.
      source: int32[P, N]; the choice t * K + k with row[t, k] = n; -1 where there is none (padding).
      tokens_per_expert: int32[P, E]; number of choices of each expert, dropped ones included.
      group_sizes: int32[P, E]; rows of each expert with its padding:
        `min(offset[e + 1], num_rows) - min(offset[e], num_rows)`.
    """

    tokens_per_expert: jax.Array
    group_sizes: jax.Array

    @property
    def token(self) -> jax.Array:
        """int32[P, N]: the token of each row, -1 for padding."""
        return self.source_row

    @property
    def group_offsets(self) -> jax.Array:
        """int32[P, E]: the first row of each expert, in its own group p: `min(offset[e], num_rows)`."""
        return jnp.cumsum(self.group_sizes, axis=-1, dtype=jnp.int32) - self.group_sizes

    @property
    def num_dropped(self) -> jax.Array:
        """int32[P]: routed choices that have no row."""
        held = jnp.sum(holds_token(self.source), axis=-1, dtype=jnp.int32)
        return jnp.sum(self.tokens_per_expert, axis=-1, dtype=jnp.int32) - held


class RowPlan(NamedTuple):
    """Rows of one rank among several that share the experts; see `plan_rows`."""

    row_TK: jax.Array
    source_C: jax.Array
    tokens_per_expert_e: jax.Array
    group_sizes_e: jax.Array
    total: jax.Array
    num_dropped: jax.Array


def plan_rows(
    topk_idx_TK: jax.Array,
    *,
    num_experts: int,
    capacity: int,
    alignment: int = 1,
    num_ranks: int = 1,
    rank: int | jax.Array = 0,
) -> RowPlan:
    """Assigns each choice a row in the buffer of its expert's rank.

    Args:
      topk_idx_TK: int[T, K]; an id outside [0, num_experts) is not routed.
      num_experts: E; rank r holds experts [r * e, (r + 1) * e) with e = E / num_ranks.
      capacity: C, rows of each rank's buffer; rows at positions >= C are dropped.
      alignment: each expert's rows are padded to a multiple of it.
      num_ranks: how many ranks share the experts.
      rank: the one whose rows are described; may be traced.

    Returns:
      row_TK: int32, the row of each choice in its own rank's buffer; -1 if not routed or dropped.
      source_C: int32, the choice of each row of `rank`; -1 for padding.
      tokens_per_expert_e, group_sizes_e: int32, of the experts of `rank`: choices; rows with padding, clipped to C.
      total: int32, rows with padding that `rank` needs.
      num_dropped: int32, choices of `rank`'s experts that have no row.
    """
    plan = _plan(
        topk_idx_TK[None],
        jnp.asarray(rank, jnp.int32)[None],
        num_experts=num_experts,
        num_rows=capacity,
        alignment=alignment,
        num_ranks=num_ranks,
    )
    return RowPlan(*(x[0] for x in plan))


def _plan_reference(
    topk_idx_PTK: jax.Array, rank_P: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    out: tuple[jax.Array, ...] = each_participant(partial(_plan_group, **options))(
        topk_idx_PTK, rank_P
    )
    return out


@partial(jax.jit, static_argnames=("num_experts", "num_rows", "alignment", "num_ranks"))
def _plan_group(
    topk_idx_TK: jax.Array,
    rank: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    alignment: int,
    num_ranks: int,
) -> tuple[jax.Array, ...]:
    """Integers only; two sorts; everything else gathers."""
    num_local = num_experts // num_ranks
    ids_N, order_N = _sorted(_expert_ids(topk_idx_TK, num_experts))
    start_E1 = group_of(ids_N, jnp.arange(-1, num_experts, dtype=jnp.int32))
    count_E = start_E1[1:] - start_E1[:-1]
    size_E = jax.lax.div(count_E + (alignment - 1), jnp.int32(alignment)) * alignment
    end_E = _cumsum_per_rank(size_E, num_ranks)
    offset_E = end_E - size_E

    def mine(x_E: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_E, rank * num_local, num_local)

    count_e, end_e, offset_e = mine(count_E), mine(end_E), mine(offset_E)
    return (
        _rows_of_choices(ids_N, order_N, start_E1, offset_E, num_rows).reshape(topk_idx_TK.shape),
        choices_of_rows(order_N, mine(start_E1), count_e, offset_e, end_e, num_rows),
        count_e,
        jnp.minimum(end_e, num_rows) - jnp.minimum(offset_e, num_rows),
        end_e[-1],
        jnp.sum(count_e - jnp.clip(num_rows - offset_e, 0, count_e), dtype=jnp.int32),
    )


def _expert_ids(topk_idx_TK: jax.Array, num_experts: int) -> jax.Array:
    """Flat int32 ids; one past the last expert stands for every choice that is not routed."""
    topk_idx_TK = wide_ids(topk_idx_TK)
    routed = is_routed(topk_idx_TK, num_experts)
    # Select before the cast: a wide id must not wrap around into the range.
    return jnp.where(routed, topk_idx_TK, num_experts).astype(jnp.int32).reshape(-1)


def _sorted(x_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 values in order, equal ones as they come, and where each was."""
    values_N, order_N = jax.lax.sort((x_N, jnp.arange(x_N.size, dtype=jnp.int32)), num_keys=1)
    return values_N, order_N


def _cumsum_per_rank(size_E: jax.Array, num_ranks: int) -> jax.Array:
    return jnp.cumsum(size_E.reshape(num_ranks, -1), axis=1, dtype=jnp.int32).reshape(-1)


def _rows_of_choices(
    ids_N: jax.Array, order_N: jax.Array, start_E1: jax.Array, offset_E: jax.Array, capacity: int
) -> jax.Array:
    """The expert's offset replaces its start in a choice's position; the choices take their own order again."""
    shift_E1 = jnp.append(offset_E - start_E1[:-1], jnp.int32(capacity))  # the last: never routed
    row_N = jnp.arange(ids_N.size, dtype=jnp.int32) + shift_E1[ids_N]
    _, row_N = jax.lax.sort((order_N, jnp.where(row_N < capacity, row_N, -1)), num_keys=1)
    return row_N


def choices_of_rows(
    order_N: jax.Array,
    start_e: jax.Array,
    count_e: jax.Array,
    offset_e: jax.Array,
    end_e: jax.Array,
    capacity: int,
) -> jax.Array:
    """Each row asks which expert's zone it lies in, and how far: no scatter."""
    row_C = jnp.arange(capacity, dtype=jnp.int32)
    expert_C = group_of(end_e, row_C)
    # Behind the last zone no row is an expert's.
    last_e1, shift_e1 = (
        jnp.append(x, jnp.int32(0)) for x in (offset_e + count_e, start_e - offset_e)
    )
    padded_N1 = jnp.append(order_N, jnp.int32(-1))
    position_C = row_C + shift_e1[expert_C]
    return padded_N1[jnp.where(row_C < last_e1[expert_C], position_C, order_N.size)]


def _plan_unsupported(
    topk_idx: jax.Array,
    rank: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    alignment: int,
    num_ranks: int,
) -> str | None:
    del rank, alignment, num_ranks
    if not topk_idx.size or not num_rows or topk_idx.shape[0] >= 2**16:
        return f"there must be choices, in fewer than 2^16 groups, and rows; got {topk_idx.shape}, {num_rows} rows"
    if num_experts > MAX_EXPERTS:
        return f"there may be at most {MAX_EXPERTS} experts; there are {num_experts}"
    return None


MAX_EXPERTS = 512

_plan = Op(
    "plan_permute",
    _plan_reference,
    "p t k, p -> p t k, p n, p e, p e, p, p",
    whole=("t", "k"),
    kernels=(Kernel.triton("expertmesh.core.kernels.triton.permute", "plan", _plan_unsupported),),
)


def padded_rows(num_choices: int, num_experts: int, alignment: int = 1) -> int:
    """Rows that suffice for any routing: `((num_choices + E * (alignment - 1)) // alignment) * alignment`.

    Raises:
      ValueError: a negative number of choices, or an expert count or alignment below 1.
    """
    if num_choices < 0 or num_experts < 1 or alignment < 1:
        raise ValueError(
            "padded_rows: num_choices must be >= 0, num_experts and alignment >= 1; got "
            f"num_choices={num_choices}, num_experts={num_experts}, alignment={alignment}; "
            "alignment=1 means no padding"
        )
    return (num_choices + num_experts * (alignment - 1)) // alignment * alignment


def padded_rows_sharded(
    num_choices_local: int, num_experts: int, num_shards: int, alignment: int = 1
) -> int:
    """Rows of all shards together that suffice for any routing: `padded_rows` of one shard times `num_shards`.

    Args:
      num_choices_local: choices of one shard: its tokens times K.
      num_experts: E; every shard pads every expert.
      num_shards: shards that permute on their own (the P of `[P, T, D]`).
      alignment: as for `plan_permute`.

    Raises:
      ValueError: as `padded_rows`, or num_shards below 1.
    """
    if num_shards < 1:
        raise ValueError(
            f"padded_rows_sharded: num_shards must be >= 1; got num_shards={num_shards}; pass the size of the mesh axes"
        )
    return num_shards * padded_rows(num_choices_local, num_experts, alignment)


def shard_rows(
    num_rows: int,
    num_choices_local: int,
    num_experts: int,
    num_shards: int,
    alignment: int = 1,
    *,
    drop: bool = False,
) -> int:
    """Each shard's part of `num_rows` rows: `num_rows / num_shards`, the num_rows of its `plan_permute`.

    Args:
      num_rows: rows of all shards together.
      num_choices_local, num_experts, num_shards, alignment: as for `padded_rows_sharded`.
      drop: allow fewer rows than any routing fits into.

    Raises:
      ValueError: num_rows is not divisible by num_shards, or is below `padded_rows_sharded` without drop.
    """
    worst = padded_rows_sharded(num_choices_local, num_experts, num_shards, alignment)
    if num_rows % num_shards:
        raise ValueError(
            "shard_rows: num_rows must be divisible by num_shards; got "
            f"num_rows={num_rows}, num_shards={num_shards}; padded_rows_sharded gives such a number"
        )
    if num_rows < worst and not drop:
        raise ValueError(
            f"shard_rows: num_rows must be at least {worst}, which any routing fits into; got num_rows={num_rows}; "
            "use padded_rows_sharded, or pass drop=True to drop the last rows"
        )
    return num_rows // num_shards


def plan_permute(
    topk_idx: jax.Array,
    *,
    num_experts: int,
    num_rows: int | None = None,
    alignment: int = 1,
    roll: int | jax.Array = 0,
    drop: bool = False,
) -> PermutePlan:
    """Decides the row of every choice: experts ascend, inside an expert tokens, inside a token k.

    Args:
      topk_idx: int[P, T, K] or int[T, K]; an id outside [0, num_experts) (such as -1) is not routed. Equal ids of one
        token are separate rows.
      num_experts: E.
      num_rows: N. Default: `padded_rows(T * K, E, alignment)`, which never drops.
      alignment: each expert's rows are padded to a multiple of it; 1 means no padding.
      roll: expert `(e + roll) % E` takes the place of expert e everywhere: in the order of rows, tokens_per_expert and
        group_sizes. int or int32[] or int32[P] (one for each group; may be traced): a ring of experts.
      drop: allow an N below the default. Rows at positions >= N are then dropped, so the highest experts (after the
        roll) and latest tokens first; `num_dropped` of the plan counts them.

    Returns:
      PermutePlan. Groups p never mix. Rows and choices are int32: 2^31 of them in a group is an error. Their features
      may be more: rows move by a gather along one dimension, never by a flat offset.

    Raises:
      TypeError: topk_idx is not an array of integers, roll is not an integer, or a size is not an integer.
      ValueError: rank not 2 or 3, num_experts, num_rows or alignment below 1, num_rows below the default without drop,
        roll not of rank 0 or [P], or more rows than int32 counts.

    Costs no communication when P is sharded; T and K are held whole.
    """
    _check_topk_idx("plan_permute", topk_idx)
    num_experts, alignment = operator.index(num_experts), operator.index(alignment)
    num_choices = topk_idx.shape[-2] * topk_idx.shape[-1]
    worst = padded_rows(num_choices, num_experts, alignment)
    num_rows = check_rows("plan_permute", num_rows, worst, num_choices, drop)
    group_PTK = _as_group(topk_idx, 3)
    row, source, tokens_per_expert, group_sizes, _, _ = _plan(
        _rolled(
            group_PTK,
            group_roll("plan_permute", roll, group_PTK.shape[0], num_experts),
            num_experts,
        ),
        jnp.zeros(group_PTK.shape[0], jnp.int32),
        num_experts=num_experts,
        num_rows=num_rows,
        alignment=alignment,
        num_ranks=1,
    )
    out = row, source, tokens_per_expert, group_sizes
    return PermutePlan(*(out if topk_idx.ndim == 3 else (x[0] for x in out)))


def check_rows(
    function: str, num_rows: int | None, worst: int, num_choices: int, drop: bool
) -> int:
    """The number of rows of a plan: what the caller asks for, or `worst`, which never drops."""
    num_rows = worst if num_rows is None else operator.index(num_rows)
    if num_rows < 1 and worst > 0:
        raise ValueError(
            f"{function}: num_rows must be >= 1; got num_rows={num_rows}; "
            "leave it out for the number that never drops"
        )
    if num_rows < worst and not drop:
        raise ValueError(
            f"{function}: num_rows must be at least {worst}, which any routing fits into; got num_rows={num_rows}; "
            "leave it out, or pass drop=True to drop the last rows"
        )
    if any(exceeds(count, 2**31 - 1) for count in (worst, num_rows, num_choices)):
        raise ValueError(
            f"{function}: rows must be countable in int32; got {num_choices} choices, num_rows={num_rows}, "
            f"of which any routing needs {worst}; split the tokens into groups P"
        )
    return num_rows


def group_roll(
    function: str, roll: int | jax.Array, num_groups: int, num_experts: int
) -> jax.Array | None:
    """`roll` as int32[P], in [0, num_experts), or None for no roll."""
    if isinstance(roll, int):
        return jnp.full(num_groups, roll % num_experts, jnp.int32) if roll else None
    roll = jnp.asarray(roll)
    if not jnp.issubdtype(roll.dtype, jnp.integer):
        raise TypeError(
            f"{function}: roll must be integers; got dtype={roll.dtype}; pass a number of experts"
        )
    if roll.shape not in ((), (num_groups,)):
        raise ValueError(
            f"{function}: roll must have rank 0 or one value per group; got roll.shape={roll.shape} for "
            f"{num_groups} groups; broadcast it to [P]"
        )
    return jnp.broadcast_to((wide_ids(roll) % num_experts).astype(jnp.int32), (num_groups,))


def _rolled(topk_idx_PTK: jax.Array, roll_P: jax.Array | None, num_experts: int) -> jax.Array:
    """The ids by the places of their experts; -1 for those not routed."""
    if roll_P is None:
        return topk_idx_PTK
    topk_idx_PTK = wide_ids(topk_idx_PTK)
    routed = is_routed(topk_idx_PTK, num_experts)
    ids = jnp.where(routed, topk_idx_PTK, 0).astype(jnp.int32)
    return jnp.where(routed, (ids - roll_P[:, None, None]) % num_experts, -1)


def permute(x: jax.Array, plan: PermutePlan) -> jax.Array:
    """`move_rows(x, plan)`: each token at its rows, out[p, n] = x[p, source[p, n] // K], and 0 where source is -1.

    Args:
      x: [P, T, D], or [T, D] for a plan of [T, K]; any dtype (differentiable if floating).
      plan: from plan_permute, with the same P and T.

    Returns:
      [P, N, D] (or [N, D]) in x's dtype. Padding rows are exactly 0 and have no gradient. The cotangent of a token is
      the sum of its rows' cotangents, accumulated in float32.

    Raises:
      ValueError: x does not fit the plan.

    Costs no communication when P or D is sharded; T and the plan are held whole.
    """
    check_type("permute", PermutePlan, "pass what plan_permute made", plan=plan)
    check_fit("permute", plan, x=x)
    return move_rows(x, plan)


def unpermute(y: jax.Array, plan: PermutePlan, topk_weights: jax.Array | None = None) -> jax.Array:
    """`move_rows(y, plan.inverse, topk_weights)`: adds up each token's rows.

        out[p, t] = sum_k topk_weights[p, t, k] * y[p, row[p, t, k]]

    Args:
      y: float[P, N, D], or [N, D] for a plan of [T, K].
      plan: from plan_permute, with the same P and N.
      topk_weights: float[P, T, K] (or [T, K]), or None for ones.

    Returns:
      [P, T, D] (or [T, D]) in y's dtype, accumulated in float32. A token without rows is 0. The cotangent of padding
      rows is exactly 0, that of a weight without a row is 0, any other weight's is <dout[t], y[row]> in float32.

    Raises:
      TypeError: topk_weights, or rows that are weighed or added up, are not floating.
      ValueError: y or topk_weights does not fit the plan.

    Costs no communication when P or D is sharded, but that the weights' cotangent is summed over the axes of D; N is
    held whole.
    """
    check_type("unpermute", PermutePlan, "pass what plan_permute made", plan=plan)
    check_fit("unpermute", plan.inverse, y=y)
    check_summed("unpermute", plan.inverse, topk_weights, y=y)
    if topk_weights is not None:
        check_arrays("unpermute", FLOATS, topk_weights=topk_weights)
        check_places("unpermute", plan.inverse, topk_weights=topk_weights)
    return move_rows(y, plan.inverse, topk_weights)


def _as_group(x: jax.Array, ndim: int) -> jax.Array:
    """Adds P = 1 where it is missing."""
    return x if x.ndim == ndim else x[None]


def _check_topk_idx(function: str, topk_idx: jax.Array) -> None:
    check_arrays(function, INTEGERS, topk_idx=topk_idx)
    if topk_idx.ndim not in (2, 3):
        raise ValueError(
            f"{function}: topk_idx must be [P, T, K] or [T, K]; got shape={topk_idx.shape}; "
            "reshape the leading dimensions into groups P"
        )
