"""The filled part of one block per pair of ranks, by `jax.lax.ragged_all_to_all`; see blocks.py for what is in a block.

Receives the tokens that have rows here and nothing else: the fewest bytes, of all transports, for skewed or sparse
routing. XLA's implementation on NVIDIA GPUs is slow, so it must be asked for by name. Both sides know all sizes from
the route; blocks begin at multiples of B on both sides, so no offset is exchanged.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.te_compat.ragged_params import RaggedParams
from expertmesh.ep.route import Axis, Route, group_rank, group_size
from expertmesh.ep.transports import blocks
from expertmesh.ep.transports.choice import Exchange


def unsupported(exchange: Exchange) -> str | None:
    """Why the transport cannot do this exchange, or None."""
    return "XLA:CPU has no code for ragged-all-to-all" if exchange.platform == "cpu" else None


def exchange(blocks_RBD: jax.Array, route: Route, axis: Axis, *, back: bool) -> jax.Array:
    size = group_size(axis)
    there = blocks.sent(route, size), blocks.received(route, size)
    # Tokens in the block to each rank, and in the block from it.
    send_R, recv_R = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (there[::-1] if back else there))
    block = blocks_RBD.shape[0] // size
    start_R = jnp.arange(size, dtype=jnp.int32) * block
    # Empty blocks begin anywhere; as functions of the sizes, offsets are batched where the sizes are: vmap's rule for
    # the collective takes no others.
    params = RaggedParams(
        input_offsets=jnp.where(send_R > 0, start_R, 0),
        send_sizes=send_R,
        output_offsets=jnp.where(send_R > 0, group_rank(axis) * block, 0),
        recv_sizes=recv_R,
    )
    empty_RBD = jnp.zeros_like(blocks_RBD)
    received: jax.Array = jax.lax.ragged_all_to_all(blocks_RBD, empty_RBD, *params, axis_name=axis)
    return received
