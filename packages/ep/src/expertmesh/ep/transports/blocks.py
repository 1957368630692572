"""Tokens in one block per pair of ranks: what every transport that sends to peers packs and unpacks.

    blocks[r] = tokens with a row at rank r, in order; a token is in a block once, however many rows it has there
    rows[n]   = its token in its sender's block
    sums[s]   = sum of rows here (float32) of each token of s that has one, in order
    tokens[t] = sum over ranks of its sums

Dimension key: R ranks, B = min(T, C) block rows (a rank has no room for more tokens), G = R * T tokens of the group,
T, K, C, D as in route.py. Blocks lie flat in [R * B, D]. Both sides number a block's rows by counting tokens, so no
index and no size is sent.
"""

from functools import partial

import jax
import jax.numpy as jnp

from expertmesh.ep.route import Route, take_rows
from expertmesh.ep.wire import sum_dtype


def block_rows(num_tokens: int, capacity: int) -> int:
    """B."""
    return min(num_tokens, capacity)


def blocks_of_tokens(tokens_TD: jax.Array, route: Route, size: int) -> jax.Array:
    """What this rank sends in a dispatch."""
    block = block_rows(tokens_TD.shape[0], route.source_C.shape[0])
    return take_rows(tokens_TD, members(sent(route, size), block)[:, None])


def rows_of_blocks(blocks_RBD: jax.Array, route: Route, size: int) -> jax.Array:
    """This rank's rows, from the blocks that it received."""
    place_G = places(received(route, size), blocks_RBD.shape[0] // size).reshape(-1)
    index_C = jnp.where(route.token_C < 0, -1, place_G[route.token_C])
    return take_rows(blocks_RBD, index_C[:, None])


def blocks_of_sums(rows_CD: jax.Array, route: Route, size: int) -> jax.Array:
    """What this rank sends in a combine."""
    num_tokens, top_k = route.slot_TK.shape
    block = block_rows(num_tokens, rows_CD.shape[0])
    token_RB = members(received(route, size), block).reshape(size, block)
    token_RB = jnp.where(token_RB < 0, -1, token_RB + num_tokens * jnp.arange(size)[:, None])
    index_BK = jnp.where(token_RB.reshape(-1, 1) < 0, -1, route.row_GK[token_RB.reshape(-1)])
    return take_rows(rows_CD.astype(sum_dtype(rows_CD.dtype, top_k)), index_BK)


def tokens_of_blocks(sums_RBD: jax.Array, route: Route, size: int) -> jax.Array:
    """This rank's tokens, from the sums that came back."""
    return take_rows(sums_RBD, _places_of_choices(route, sums_RBD.shape[0] // size, size))


def sent(route: Route, size: int) -> jax.Array:
    """bool[R, T]: this rank's token t has a row at rank r."""
    rank_TK = _ranks_of_choices(route, size)
    return jnp.any(rank_TK == jnp.arange(size)[:, None, None], axis=-1)


def received(route: Route, size: int) -> jax.Array:
    """bool[R, T]: token t of rank s has a row here."""
    return jnp.any(route.row_GK >= 0, axis=-1).reshape(size, route.slot_TK.shape[0])


def _ranks_of_choices(route: Route, size: int) -> jax.Array:
    """The rank of each of this rank's choices; `size` for one without a row."""
    capacity = max(route.source_C.shape[0], 1)
    return jnp.where(route.slot_TK < 0, size, route.slot_TK // capacity)


def places(member_RT: jax.Array, block: int) -> jax.Array:
    """Where each member is in the flat [R * B] blocks."""
    return jnp.cumsum(member_RT, axis=1) - 1 + block * jnp.arange(member_RT.shape[0])[:, None]


def members(member_RT: jax.Array, block: int) -> jax.Array:
    """int32[R * B]: the token at each place of the blocks, -1 where there is none. The inverse of `places`."""
    count_RT = jnp.cumsum(member_RT, axis=1)
    find = partial(jnp.searchsorted, v=jnp.arange(1, block + 1))
    token_RB = jax.vmap(find)(count_RT).astype(jnp.int32)
    return jnp.where(token_RB < member_RT.shape[1], token_RB, -1).reshape(-1)


def _places_of_choices(route: Route, block: int, size: int) -> jax.Array:
    """int32[T, K]: where the sum over rank r comes back, at the first choice with a row at r; else -1."""
    rank_TK = _ranks_of_choices(route, size)
    earlier_KK = jnp.tri(rank_TK.shape[1], k=-1, dtype=bool)
    repeated_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK, axis=-1)
    place_TR = places(sent(route, size), block).T
    place_TK = jnp.take_along_axis(place_TR, jnp.minimum(rank_TK, size - 1), axis=1)
    return jnp.where(repeated_TK | (rank_TK == size), -1, place_TK)
