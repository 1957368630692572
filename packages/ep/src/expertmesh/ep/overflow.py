"""Overflow: choices that had no row, and exchanges refused. Counted inside the program, raised outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core.op import Op
from expertmesh.core.operands import check_type
from expertmesh.ep.dispatch import Handle

__all__ = ["Overflow", "find_overflow", "raise_overflow"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overflow:
    """Whether and where choices were dropped. Scalars, the same on every device: return them from a jitted step.

    Attributes:
      num_dropped: int32[]; choices without a row, over all participants.
      demand: int32[]; the largest `total_recv`: the capacity that would have dropped nothing.
      participant: int32[]; the first participant with that demand.
      stranger: int32[]; a participant whose process prepared another exchange than that of others, so that nothing was
        exchanged in its EP group; -1 if there is none.
      capacity: C (static).
      ep_size: R (static); participant p has rank `p % R` in EP group `p // R`.
      policy: the config's `overflow` (static).
    """

    num_dropped: jax.Array
    demand: jax.Array
    participant: jax.Array
    stranger: jax.Array
    capacity: int = dataclasses.field(metadata=dict(static=True))
    ep_size: int = dataclasses.field(metadata=dict(static=True))
    policy: str = dataclasses.field(metadata=dict(static=True))

    @property
    def any(self) -> jax.Array:
        """bool[]: something was dropped somewhere."""
        return self.num_dropped > 0


def _reference(
    total_recv_P: jax.Array, num_dropped_P: jax.Array, stranger_P: jax.Array, *, ep_size: int
) -> tuple[jax.Array, ...]:
    demand = jnp.max(total_recv_P)
    # Smaller for earlier participants, so that the first of several is found without a sort.
    order_P = jnp.arange(total_recv_P.shape[0], dtype=jnp.int32)
    last = total_recv_P.shape[0]
    first = jnp.min(jnp.where(total_recv_P == demand, order_P, last))
    num_dropped = jnp.sum(num_dropped_P, dtype=jnp.int32)
    stranger = jnp.max(jnp.where(stranger_P < 0, -1, order_P // ep_size * ep_size + stranger_P))
    return num_dropped, demand, first, stranger


_find = Op("ep_overflow", _reference, "p, p, p -> (), (), (), ()", whole=("p",))


def find_overflow(handle: Handle) -> Overflow:
    """Counts what an exchange dropped, over all participants of all EP groups.

    Args:
      handle: from `prepare`.

    Returns:
      Overflow. Inside your own `shard_map` over all axes it is about this device's participant alone.

    Costs an all-gather of int32[3, P].
    """
    check_type("find_overflow", Handle, "pass what prepare made", handle=handle)
    num_dropped, demand, participant, stranger = _find(
        handle.total_recv, handle.num_dropped, handle.stranger, ep_size=handle.ep_size
    )
    return Overflow(
        num_dropped=num_dropped,
        demand=demand,
        participant=participant,
        stranger=stranger,
        capacity=handle.source.shape[-1],
        ep_size=handle.ep_size,
        policy=handle.overflow,
    )


def raise_overflow(overflow: Overflow) -> None:
    """Raises if processes differ, or something was dropped under `EpConfig(overflow="error")`. Call it outside jit.

    Args:
      overflow: from `find_overflow`, as the jitted step returned it; under `vmap` or `scan` its arrays may have leading
        dimensions. Nothing is read from devices, and nothing raised, if the policy is "drop" and there is one process.

    Raises:
      RuntimeError: a process prepared another exchange, under any policy: names a rank. Choices were dropped: names
        demand, capacity and rank. The same on every process. Or the call is under jit.

    Waits for the step that made the values.
    """
    remedy = "pass what find_overflow, or a block under overflow='error', found"
    check_type("raise_overflow", Overflow, remedy, overflow=overflow)
    if isinstance(overflow.num_dropped, jax.core.Tracer):
        raise RuntimeError(
            "raise_overflow: it must be called outside jit, where values are known; got a traced Overflow; "
            "return it from the jitted function and call raise_overflow on the result"
        )
    if jax.process_count() > 1:
        _raise_stranger(overflow)
    if overflow.policy != "error":
        return
    num_dropped, demand, participant = map(
        np.asarray, (overflow.num_dropped, overflow.demand, overflow.participant)
    )
    if not num_dropped.any():
        return
    # Only where something was dropped: a capacity is not one of the other calls' rows.
    worst = np.unravel_index(np.argmax(np.where(num_dropped > 0, demand, -1)), demand.shape)
    where = f", call {tuple(map(int, worst))} of {demand.shape}" if demand.ndim else ""
    first = int(participant[worst])
    raise RuntimeError(
        f"raise_overflow: every choice must have a row; got demand={int(demand[worst])} rows, "
        f"capacity={overflow.capacity}, at rank {first % overflow.ep_size} of EP group {first // overflow.ep_size}"
        f"{where}, {int(num_dropped.sum())} choices dropped in all; raise the capacity to the demand, "
        "or accept drops with EpConfig(overflow='drop')"
    )


def _raise_stranger(overflow: Overflow) -> None:
    stranger = int(np.max(np.asarray(overflow.stranger), initial=-1))
    if stranger < 0:
        return
    raise RuntimeError(
        "raise_overflow: all processes must prepare the same exchange; got another at rank "
        f"{stranger % overflow.ep_size} of EP group {stranger // overflow.ep_size}, so that nothing was exchanged "
        "there; start the same script with the same options and versions everywhere, and call bootstrap, which says "
        "what differs"
    )
