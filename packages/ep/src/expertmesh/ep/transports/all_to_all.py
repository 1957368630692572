"""One block per pair of ranks, full or not, by `jax.lax.all_to_all`; see blocks.py for what is in a block.

Receives (R - 1) * min(T, C) * D elements each way, whatever the routing is.
"""

import jax

from expertmesh.ep.route import Axis, Route


def exchange(blocks_RBD: jax.Array, route: Route, axis: Axis, *, back: bool) -> jax.Array:
    del route, back
    swapped: jax.Array = jax.lax.all_to_all(blocks_RBD, axis, 0, 0, tiled=True)
    return swapped
