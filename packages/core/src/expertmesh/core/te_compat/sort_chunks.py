"""Moves chunks of consecutive rows into another order.

    out = concatenate([chunk[order[0]], chunk[order[1]], ..., rest])
    chunk[c] = x[start[c] : start[c] + split_sizes[c]],  start = exclusive cumsum of split_sizes

Dimension key: P row groups, N rows, D features, c chunks.
"""

import operator

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import INTEGERS, check_arrays
from expertmesh.core.ops.row_map import RowMap, move_rows

__all__ = ["plan_chunks", "sort_chunks"]


def plan_chunks(split_sizes: jax.Array, order: jax.Array, *, num_rows: int) -> RowMap:
    """Plans where each row goes: a map of N rows to N rows, for any number of `move_rows`.

    Args:
      split_sizes: int[P, c] or int[c], rows of each chunk of the input, 0 too; negative ones count as 0. Their sum must
        be countable in int32.
      order: int of the same shape: order[i] is the chunk that comes i-th; a permutation of range(c), not checked.
      num_rows: N. Rows beyond sum(split_sizes) stay where they are. If the chunks have more than N rows, the excess
        ones do not exist: a place that one of them would take holds 0 and has no gradient.

    Raises:
      TypeError: split_sizes or order is not of integers, or num_rows is not an integer.
      ValueError: shapes differ, rank not 1 or 2, or num_rows negative or more than int32 counts.

    Costs no communication when P is sharded; chunks are held whole.
    """
    check_arrays("plan_chunks", INTEGERS, split_sizes=split_sizes, order=order)
    if split_sizes.shape != order.shape or split_sizes.ndim not in (1, 2):
        raise ValueError(
            "plan_chunks: split_sizes and order must both be [c] or [P, c]; got "
            f"split_sizes.shape={split_sizes.shape}, order.shape={order.shape}; pass one place for each chunk"
        )
    if not 0 <= operator.index(num_rows) < 2**31:
        raise ValueError(
            f"plan_chunks: num_rows must be >= 0 and countable in int32; got num_rows={num_rows}; "
            "split the rows into groups P"
        )
    grouped = split_sizes.ndim == 2
    operands = (split_sizes, order) if grouped else (split_sizes[None], order[None])
    out = _plan(*operands, num_rows=operator.index(num_rows))
    return RowMap(*(out if grouped else (x[0] for x in out)))


def sort_chunks(x: jax.Array, split_sizes: jax.Array, order: jax.Array) -> jax.Array:
    """`move_rows(x, plan_chunks(split_sizes, order, num_rows=N))`: the chunks of x in another order.

    Args:
      x: [P, N, D], or [N, D].
      split_sizes, order: int[P, c], or int[c]; see `plan_chunks`.

    Returns:
      x's shape and dtype; rows beyond sum(split_sizes) stay where they are, forward and backward.

    Raises:
      TypeError, ValueError: see `plan_chunks` and `move_rows`.

    Costs no communication when P or D is sharded; N is held whole.
    """
    check_arrays("sort_chunks", x=x)
    check_arrays("sort_chunks", INTEGERS, split_sizes=split_sizes, order=order)
    if x.ndim < 2:
        raise ValueError(
            f"sort_chunks: x must be [P, N, D] or [N, D]; got x.shape={x.shape}; add the missing dimension"
        )
    return move_rows(x, plan_chunks(split_sizes, order, num_rows=x.shape[-2]))


def _plan_reference(
    size_Pc: jax.Array, order_Pc: jax.Array, *, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(lambda size_c, order_c: _plan_group(size_c, order_c, num_rows))(
        size_Pc, order_Pc
    )


def _plan_group(
    size_c: jax.Array, order_c: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    size_c = jnp.maximum(size_c, 0).astype(jnp.int32)
    end_c = jnp.cumsum(size_c, dtype=jnp.int32)
    new_end_c = jnp.cumsum(size_c[order_c], dtype=jnp.int32)
    start_c, new_start_c = end_c - size_c, new_end_c - size_c[order_c]
    place_c = jnp.argsort(order_c)
    return (
        _moved(end_c, new_start_c[place_c] - start_c, num_rows),
        _moved(new_end_c, start_c[order_c] - new_start_c, num_rows),
    )


def _moved(end_c: jax.Array, shift_c: jax.Array, num_rows: int) -> jax.Array:
    """Each row asks in which chunk it lies and adds its shift; rows beyond all chunks stay."""
    row_N = jnp.arange(num_rows, dtype=jnp.int32)
    chunk_N = jnp.searchsorted(end_c, row_N, side="right")
    return row_N + jnp.append(shift_c, jnp.int32(0))[chunk_N]


_plan = Op("plan_chunks", _plan_reference, "p c, p c -> p n, p n", whole=("c",))
