"""Stalls: exchanges of transport "nvlink" that timed out waiting for a rank. Noted on devices, raised outside."""

from expertmesh.ep import _native

__all__ = ["raise_stall"]

_WAITED_FOR = {1: "to read what was sent two exchanges earlier", 2: "to send its rows"}


def raise_stall() -> None:
    """Raises if an exchange by "nvlink" timed out waiting for a rank. Call it outside jit, when a step is ready.

    A wait that takes longer than 60 s ends. The rows of that exchange from that rank, and tokens with such rows, are
    then NaN (all bits 1 in rows that are not floating), and the program runs on. Each process records the waits of its
    own devices. A rank that was only late takes part in the next exchange as usual.

    Raises:
      RuntimeError: a wait timed out since the last call, or since the start. Names the rank that waited, the rank that
        it waited for, and the number of the exchange; one stall per call.

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
