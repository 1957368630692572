"""Rows in groups, and the one law of padding.

Rows are contiguous by group: group g of participant p owns the `group_sizes[p, g]` rows after those of the groups
before it. The rows past the last group are padding rows: undefined in what an op returns, and read by none. An op
selects the rows of its groups and never multiplies by zero, since padding may be NaN. Where a public function promises
zeros, the GEMM that makes its result clears them (its option `clear_padding`): by `cleared`, or in its kernel.

A group that is aligned may end in rows without a token (`holds_token` in `ops/row_map.py`). GEMMs read them: they are
zeros.

Dimension key: P participants, C rows per participant, G groups per participant.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp


def each_participant[T](function: Callable[..., T]) -> Callable[..., T]:
    """`jax.vmap(function)`; of one participant the function itself, which JAX traces in half the time."""

    @wraps(function)
    def of_all(*operands: Any) -> T:
        if jax.tree.leaves(operands)[0].shape[0] != 1:
            return jax.vmap(function)(*operands)
        out = function(*jax.tree.map(lambda x: x.reshape(x.shape[1:]), operands))
        stacked: T = jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), out)
        return stacked

    return of_all


@partial(jax.jit, static_argnames="num_rows")
def row_groups(group_sizes_PG: jax.Array, num_rows: int) -> jax.Array:
    """int32[P, C] group of each row; G for padding rows."""
    rows_C = jnp.arange(num_rows, dtype=jnp.int32)
    groups_of = each_participant(partial(group_of, row=rows_C))
    return groups_of(jnp.cumsum(group_sizes_PG, axis=1, dtype=jnp.int32))


def group_of(ends_G: jax.Array, row: jax.Array) -> jax.Array:
    """int32, like `row`: the group each lies in, G behind the last. Compares with all: no loop to trace and compile."""
    groups: jax.Array = jnp.searchsorted(ends_G, row, side="right", method="compare_all")
    return groups.astype(jnp.int32)


@partial(jax.jit, static_argnames="fill")
def of_rows(values_PG: jax.Array, groups_PC: jax.Array, fill: int = 0) -> jax.Array:
    """[P, C, ...] the value of each row's group; `fill` for padding rows."""
    take = each_participant(partial(jnp.take, axis=0, mode="fill", fill_value=fill))
    return take(values_PG, groups_PC)


def cleared(x: jax.Array, group_sizes_PG: jax.Array) -> jax.Array:
    """x [P, C, ...] with zeros in its padding rows, whatever they hold."""
    ends_P1 = jnp.sum(group_sizes_PG, axis=1, keepdims=True, dtype=jnp.int32)
    return selected(jnp.arange(x.shape[1]) < ends_P1, x)


def selected(live: jax.Array, x: jax.Array) -> jax.Array:
    """x [*live.shape, ...] where `live`; elsewhere zeros, whatever x holds. Traced without the calls in `jnp.where`."""
    live = jax.lax.broadcast_in_dim(live, x.shape, range(live.ndim))
    return jax.lax.select(live, x, _zeros_like(x))


def _zeros_like(x: jax.Array) -> jax.Array:
    """Zeros; 2^-127 in float8_e8m0fnu, whose zero would be NaN and make NaN of zero data."""
    if x.dtype == jnp.float8_e8m0fnu:
        return jax.lax.bitcast_convert_type(jnp.zeros(x.shape, jnp.uint8), x.dtype)
    return jnp.zeros_like(x)


def expand_trailing(values: jax.Array, ndim: int) -> jax.Array:
    """Values of the leading dimensions, to be broadcast over the others."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))
