"""Stalls: exchanges of transport "nvlink" that timed out waiting for a rank. Noted on devices, raised outside."""

from expertmesh.ep import _native

__all__ = ["raise_stall"]

_WAITED_FOR = {1: "to read what was sent two exchanges earlier", 2: "to send its rows"}


def raise_stall() -> None:
    """Raises if an exchange by "nvlink" timed out waiting for a rank. Call it outside jit, when a step is ready.

    A wait that takes longer than 60 s ends: its exchange's rows from that rank, or tokens with such rows, are NaN (all
    bits 1 in rows that are not floating), and the program runs on. Each process notes the waits of its own devices.
    Ranks that were late and not gone can go on as if nothing had been.

    Raises:
      RuntimeError: since the last call, or the start; names the rank that waited, the one that it waited for, and the
        number of the exchange. One stall per call.

    Costs nothing; waits for nothing.
    """
    stall = _native.take_stall()
    if stall is None:
        return
    raise RuntimeError(
        f"raise_stall: every rank must take part in every exchange; rank {stall.rank} of an EP group timed out waiting "
        f"for rank {stall.peer} {_WAITED_FOR[stall.phase]}, in exchange {stall.epoch}, whose results are NaN; "
        "look at that rank's log, and repeat the step"
    )
