"""What all transports are that move one block per pair of ranks; see blocks.py for what is in a block."""

import dataclasses
from collections.abc import Callable

import jax

from expertmesh.core.support import no_reason
from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports import blocks
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.wire import PLAIN, Wire


@dataclasses.dataclass(frozen=True)
class BlockTransport:
    """A transport, but for how blocks are exchanged.

    Attributes:
      exchange: `exchange(blocks_RBD, route, axis, *, back) -> blocks_RBD`: block r goes to rank r, and block s of the
        result is from rank s. `back`: they are sums, on the way from the experts.
      unsupported: `unsupported(Exchange) -> str | None`: why it cannot be done.
    """

    exchange: Callable[..., jax.Array]
    unsupported: Callable[[Exchange], str | None] = no_reason

    def dispatch(self, tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
        size = group_size(axis)
        sent_RBD = blocks.blocks_of_tokens(tokens_TD, route, size)
        received_RBD = self.exchange(sent_RBD, route, axis, back=False)
        return blocks.rows_of_blocks(received_RBD, route, size)

    def combine(
        self, rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN
    ) -> jax.Array:
        size = group_size(axis)
        sums_RBD = blocks.blocks_of_sums(rows_CD, route, size)
        back_RBD = self.exchange(wire.encode(sums_RBD), route, axis, back=True)
        tokens_TD = blocks.tokens_of_blocks(wire.decode(back_RBD, sums_RBD), route, size)
        return tokens_TD.astype(rows_CD.dtype)
