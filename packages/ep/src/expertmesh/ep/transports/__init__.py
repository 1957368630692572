"""Ways to move rows between the ranks of an EP group: `Transport` says what one is, `BY_NAME` has all."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import jax
from jax.typing import DTypeLike

from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.support import compute_capability, platform_of, refusal
from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports import (
    all_to_all,
    local,
    nvlink,
    ragged,
    reach,
    ring,
    two_level,
)
from expertmesh.ep.transports.block_transport import BlockTransport
from expertmesh.ep.transports.choice import Exchange, Unlinked, choose, received
from expertmesh.ep.transports.names import Name, parse
from expertmesh.ep.transports.nvlink_by_row import NvlinkByRow
from expertmesh.ep.wire import Wire


class Transport(Protocol):
    """A module, or a value, with two functions on one device's shard, each the transpose of the other.

    One that moves several arrays in one exchange has `dispatch_parts(parts, route, *, axis)` too.
    """

    def dispatch(self, tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
        """rows_CD."""

    def combine(self, rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire) -> jax.Array:
        """tokens_TD; what each rank adds up travels by `wire`."""

    def unsupported(self, exchange: Exchange) -> str | None:
        """Why the transport cannot do this exchange, or None."""


def find_transport(
    name: str,
    route: Route,
    dtype: DTypeLike,
    axis: Axis,
    wire: TensorFormat | str | None = None,
    *,
    function: str,
) -> Transport:
    """The transport of that name: where nothing moves "local"; "all_to_all" for sums that it cannot send as `wire`.

    Raises:
      ValueError: the transport cannot do this exchange, as on a platform that lacks it; names `function`.
    """
    exchange = _exchange(route, dtype, axis)
    if not exchange.moves:
        return local
    chosen = _chosen(name, exchange)
    if reason := BY_NAME[chosen.base].unsupported(exchange):
        reason = f"{reason}; got ep_size={exchange.ep_size}, axis={axis}"
        raise ValueError(refusal(function, "transport", name, reason))
    if wire is not None:
        exchange = dataclasses.replace(exchange, wire=wire)
        if BY_NAME[chosen.base].unsupported(exchange):
            return BY_NAME["all_to_all"]
    return _of_name(chosen)


def find_by_row(name: str, route: Route, dtype: DTypeLike, axis: Axis) -> Transport:
    """For few long rows, with one choice at most of a token on each rank: the transport of that name where it sends no
    other rows, as "ragged" and "nvlink" do, else "all_to_all"."""
    exchange = _exchange(route, dtype, axis)
    base, sms, _ = _chosen(name, exchange)
    if base == "nvlink" and BY_NAME[base].unsupported(exchange) is None:
        return NvlinkByRow() if sms is None else NvlinkByRow(sms)
    return BY_NAME["ragged" if base == "ragged" else "all_to_all"]


def _chosen(name: str, exchange: Exchange) -> Name:
    """The parts of the name, or of that which "auto" stands for here."""
    return parse(choose_auto(exchange) if name == "auto" else name)


def _of_name(name: Name) -> Transport:
    if name.sms is not None:
        return nvlink.Nvlink(name.sms)
    return BY_NAME[name.base] if name.inside is None else _two_level(name.inside)


def _two_level(inside: str) -> two_level.TwoLevel:
    return two_level.TwoLevel(partial(find_transport, inside))


# All that the package knows of a transport by its name.
BY_NAME: Mapping[str, Transport] = MappingProxyType(
    {
        "local": local,
        "ring": ring,
        "all_to_all": BlockTransport(all_to_all.exchange),
        "ragged": BlockTransport(ragged.exchange, ragged.unsupported),
        "nvlink": nvlink.Nvlink(),
        "two_level": _two_level("auto"),
    }
)


def _exchange(route: Route, dtype: DTypeLike, axis: Axis) -> Exchange:
    """What a route asks a transport to move."""
    num_tokens, top_k = route.slot_TK.shape
    return Exchange(
        num_tokens=num_tokens,
        top_k=top_k,
        capacity=route.source_C.shape[0],
        ep_size=group_size(axis),
        dtype=dtype,
        platform=platform_of(route.slot_TK),
        levels=1 if route.host_GK is None else 2,
    )


def choose_auto(exchange: Exchange) -> str:
    """The transport that "auto" stands for here: `choose`, of what is known of this job's GPUs.

    On NVIDIA GPUs without "nvlink" a RuntimeWarning says which and why, once in a process for each of both.
    """
    # Where it is compiled for GPUs that are not here, nothing is known of them.
    here = exchange.platform == "cuda" and compute_capability() is not None
    if not here or exchange.ep_size == 1:
        return choose(exchange, linked=False)
    reason = unlinked(exchange)
    name = choose(exchange, linked=reason is None)
    if reason is not None:
        _say(Unlinked(name, reason, received(exchange)))
    return name


def unlinked(exchange: Exchange) -> str | None:
    """Why "nvlink" is not known to do an exchange between this job's GPUs, or None; all processes must agree."""
    return BY_NAME["nvlink"].unsupported(exchange) or reach.unsupported()


@functools.cache
def _say(choice: Unlinked) -> None:
    warnings.warn(str(choice), RuntimeWarning, stacklevel=2)
