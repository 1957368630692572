"""EP group of one rank: a permutation.

dispatch: rows[n] = tokens[source[n] // K]
combine:  tokens[t] = sum_k rows[slot[t, k]]
"""

from expertmesh.core.ops.permute import spread_rows
from expertmesh.ep.route import Axis, Route, take_rows


def dispatch(tokens_TD, route: Route, *, axis: Axis):
    del axis
    return spread_rows(tokens_TD, route.slot_TK, route.source_C)


def combine(rows_CD, route: Route, *, axis: Axis):
    del axis
    return take_rows(rows_CD, route.slot_TK)
