"""Which experts are copied to which ranks, and how many rows go to each copy, so that all ranks compute equally many.

Each rank has S spare slots, for copies of other ranks' experts. A step moves rows from the fullest rank, of one of its
experts x, to a rank q that has a free slot; `room` is what a rank has below the target, `excess` what it has above,
`give` what can leave: min(excess, rows of x left). The first of these that exists, ties to the lower rank:

    complete   the largest room <= give of any q                 moves room
    begin      the largest room of a q with two free slots       moves max(give, room / free slots), no more than x has
    fill       the smallest room of a q                          moves room, no more than x has

If more than `give` moves, the sender is below the target afterwards, and receives. Each step takes a slot, so there are
at most R S steps. The mean load is not always reachable, and no choice of x is always the best. So all steps run for
each of `LEVELS` targets between the mean and the fullest rank's load, denser near the mean: once with x as the rank's
largest expert, and once as the smallest that has the excess, if one has. The plan whose fullest rank has the fewest
rows wins. Every device makes the same plan.

Dimension key: E experts, R ranks, e = E / R experts of a rank, S spare slots of a rank, L = 2 LEVELS plans.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op, vary_like
from expertmesh.core.operands import INTEGERS, as_counts, check_arrays

__all__ = ["CopyPlan", "least_rows_of_a_copy", "plan_copies"]

LEVELS = 64


class CopyPlan(NamedTuple):
    """What the spare slots hold.

    Attributes:
      expert: int32[R, S], the expert that each spare slot holds a copy of, -1 for none; no rank holds one twice.
      rows: int32[R, S], how many of the expert's rows the copy takes. The expert's own rank and other copies take the
        rest.
      load: int32[R], the rows of each rank.
    """

    expert: jax.Array
    rows: jax.Array
    load: jax.Array


def plan_copies(
    tokens_per_expert: jax.Array, *, num_ranks: int, num_spare: int, least_rows: int = 0
) -> CopyPlan:
    """Levels the ranks' rows by copies of experts, by the module's steps.

    Args:
      tokens_per_expert: integers [E], the rows of each expert, over all ranks, 2^31 - 1 of them at most.
      num_ranks: R; rank r holds experts [r * E / R, (r + 1) * E / R).
      num_spare: S, spare slots of each rank.
      least_rows: each copy takes more rows than this, and a rank that is no further above the target gives none away;
        see `least_rows_of_a_copy`.

    Returns:
      CopyPlan. On one device: inside your own `shard_map` each device makes the same of the same counts.

    Raises:
      TypeError: counts that are not an array of integers; an option that is no int.
      ValueError: counts that are not [E], a number of ranks below 1 or that does not divide E, a negative `num_spare`
        or `least_rows`.

    On an NVIDIA GPU one kernel; else a loop of R S steps. No value leaves the device.
    """
    check_arrays("plan_copies", INTEGERS, tokens_per_expert=tokens_per_expert)
    (num_ranks,) = as_counts("plan_copies", num_ranks=num_ranks)
    num_spare, least_rows = as_counts(
        "plan_copies", least=0, num_spare=num_spare, least_rows=least_rows
    )
    if tokens_per_expert.ndim != 1 or tokens_per_expert.size % num_ranks:
        raise ValueError(
            "plan_copies: tokens_per_expert must be [E], with E divisible by num_ranks; "
            f"got shape={tokens_per_expert.shape}, num_ranks={num_ranks}; pass one count for each expert"
        )
    counts_Re = tokens_per_expert.astype(jnp.int32).reshape(num_ranks, -1)
    if num_spare == 0 or counts_Re.size == 0:
        none_RS = jnp.zeros((num_ranks, num_spare), jnp.int32)
        return CopyPlan(none_RS - 1, none_RS, jnp.sum(counts_Re, axis=1, dtype=jnp.int32))
    options = dict(num_spare=num_spare, least_rows=least_rows, levels=LEVELS)
    return best_of(CopyPlan(*plan_op(counts_Re, **options)))


def best_of(plans: CopyPlan) -> CopyPlan:
    """Of plans [L, ...] the first whose fullest rank has the least."""
    best = jnp.argmin(jnp.max(plans.load, axis=1))
    return CopyPlan(*(x[best] for x in plans))


def least_rows_of_a_copy(*, flops_per_second: float, bytes_per_second: float) -> int:
    """The number of rows above which a copy saves more time than it costs in training: flops_per_second /
    bytes_per_second.

    A row of an expert of n weights costs 6 n floating-point operations in forward and backward. A copy costs 6 n bytes:
    n numbers of 16 bits one way, n of 32 bits for the gradient back. n cancels out. The model counts the bytes of a
    transport that sends a copy only to the rank that needs it, and leaves out that other work may hide either.

    Args:
      flops_per_second: of a GPU's grouped GEMMs.
      bytes_per_second: that a GPU receives from another.

    Raises:
      ValueError: a rate that is not above 0.
    """
    if not (flops_per_second > 0 and bytes_per_second > 0):
        raise ValueError(
            "least_rows_of_a_copy: rates must be above 0; "
            f"got flops_per_second={flops_per_second}, bytes_per_second={bytes_per_second}; measure them"
        )
    return math.ceil(flops_per_second / bytes_per_second)


_NEVER = jnp.iinfo(jnp.int32).min


class _State(NamedTuple):
    """Of one level, between two steps.

    Attributes:
      left_Re: rows that each expert has at its own rank.
      load_R: rows of each rank.
      free_R: spare slots that hold nothing.
      expert_RS, rows_RS: of the others.
      goes_on: whether the last step found something to move.
    """

    left_Re: jax.Array
    load_R: jax.Array
    free_R: jax.Array
    expert_RS: jax.Array
    rows_RS: jax.Array
    goes_on: jax.Array


def _reference(
    counts_Re: jax.Array, *, num_spare: int, least_rows: int, levels: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    plan_L = jnp.arange(2 * levels, dtype=jnp.int32)
    plan = partial(
        _plan_level, counts_Re, num_spare=num_spare, least_rows=least_rows, levels=levels
    )
    out: tuple[jax.Array, jax.Array, jax.Array] = jax.vmap(plan)(plan_L % levels, plan_L >= levels)
    return out


def _target(load_R: jax.Array, level: jax.Array, levels: int) -> jax.Array:
    """The mean for level 0, the fullest rank's load for the last."""
    num_ranks, most = load_R.shape[0], jnp.max(load_R)
    whole, rest = (
        jnp.sum(part_R, dtype=jnp.int32) for part_R in (load_R // num_ranks, load_R % num_ranks)
    )
    mean = whole + -(-rest // num_ranks)
    part = (level * level * level).astype(jnp.float32) * jnp.float32((levels - 1) ** -3)
    above = jnp.ceil((most - mean).astype(jnp.float32) * part)
    return jnp.minimum(mean + above.astype(jnp.int32), most)


def _plan_level(
    counts_Re: jax.Array,
    level: jax.Array,
    fits: jax.Array,
    *,
    num_spare: int,
    least_rows: int,
    levels: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(expert_RS, rows_RS, load_R) by the steps for one target; `fits`: of the smallest expert that has the excess."""
    load_R = jnp.sum(counts_Re, axis=1, dtype=jnp.int32)
    none_RS = jnp.zeros((counts_Re.shape[0], num_spare), jnp.int32)
    start = _State(
        left_Re=counts_Re,
        load_R=load_R,
        free_R=jnp.full_like(load_R, num_spare),
        expert_RS=none_RS - 1,
        rows_RS=none_RS,
        goes_on=jnp.array(True),
    )
    target = _target(load_R, level, levels)
    step = partial(_step, target=target, fits=fits, least_rows=least_rows)
    end = jax.lax.while_loop(lambda state: state.goes_on, step, vary_like((counts_Re,), start))
    return end.expert_RS, end.rows_RS, end.load_R


def _step(state: _State, *, target: jax.Array, fits: jax.Array, least_rows: int) -> _State:
    left_Re, load_R, free_R, expert_RS, rows_RS, _ = state
    ranks_R = jnp.arange(load_R.size, dtype=jnp.int32)
    own_R = jnp.max(left_Re, axis=1)
    excess_R = jnp.where(own_R > least_rows, load_R - target, 0)
    sender = jax.lax.argmax(excess_R, 0, jnp.int32)
    left_e = left_Re[sender]
    enough_e = fits & (left_e >= excess_R[sender])
    wanted_e = jnp.where(jnp.any(enough_e), jnp.where(enough_e, -left_e, _NEVER), left_e)
    local = jax.lax.argmax(wanted_e, 0, jnp.int32)
    expert = sender * left_Re.shape[1] + local
    have = left_e[local]
    give = jnp.minimum(excess_R[sender], have)
    held_R = jnp.any(expert_RS == expert, axis=1)
    open_R = (free_R > 0) & (ranks_R != sender) & ~held_R & (give > least_rows)
    room_R = target - load_R
    fits_R = (room_R > least_rows) & (room_R <= give)
    larger_R = room_R > give
    # (who, by what, how much)
    rules = (
        (open_R & fits_R, room_R, room_R),
        (open_R & larger_R & (free_R > 1), room_R, jnp.maximum(give, -(-room_R // jnp.maximum(free_R, 1)))),
        (open_R & larger_R, -room_R, room_R),
    )  # fmt: skip
    receiver, moved, found = jnp.int32(0), jnp.int32(0), jnp.array(False)
    for mask_R, key_R, rows_R in reversed(rules):
        best = jax.lax.argmax(jnp.where(mask_R, key_R, _NEVER), 0, jnp.int32)
        here = jnp.any(mask_R)
        receiver = jnp.where(here, best, receiver)
        moved = jnp.where(here, jnp.minimum(rows_R[best], have), moved)
        found |= here
    to_R, from_R = (ranks_R == receiver) & found, (ranks_R == sender) & found
    slot_S = jnp.arange(expert_RS.shape[1], dtype=jnp.int32)
    at_RS = to_R[:, None] & (slot_S == slot_S.size - free_R[:, None])
    at_Re = from_R[:, None] & (jnp.arange(left_Re.shape[1], dtype=jnp.int32) == local)
    return _State(
        left_Re=left_Re - jnp.where(at_Re, moved, 0),
        load_R=load_R + jnp.where(to_R, moved, 0) - jnp.where(from_R, moved, 0),
        free_R=free_R - to_R,
        expert_RS=jnp.where(at_RS, expert, expert_RS),
        rows_RS=jnp.where(at_RS, moved, rows_RS),
        goes_on=found,
    )


MAX_RANKS, MAX_SPARE = 1024, 63


def _unsupported(counts_Re: jax.Array, *, num_spare: int, **options: int) -> str | None:
    del options
    num_ranks, num_local = counts_Re.shape
    if num_ranks > MAX_RANKS or num_spare > MAX_SPARE or num_local * num_ranks > 8192:
        return (
            f"there may be at most {MAX_RANKS} ranks, {MAX_SPARE} spare slots and 8192 experts; "
            f"there are {num_ranks}, {num_spare} and {num_local * num_ranks}"
        )
    return None


plan_op = Op(
    "ep_plan_copies",
    _reference,
    "r x -> l r s, l r s, l r",
    whole=("r", "x", "l", "s"),
    kernels=(Kernel.triton("expertmesh.core.kernels.triton.plan_copies", "plan", _unsupported),),
)
