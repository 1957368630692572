"""Following a run: the CSV and the progress line, written by process 0."""

from __future__ import annotations

import collections
import csv
import os
import sys
import time
from pathlib import Path
from types import TracebackType

import jax
from tqdm import tqdm

from expertmesh.flax_moe.train.metrics import Row, row
from expertmesh.flax_moe.train.step import StepMetrics

MARKS = 5
# XLA:CPU lets 32 programs wait per device; the dispatch of one more blocks a thread that the first of
# them may need, and all of them hang (jaxlib 0.11.2, seen with 8 virtual devices).
RUN_AHEAD = 8
Pending = tuple[int, StepMetrics, float | None]


class Recorder:
    """Turns the metrics of steps into CSV rows and progress.

    `add` keeps them and waits until the step RUN_AHEAD before is done; they are fetched from the devices
    one interval of `log_every` steps later. `flush` fetches all of them.
    """

    def __init__(
        self, path: Path, names: list[str], *, start: int, steps: int, tokens: int, log_every: int
    ) -> None:
        """`path`: the CSV, appended to; `start`: the last finished step; `tokens`: per step."""
        self._pending: list[Pending] = []
        self._tokens, self._log_every = tokens, log_every
        self._marks = collections.deque([(time.perf_counter(), start)], maxlen=MARKS)
        self._writes = jax.process_index() == 0
        if self._writes:
            new = not path.exists()
            self._stream = open(path, "a", newline="")
            self._writer = csv.DictWriter(self._stream, names, lineterminator="\n")
            if new:
                self._writer.writeheader()
            self._progress = Progress(start, steps)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writes:
            self._progress.close()
            self._stream.close()

    def add(self, step: int, metrics: StepMetrics, valid_loss: float | None) -> None:
        """Notes a step that was started, and the validation loss after it if there was one."""
        self._pending.append((step, metrics, valid_loss))
        if len(self._pending) > RUN_AHEAD:
            jax.block_until_ready(self._pending[-1 - RUN_AHEAD][1].loss)
        if len(self._pending) == 2 * self._log_every:
            self._write(self._log_every)

    def flush(self) -> None:
        """Puts every row on disk."""
        self._write(len(self._pending))
        if self._writes:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def _write(self, count: int) -> None:
        if not count:
            return
        done, self._pending = self._pending[:count], self._pending[count:]
        on_host = jax.device_get([metrics for _, metrics, _ in done])
        speed = self._speed(done[-1][0])
        if self._writes:
            rows = [row(step, m, speed, v) for (step, _, v), m in zip(done, on_host, strict=True)]
            self._writer.writerows(rows)
            self._progress.show(rows)

    def _speed(self, step: int) -> float:
        """Tokens per second over the last MARKS fetches; `step` was just fetched."""
        self._marks.append((time.perf_counter(), step))
        (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
        return self._tokens * (last_step - first_step) / (last_time - first_time)


class Progress:
    """A bar on a terminal, a line per interval elsewhere."""

    def __init__(self, start: int, steps: int) -> None:
        self._steps = steps
        terminal = sys.stdout.isatty()
        self._bar = (
            tqdm(initial=start, total=steps, file=sys.stdout, unit="step", dynamic_ncols=True)
            if terminal
            else None
        )

    def show(self, rows: list[Row]) -> None:
        """Shows the last of the rows."""
        text = describe(rows[-1])
        if self._bar is None:
            print(f"step {rows[-1]['step']}/{self._steps}: {text}", flush=True)
        else:
            self._bar.update(len(rows))
            self._bar.set_postfix_str(text)

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        if self._bar is not None:
            self._bar.close()


def describe(last: Row) -> str:
    """A row in words."""
    valid = f", validation {last['valid_loss']:.3f}" if last["valid_loss"] != "" else ""
    return (
        f"loss {last['loss']:.3f}{valid}, {last['tokens_per_second']:.0f} tokens/s, "
        f"imbalance {last['imbalance']:.2f}, dropped {last['dropped']}"
    )
