"""The integers of a ragged all-to-all of expert rows, and the order of rows around it. Pure; no communication here.

    sends[s, r] = sum of counts[s, e] over the experts e of shard r: rows that go from s to r

Before the exchange a shard's rows ascend by expert; after it they ascend by (source, local expert).

Dimension key: R shards, E experts, g local experts (E / R), N rows of one shard's buffer, D features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from expertmesh.core.operands import INTEGERS, check_arrays
from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.core.te_compat.sort_chunks import plan_chunks

__all__ = [
    "RaggedParams",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "missing_rows",
    "ragged_params",
]


class RaggedParams(NamedTuple):
    """What `jax.lax.ragged_all_to_all` takes on one shard, in its order; each int32[R].

    Attributes:
      input_offsets: first row of the block for each shard, in this shard's input.
      send_sizes: rows for each shard.
      output_offsets: where this shard's block begins in each shard's output.
      recv_sizes: rows from each shard.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def ragged_params(
    counts: jax.Array, shard_id: int | jax.Array, *, reverse: bool = False
) -> RaggedParams:
    """Offsets and sizes of the exchange that brings rows to their experts' shards, or of the way back.

    With `S = sends`, or its transpose for the way back, and `me = shard_id`:
    send_sizes = S[me], recv_sizes = S[:, me], input_offsets[r] = sum_{q < r} S[me, q],
    output_offsets[r] = sum_{s < me} S[s, r].

    Args:
      counts: int[R, E]; rows of each shard for each global expert. R is read from the shape; expert e is shard
        `e // (E / R)`'s.
      shard_id: this shard, in [0, R); may be traced, as `jax.lax.axis_index` is.
      reverse: for the way back.

    Returns:
      RaggedParams. Blocks lie without gaps, in the order of shards, on both sides. The receiver must have room for
      `sum(recv_sizes)` rows (`missing_rows`); all sums must be countable in int32.

    Raises:
      TypeError: counts is not of integers.
      ValueError: counts is not [R, E] with E divisible by R.
    """
    sends_RR = _sends("ragged_params", counts)
    sends_RR = sends_RR.T if reverse else sends_RR
    before_RR = jnp.cumsum(sends_RR, axis=0, dtype=jnp.int32) - sends_RR
    send_R, recv_R = _at(sends_RR, shard_id), _at(sends_RR.T, shard_id)
    input_R = jnp.cumsum(send_R, dtype=jnp.int32) - send_R
    return RaggedParams(input_R, send_R, _at(before_RR, shard_id), recv_R)


def missing_rows(counts: jax.Array, *, num_rows: int) -> jax.Array:
    """How many rows each shard's receive buffer is too small: max(sum_s sends[s, r] - num_rows, 0).

    Args:
      counts: int[R, E], as for `ragged_params`.
      num_rows: N, rows of each receive buffer; `R * T * min(K, E / R)` is never too small, for T tokens of each shard
        with K different experts.

    Returns:
      int32[R]; all 0 where the exchange is sound.

    Raises:
      TypeError, ValueError: as `ragged_params`.
    """
    received_R = jnp.sum(_sends("missing_rows", counts), axis=0, dtype=jnp.int32)
    return jnp.maximum(received_R - num_rows, 0)


def local_permute_after_a2a(
    x: jax.Array, counts: jax.Array, shard_id: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Reorders received rows from (source, local expert) to (local expert, source).

    Args:
      x: [N, D]; rows as the exchange leaves them. Rows past the received ones stay where they are.
      counts: int[R, E], as for `ragged_params`.
      shard_id: this shard.

    Returns:
      The rows [N, D], and group_sizes int32[g], the rows of each local expert. Differentiable in x.

    Raises:
      TypeError, ValueError: as `ragged_params`, or x is not [N, D].
    """
    check_arrays("local_permute_after_a2a", x=x)
    plan = _local_plan("local_permute_after_a2a", x, counts, shard_id)
    return move_rows(x, plan), jnp.sum(_mine(counts, shard_id), axis=0, dtype=jnp.int32)


def local_unpermute_before_a2a(
    y: jax.Array, counts: jax.Array, shard_id: int | jax.Array
) -> jax.Array:
    """The inverse of `local_permute_after_a2a`: back to (source, local expert), for the exchange's way back.

    Args:
      y: [N, D].
      counts, shard_id: as for `local_permute_after_a2a`.

    Returns:
      [N, D]. Differentiable in y.

    Raises:
      TypeError, ValueError: as `local_permute_after_a2a`.
    """
    check_arrays("local_unpermute_before_a2a", y=y)
    return move_rows(y, _local_plan("local_unpermute_before_a2a", y, counts, shard_id).inverse)


def _local_plan(
    function: str, x: jax.Array, counts: jax.Array, shard_id: int | jax.Array
) -> RowMap:
    _check_counts(function, counts)
    if x.ndim != 2:
        raise ValueError(
            f"{function}: the rows of one shard must be [N, D]; got shape={x.shape}; call it inside shard_map"
        )
    size_Rg = _mine(counts, shard_id)
    order_gR = jnp.arange(size_Rg.size, dtype=jnp.int32).reshape(size_Rg.shape).T
    return plan_chunks(size_Rg.reshape(-1), order_gR.reshape(-1), num_rows=x.shape[0])


def _mine(counts_RE: jax.Array, shard_id: int | jax.Array) -> jax.Array:
    """int32[R, g]: rows from each shard for each of this shard's experts."""
    num_shards = counts_RE.shape[0]
    blocks_RRg = counts_RE.astype(jnp.int32).reshape(num_shards, num_shards, -1)
    return _at(blocks_RRg.swapaxes(0, 1), shard_id)


def _at(x: jax.Array, shard_id: int | jax.Array) -> jax.Array:
    out: jax.Array = jax.lax.dynamic_index_in_dim(x, shard_id, keepdims=False)
    return out


def _sends(function: str, counts_RE: jax.Array) -> jax.Array:
    _check_counts(function, counts_RE)
    num_shards = counts_RE.shape[0]
    blocks_RRg = counts_RE.astype(jnp.int32).reshape(num_shards, num_shards, -1)
    return jnp.sum(blocks_RRg, axis=2, dtype=jnp.int32)


def _check_counts(function: str, counts: jax.Array) -> None:
    check_arrays(function, INTEGERS, counts=counts)
    if counts.ndim != 2 or counts.shape[0] < 1 or counts.shape[1] % counts.shape[0]:
        raise ValueError(
            f"{function}: counts must be [R, E] with E divisible by R; got counts.shape={counts.shape}; "
            "gather the counts of every shard for every expert"
        )
