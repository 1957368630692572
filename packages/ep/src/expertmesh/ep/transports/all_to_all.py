"""One block per pair of ranks, full or not, by `jax.lax.all_to_all`; see blocks.py for what is in a block.

Receives (R - 1) * min(T, C) * D elements each way, whatever the routing is.
"""

import jax

from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports import blocks
from expertmesh.ep.wire import PLAIN, Wire


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    size = group_size(axis)
    received_RBD = _exchange(blocks.blocks_of_tokens(tokens_TD, route, size), axis)
    return blocks.rows_of_blocks(received_RBD, route, size)


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN) -> jax.Array:
    size = group_size(axis)
    sums_RBD = blocks.blocks_of_sums(rows_CD, route, size)
    back_RBD = wire.decode(_exchange(wire.encode(sums_RBD), axis), sums_RBD)
    return blocks.tokens_of_blocks(back_RBD, route, size).astype(rows_CD.dtype)


def _exchange(blocks_RBD: jax.Array, axis: Axis) -> jax.Array:
    return jax.lax.all_to_all(blocks_RBD, axis, 0, 0, tiled=True) if axis else blocks_RBD
