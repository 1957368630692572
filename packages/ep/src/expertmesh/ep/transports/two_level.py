"""Between hosts by `jax.lax.all_to_all`, then inside each host by another transport.

    dispatch: a token goes once to each host that has a row of it; who receives it there, sends it on inside the host
    combine:  each host adds up its rows of a token, and the token's rank adds what the hosts added up

The EP axes are (outer, inner...), and the ranks of a host differ in the inner ones only: rank h * I + i is the i-th of
host h. Over the outer axis the i-th ranks of all hosts exchange blocks as in blocks.py, with hosts for ranks. The S
places of blocks that a rank then has are the tokens of an exchange among the ranks of its host, with its own Route.
Rows are where the handle says, so their order and drops are those of an exchange of one level.

A rank receives (H - 1) * F rows from other hosts in each direction, F = ceil(T * most_hosts / H), which is enough if
tokens go to all hosts alike. If one pair of hosts has more for each other, rounds of F / 8 rows send the rest. Sums of
a host are rounded once to the dtype of the rows, or of the wire, and added in float32.

Dimension key: H hosts, I ranks of a host, B = min(T, I * C) places of a block, S = H * B; G, T, K, C, D as in route.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.ep.route import Axis, Route, group_rank, group_size, inner_axis, outer_axis
from expertmesh.ep.transports import blocks
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.wire import PLAIN, Wire

ROUNDS = 8  # parts of a first block that what is left is sent in


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The transport.

    Attributes:
      find: `find(route, dtype, axis, wire, *, function) -> Transport`: the one inside a host.
    """

    find: Callable[..., Any]

    def dispatch(self, tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
        between, inside = outer_route(route, axis), inner_route(route, axis)
        sent_SD = blocks.blocks_of_tokens(tokens_TD, between, group_size(outer_axis(axis)))
        received_SD = _cross(sent_SD, between, axis)
        move = self.find(inside, tokens_TD.dtype, inner_axis(axis), function="dispatch")
        rows_CD: jax.Array = move.dispatch(received_SD, inside, axis=inner_axis(axis))
        return rows_CD

    def combine(
        self, rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN
    ) -> jax.Array:
        between, inside = outer_route(route, axis), inner_route(route, axis)
        # Sums of 8 bits are quantized once, where they leave the host.
        inner_wire = PLAIN if isinstance(wire.format, TensorFormat) else wire
        move = self.find(
            inside, rows_CD.dtype, inner_axis(axis), inner_wire.format, function="combine"
        )
        sums_SD = move.combine(rows_CD, inside, axis=inner_axis(axis), wire=inner_wire)
        back_SD = wire.decode(_cross(wire.encode(sums_SD), between, axis), sums_SD)
        tokens_TD = blocks.tokens_of_blocks(back_SD, between, group_size(outer_axis(axis)))
        return tokens_TD.astype(rows_CD.dtype)

    def unsupported(self, exchange: Exchange) -> str | None:
        """Why the transport cannot do this exchange, or None."""
        if exchange.ep_size > 1 and exchange.levels == 1:
            return (
                "it needs an EP group of two mesh axes, that over hosts first, as in axis=('host', 'ep'), and a handle "
                "that `prepare` made for it"
            )
        return None


def first_rows(num_tokens: int, block: int, num_hosts: int, most_hosts: int) -> int:
    """F: rows of each block that are sent at once."""
    return min(block, -(-num_tokens * most_hosts // num_hosts))


def outer_route(route: Route, axis: Axis) -> Route:
    """The exchange between hosts, as one of `blocks`: hosts are its ranks, with the rows of all of their ranks."""
    host_HITK = _by_host(route, axis)
    host_HTK = jax.lax.dynamic_index_in_dim(
        host_HITK, group_rank(inner_axis(axis)), axis=1, keepdims=False
    )
    num_rows = group_size(inner_axis(axis)) * route.source_C.shape[0]
    nowhere = jnp.full((num_rows,), -1, jnp.int32)  # rows have a source inside the host
    host_TK = host_HTK.reshape(-1, host_HTK.shape[-1])
    return Route(route.slot_TK, nowhere, host_TK, most_hosts=route.most_hosts)


def inner_route(route: Route, axis: Axis) -> Route:
    """The exchange inside a host, of tokens that came from all hosts: place h * B + b of those from host h."""
    assert route.host_GK is not None
    host_HITK = _by_host(route, axis)
    (num_hosts, size, num_tokens, top_k), capacity = host_HITK.shape, route.source_C.shape[0]
    block = blocks.block_rows(num_tokens, size * capacity)
    # Of each of the host's ranks, from each host: the tokens with a row on this host.
    member_IHT = jnp.any(host_HITK >= 0, axis=-1).swapaxes(0, 1)
    member_RT = member_IHT.reshape(size * num_hosts, num_tokens)
    place_IHT = blocks.places(member_RT, block).reshape(member_IHT.shape)
    place_G = place_IHT.swapaxes(0, 1).reshape(-1)
    first_HI = num_tokens * jnp.arange(num_hosts * size).reshape(num_hosts, size)
    token_RB = blocks.members(member_RT, block).reshape(size * num_hosts, block)
    token_RB = jnp.where(token_RB < 0, -1, token_RB + first_HI.T.reshape(-1, 1))
    token_IS = token_RB.reshape(size, num_hosts * block)
    rank = group_rank(inner_axis(axis))
    own_S = jax.lax.dynamic_index_in_dim(token_IS, rank, keepdims=False)
    return Route(
        slot_TK=_rows_of(own_S, route.host_GK),
        source_C=jnp.where(
            route.source_C < 0, -1, place_G[route.token_C] * top_k + route.source_C % top_k
        ),
        row_GK=_rows_of(token_IS.reshape(-1), route.row_GK),
    )


def _by_host(route: Route, axis: Axis) -> jax.Array:
    """[H, I, T, K], of what stands at all tokens of the group."""
    assert route.host_GK is not None
    sizes = group_size(outer_axis(axis)), group_size(inner_axis(axis)), *route.slot_TK.shape
    return route.host_GK.reshape(sizes)


def _rows_of(token_N: jax.Array, rows_GK: jax.Array) -> jax.Array:
    """Those of some tokens, -1 of none."""
    return jnp.where(token_N[:, None] < 0, -1, rows_GK[token_N])


def _cross(blocks_SD: jax.Array, between: Route, axis: Axis) -> jax.Array:
    """Block h to this rank's peer at host h, and block h from there."""
    outer = outer_axis(axis)
    num_hosts = group_size(outer)
    if num_hosts == 1:
        return blocks_SD
    blocks_HBD = blocks_SD.reshape(num_hosts, -1, blocks_SD.shape[-1])
    num_tokens, block = between.slot_TK.shape[0], blocks_HBD.shape[1]
    first = first_rows(num_tokens, block, num_hosts, between.most_hosts)

    def part(start: jax.Array | int, size: int) -> jax.Array:
        sent = jax.lax.dynamic_slice_in_dim(blocks_HBD, start, size, axis=1)
        received: jax.Array = jax.lax.all_to_all(sent, outer, 0, 0, tiled=True)
        return received

    received_HBD = part(0, first)
    if first < block:
        size = max(1, first // ROUNDS)

        def send_part(n: jax.Array, received_HBD: jax.Array) -> jax.Array:
            # The last part may begin with rows that came already.
            start = jnp.minimum(first + n * size, block - size)
            return jax.lax.dynamic_update_slice_in_dim(
                received_HBD, part(start, size), start, axis=1
            )

        count_H = jnp.sum(blocks.sent(between, num_hosts), axis=1, dtype=jnp.int32)
        fullest = jax.lax.pmax(jnp.max(count_H), outer)  # of all pairs, so that all take part
        rounds = (jnp.maximum(fullest - first, 0) + size - 1) // size
        received_HBD = jnp.pad(received_HBD, ((0, 0), (0, block - first), (0, 0)))
        received_HBD = jax.lax.fori_loop(0, rounds, send_part, received_HBD)
    return received_HBD.reshape(blocks_SD.shape)
