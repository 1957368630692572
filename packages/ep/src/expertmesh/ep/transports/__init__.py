"""Ways to move rows between the ranks of an EP group.

A transport is a module, or a value, with two functions on one device's shard, each the transpose of the other:
`dispatch(tokens_TD, route, *, axis) -> rows_CD` and `combine(rows_CD, route, *, axis) -> tokens_TD`.
One that moves several arrays in one exchange has `dispatch_parts(parts, route, *, axis)` too; one that a platform may
lack has `missing_on(platform) -> str | None`, why it does.
"""

import functools
import warnings
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.support import compute_capability, platform_of
from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports import all_to_all, local, nvlink, ragged, reach, ring
from expertmesh.ep.transports.blocks import block_rows

# All that the package knows of a transport by its name.
BY_NAME: Mapping[str, ModuleType] = MappingProxyType(
    {
        "local": local,
        "ring": ring,
        "all_to_all": all_to_all,
        "ragged": ragged,
        "nvlink": nvlink,
    }
)


def choose(name: str, route: Route, dtype: DTypeLike, axis: Axis) -> ModuleType | nvlink.Nvlink:
    """The transport of that name; "auto" is `fastest` for these shapes. Where nothing moves, it is "local".

    Raises:
      ValueError: "local" where the EP group has more than one rank; a transport that the platform lacks.
    """
    size = group_size(axis)
    if name == "local" and size > 1:
        raise ValueError(
            f"dispatch: transport 'local' must have an EP group of 1 rank; got ep_size={size}, axis={axis}; "
            "use transport='auto'"
        )
    base, _, sms = name.partition(":")
    if route.row_GK.size == 0 or size == 1 and base in ("ragged", "nvlink"):
        return local
    if reason := _missing(base, route, size, dtype):
        raise ValueError(
            f"dispatch: transport {name!r} must run on a platform that has it; got ep_size={size}, axis={axis}: "
            f"{reason}; use transport='auto'"
        )
    if name == "auto":
        (num_tokens, top_k), capacity = route.slot_TK.shape, route.source_C.shape[0]
        base = fastest(num_tokens, top_k, capacity, size, dtype, platform_of(route.slot_TK))
    return nvlink.Nvlink(int(sms) if sms else nvlink.SMS) if base == "nvlink" else BY_NAME[base]


def _missing(name: str, route: Route, size: int, dtype: DTypeLike) -> str | None:
    """Why the transport of that name cannot do this exchange, or None."""
    reason = missing_on(name, platform_of(route.slot_TK))
    if reason or name != "nvlink":
        return reason
    return nvlink.refuses(route.slot_TK.shape[1], size, dtype)


def missing_on(name: str, platform: str) -> str | None:
    """Why the transport of that name cannot run on JAX's lowering platform of that name, or None."""
    find = getattr(BY_NAME.get(name), "missing_on", None)
    return find(platform) if find else None


def choose_blocks(
    name: str, route: Route, wire_format: TensorFormat | str, axis: Axis
) -> ModuleType | nvlink.Nvlink:
    """The transport for sums that are rounded on the way, by any name but "ring": it does not add on the way.

    Raises:
      ValueError: as `choose`.
    """
    chosen = choose(name, route, jnp.uint8, axis)
    # "nvlink" rounds, and does not quantize. With one rank the blocks of "all_to_all" are the tokens, so that the sums
    # are rounded as in any other group.
    rounds = wire_format in nvlink.WIRES
    on_nvlink = isinstance(chosen, nvlink.Nvlink)
    return all_to_all if chosen in (local, ring) or on_nvlink and not rounds else chosen


def fastest(
    num_tokens: int, top_k: int, capacity: int, ep_size: int, dtype: DTypeLike, platform: str
) -> str:
    """The transport that "auto" stands for: "nvlink" where it is known to run, else `cheapest`.

    On NVIDIA GPUs without it a RuntimeWarning says once why not.
    """
    # Where it is compiled for GPUs that are not here, nothing is known of them.
    if platform == "cuda" and ep_size > 1 and compute_capability() is not None:
        reason = (
            nvlink.missing_on(platform) or nvlink.refuses(top_k, ep_size, dtype) or reach.unknown()
        )
        if reason is None:
            return "nvlink"
        _say_once(reason)
    return cheapest(num_tokens, top_k, capacity, ep_size, jnp.dtype(dtype).itemsize)


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"expertmesh.ep: transport 'auto' does not take 'nvlink', the fastest between GPUs of one host: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def cheapest(num_tokens: int, top_k: int, capacity: int, ep_size: int, itemsize: int) -> str:
    """The transport that receives the fewest bytes in one dispatch and one combine; "ring" at equal cost.

    Per feature, ring: (R - 1) * T * (itemsize + 4); all_to_all: (R - 1) * B * (itemsize + back) with
    B = min(T, C) and back = itemsize if K is 1, else 4. "ragged" is never chosen: measured on 4 H200 (jax 0.11.2), it
    moves 8 GB/s where all_to_all moves 220 to 300.
    """
    if ep_size == 1:
        return "local"
    ring_bytes = num_tokens * (itemsize + 4)
    block = block_rows(num_tokens, capacity)
    block_bytes = block * (itemsize + (itemsize if top_k == 1 else 4))
    return "all_to_all" if block_bytes < ring_bytes else "ring"
