"""EP group of one rank: a permutation.

dispatch: rows[n] = tokens[source[n] // K]
combine:  tokens[t] = sum_k rows[slot[t, k]]
"""

import jax

from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.ep.route import Axis, Route
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.wire import PLAIN, Wire, sum_dtype


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    del axis
    return move_rows(tokens_TD, RowMap(route.slot_TK, route.source_C))


def dispatch_parts(
    parts: tuple[jax.Array, ...], route: Route, *, axis: Axis
) -> tuple[jax.Array, ...]:
    """Each by itself: in one array they would be written twice more, to put them together and to take them apart."""
    return tuple(dispatch(part, route, axis=axis) for part in parts)


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN) -> jax.Array:
    """With a wire sums are rounded as in a group of more ranks."""
    del axis
    back = RowMap(route.slot_TK, route.source_C).inverse
    # Sums are rounded to the dtype of the rows in any case.
    if wire in (PLAIN, Wire(rows_CD.dtype.name)):
        return move_rows(rows_CD, back)
    sums_TD = move_rows(rows_CD.astype(sum_dtype(rows_CD.dtype, route.slot_TK.shape[1])), back)
    return wire.decode(wire.encode(sums_TD), sums_TD).astype(rows_CD.dtype)


def unsupported(exchange: Exchange) -> str | None:
    """Why the transport cannot do this exchange, or None."""
    return "it is for an EP group of 1 rank" if exchange.ep_size > 1 else None
