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
from expertmesh.ep.wire import PLAIN, Wire


def dispatch(tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
    size = group_size(axis)
    sent_R, received_R = _sizes(route, size)
    blocks_RBD = blocks.blocks_of_tokens(tokens_TD, route, size)
    received_RBD = _exchange(blocks_RBD, sent_R, received_R, axis)
    return blocks.rows_of_blocks(received_RBD, route, size)


def combine(rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN) -> jax.Array:
    size = group_size(axis)
    sent_R, received_R = _sizes(route, size)
    sums_RBD = blocks.blocks_of_sums(rows_CD, route, size)
    back_RBD = _exchange(wire.encode(sums_RBD), received_R, sent_R, axis)
    back_RBD = wire.decode(back_RBD, sums_RBD)
    return blocks.tokens_of_blocks(back_RBD, route, size).astype(rows_CD.dtype)


def missing_on(platform: str) -> str | None:
    """Why the transport cannot run on JAX's lowering platform of that name, or None."""
    return "XLA:CPU has no code for ragged-all-to-all" if platform == "cpu" else None


def _sizes(route: Route, size: int) -> tuple[jax.Array, jax.Array]:
    """int32[R] each: tokens in the block to and from each rank, on the way to the experts."""
    return (
        jnp.sum(blocks.sent(route, size), axis=1, dtype=jnp.int32),
        jnp.sum(blocks.received(route, size), axis=1, dtype=jnp.int32),
    )


def _exchange(blocks_RBD: jax.Array, send_R: jax.Array, recv_R: jax.Array, axis: Axis) -> jax.Array:
    block = blocks_RBD.shape[0] // send_R.shape[0]
    start_R = jnp.arange(send_R.shape[0], dtype=jnp.int32) * block
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
