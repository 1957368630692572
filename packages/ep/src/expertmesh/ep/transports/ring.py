"""Every rank sees every token of its group.

    dispatch: rows[n] = all_gather(tokens)[source[n] // K]
    combine:  tokens = reduce_scatter(sum_k rows[row[g, k]]), in float32

Receives (R - 1) * T * D elements each way, whatever the routing is.
"""

import jax

from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.ep.route import Axis, Route, all_gather, sum_scatter, take_rows
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.wire import PLAIN, Wire


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    return take_rows(all_gather(tokens_TD, axis), route.token_C[:, None])


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN) -> jax.Array:
    del wire
    wide_CD = rows_CD.astype(accumulator_dtype(rows_CD.dtype))
    return sum_scatter(take_rows(wide_CD, route.row_GK), axis).astype(rows_CD.dtype)


def unsupported(exchange: Exchange) -> str | None:
    """Why the transport cannot do this exchange, or None."""
    return None if exchange.wire is None else "it adds on the way"
