"""Ending between two steps when SIGTERM or SIGINT arrives, at the same step in every process."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Inside `with`, SIGINT and SIGTERM set `signal_number`; a second SIGINT ends the process at once.

    With several processes JAX's preemption service listens for SIGTERM and makes all processes agree on
    the step to stop at; SIGINT is passed on to it.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`. Every process calls it once per step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal_number = self.signal_number or signal.SIGTERM
            return True
        return jax.process_count() == 1 and self.signal_number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
