"""EP group of one rank: a permutation.

dispatch: rows[n] = tokens[source[n] // K]
combine:  tokens[t] = sum_k rows[slot[t, k]]
"""

import jax

from expertmesh.core.ops.permute import spread_rows
from expertmesh.ep.route import Axis, Route, take_rows


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    del axis
    rows_CD: jax.Array = spread_rows(tokens_TD, route.slot_TK, route.source_C)
    return rows_CD


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    del axis
    return take_rows(rows_CD, route.slot_TK)
