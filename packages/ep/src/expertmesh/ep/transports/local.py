"""EP group of one rank: a permutation.

dispatch: rows[n] = tokens[source[n] // K]
combine:  tokens[t] = sum_k rows[slot[t, k]]
"""

import jax

from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.ep.route import Axis, Route


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    del axis
    return move_rows(tokens_TD, RowMap(route.slot_TK, route.source_C))


def dispatch_parts(
    parts: tuple[jax.Array, ...], route: Route, *, axis: Axis
) -> tuple[jax.Array, ...]:
    """Each by itself: in one array they would be written twice more, to put them together and to take them apart."""
    return tuple(dispatch(part, route, axis=axis) for part in parts)


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    del axis
    return move_rows(rows_CD, RowMap(route.slot_TK, route.source_C).inverse)
