"""One block per pair of ranks; a token is in a block once, however many rows it has at that rank.

    dispatch: block[r] = tokens with a row at rank r, in order; all_to_all; rows[n] = its token in its sender's block
    combine:  block[s] = sum of rows here (float32) of each token of s that has one; all_to_all; sum over ranks

Dimension key: R ranks, B = min(T, C) block rows (a rank has no room for more tokens), G = R * T tokens of the group,
T, K, C, D as in route.py. Both sides number a block's rows by counting tokens, so no index is sent.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.ep.route import Axis, Route, group_size, take_rows


def block_rows(num_tokens: int, capacity: int) -> int:
    """B."""
    return min(num_tokens, capacity)


def dispatch(tokens_TD, route: Route, *, axis: Axis):
    block = block_rows(tokens_TD.shape[0], route.source_C.shape[0])
    sent_RT = _sent(route, group_size(axis))
    blocks_RBD = _exchange(take_rows(tokens_TD, _members(sent_RT, block)), axis)
    place_G = _places(_received(route, group_size(axis)), block).reshape(-1)
    index_C = jnp.where(route.token_C < 0, -1, place_G[route.token_C])
    return take_rows(blocks_RBD, index_C[:, None])


def combine(rows_CD, route: Route, *, axis: Axis):
    size, (num_tokens, top_k) = group_size(axis), route.slot_TK.shape
    block = block_rows(num_tokens, rows_CD.shape[0])
    token_RB = _members(_received(route, size), block).reshape(size, block)
    token_RB = jnp.where(token_RB < 0, -1, token_RB + num_tokens * jnp.arange(size)[:, None])
    index_BK = jnp.where(token_RB.reshape(-1, 1) < 0, -1, route.row_GK[token_RB.reshape(-1)])
    # A sum of one row is that row: it need not be widened for the way back.
    wide = rows_CD.dtype if top_k == 1 else accumulator_dtype(rows_CD.dtype)
    back_RBD = _exchange(take_rows(rows_CD.astype(wide), index_BK), axis)
    return take_rows(back_RBD, _places_of_choices(route, block, size)).astype(rows_CD.dtype)


def _exchange(blocks, axis):
    return jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True) if axis else blocks


def _ranks_of_choices(route, size):
    """The rank of each of this rank's choices; `size` for one without a row."""
    capacity = max(route.source_C.shape[0], 1)
    return jnp.where(route.slot_TK < 0, size, route.slot_TK // capacity)


def _sent(route, size):
    """bool[R, T]: this rank's token t has a row at rank r."""
    rank_TK = _ranks_of_choices(route, size)
    return jnp.any(rank_TK == jnp.arange(size)[:, None, None], axis=-1)


def _received(route, size):
    """bool[R, T]: token t of rank s has a row here."""
    return jnp.any(route.row_GK >= 0, axis=-1).reshape(size, route.slot_TK.shape[0])


def _places(member_RT, block):
    """Where each member is in the flat [R * B] blocks."""
    return jnp.cumsum(member_RT, axis=1) - 1 + block * jnp.arange(member_RT.shape[0])[:, None]


def _members(member_RT, block):
    """int32[R * B, 1]: the token at each place of the blocks, -1 where there is none. The inverse of `_places`."""
    count_RT = jnp.cumsum(member_RT, axis=1)
    find = jax.vmap(lambda count_T: jnp.searchsorted(count_T, jnp.arange(1, block + 1)))
    token_RB = find(count_RT).astype(jnp.int32)
    return jnp.where(token_RB < member_RT.shape[1], token_RB, -1).reshape(-1, 1)


def _places_of_choices(route, block, size):
    """int32[T, K]: where the sum over rank r comes back, at the first choice with a row at r; else -1."""
    rank_TK = _ranks_of_choices(route, size)
    earlier_KK = jnp.tri(rank_TK.shape[1], k=-1, dtype=bool)
    repeated_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK, axis=-1)
    place_TR = _places(_sent(route, size), block).T
    place_TK = jnp.take_along_axis(place_TR, jnp.minimum(rank_TK, size - 1), axis=1)
    return jnp.where(repeated_TK | (rank_TK == size), -1, place_TK)
