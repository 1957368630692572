"""jax.lax.ragged_all_to_all from collectives that XLA:CPU has."""

from functools import partial

import jax
import jax.numpy as jnp


def ragged_all_to_all(operand, output, *params, axis_name):
    """Row `output_offsets[r] + i` of rank r is row `input_offsets[r] + i` of the operand, for i < send_sizes[r]."""
    input_offsets, send_sizes, output_offsets, recv_sizes = params
    assert all(x.dtype == jnp.int32 for x in params)
    me = jax.lax.axis_index(axis_name)
    gather = partial(jax.lax.all_gather, axis_name=axis_name)
    operand_RND = gather(operand)
    start_R, size_R, at_R = (gather(x)[:, me] for x in (input_offsets, send_sizes, output_offsets))
    row_N = jnp.arange(output.shape[0])
    hit_RN = (row_N >= at_R[:, None]) & (row_N < (at_R + size_R)[:, None])
    sender_N = jnp.argmax(hit_RN, axis=0)
    rows = operand_RND[sender_N, row_N - at_R[sender_N] + start_R[sender_N]]
    # What the real one leaves undefined must show: overlapping blocks, and sizes that the two sides do not agree on.
    sound = jnp.all(recv_sizes == size_R) & jnp.all(jnp.sum(hit_RN, axis=0) <= 1)
    hit_N = jnp.any(hit_RN, axis=0) & sound
    return jnp.where(hit_N[:, None], rows, jnp.where(sound, output, jnp.full_like(output, 77)))
