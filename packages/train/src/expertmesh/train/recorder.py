"""Following a run: the CSV and the progress line, written by process 0."""

from __future__ import annotations

import collections
import contextlib
import csv
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import jax
from tqdm import tqdm

from expertmesh.train.checkpoint import naming
from expertmesh.train.metrics import Row, row
from expertmesh.train.options import TrainingError
from expertmesh.train.step import StepMetrics

MARKS = 5
# XLA:CPU lets 32 programs wait per device; the dispatch of one more blocks a thread that the first of
# them may need, and all of them hang (jaxlib 0.11.2, seen with 8 virtual devices).
RUN_AHEAD = 8
Pending = tuple[int, StepMetrics, float | None]


class Recorder:
    """Turns the metrics of steps into CSV rows, progress and alarms.

    `add` keeps metrics on the devices and waits until the step RUN_AHEAD before is done. They are fetched one interval
    of `log_every` steps later. `flush` fetches all of them.

    Speed is that of training steps: the first one, which compiles, does not count, nor does work inside `apart`.
    """

    def __init__(
        self,
        path: Path,
        names: list[str],
        *,
        start: int,
        steps: int,
        tokens: int,
        log_every: int,
        mfu: Callable[[float], float | None] = lambda speed: None,
    ) -> None:
        """`path`: the CSV, appended to; `start`: the last finished step; `tokens`: per step; `mfu`: of tokens per
        second, None where it is not known.
        """
        self._pending: list[Pending] = []
        self._tokens, self._log_every, self._mfu = tokens, log_every, mfu
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=MARKS)
        self._apart = 0.0
        self._alarmed = False
        self._writes, self._path = jax.process_index() == 0, path
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
            with naming(self._path):
                self._stream.close()

    def add(self, step: int, metrics: StepMetrics, valid_loss: float | None) -> None:
        """Notes a step that was started, and the validation loss after it if there was one."""
        self._pending.append((step, metrics, valid_loss))
        if not self._marks:
            jax.block_until_ready(metrics.loss)
            self._mark(step)
        if len(self._pending) > RUN_AHEAD:
            jax.block_until_ready(self._pending[-1 - RUN_AHEAD][1].loss)
        if len(self._pending) == 2 * self._log_every:
            self._write(self._log_every)

    @contextlib.contextmanager
    def apart(self, after: StepMetrics) -> Iterator[None]:
        """Time spent inside does not count as training; it starts when that step is done."""
        jax.block_until_ready(after.loss)
        start = time.perf_counter()
        yield
        self._apart += time.perf_counter() - start

    def flush(self) -> None:
        """Puts every row on disk.

        Raises:
          OSError: the disk does not take them.
          TrainingError: a step's loss or gradient was not finite, so that the state is not worth keeping.
        """
        broken = self._write(len(self._pending))
        if self._writes:
            with naming(self._path):
                self._stream.flush()
                os.fsync(self._stream.fileno())
        if broken is not None:
            step, metrics = broken
            raise TrainingError(
                f"loss and gradients must be finite; got loss={float(metrics.loss)}, "
                f"grad_norm={float(metrics.grad_norm)} in step {step}; "
                "--resume goes on before it, with a smaller --learning-rate or --clip"
            )

    def _write(self, count: int) -> tuple[int, StepMetrics] | None:
        """Fetches and writes the first `count` rows; returns the first step that was not finite."""
        done, self._pending = self._pending[:count], self._pending[count:]
        if not done:
            return None
        on_host = jax.device_get([metrics for _, metrics, _ in done])
        steps = [step for step, _, _ in done]
        speed = self._speed(self._finished(steps[-1]))
        if self._writes:
            rows = [row(step, m, speed, v) for (step, _, v), m in zip(done, on_host, strict=True)]
            with naming(self._path):
                self._writer.writerows(rows)
            mfu = None if speed is None else self._mfu(speed)
            self._progress.show(describe(rows[-1], mfu), rows[-1]["step"], len(rows))
            self._alarm(rows)
        both = zip(steps, on_host, strict=True)
        return next((pair for pair in both if not _finite(pair[1])), None)

    def _finished(self, step: int) -> int:
        """The last step that the devices are done with: `step`, or later ones that are not fetched yet."""
        ready = itertools.takewhile(lambda entry: entry[1].loss.is_ready(), self._pending)  # type: ignore[attr-defined]
        return max((later for later, _, _ in ready), default=step)

    def _mark(self, step: int) -> None:
        self._marks.append((time.perf_counter() - self._apart, step))

    def _speed(self, step: int) -> float | None:
        """Tokens per second over the last MARKS fetches; `step` is done. None before there are two."""
        self._mark(step)
        (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
        if first_step == last_step:
            return None
        return self._tokens * (last_step - first_step) / (last_time - first_time)

    def _alarm(self, rows: list[Row]) -> None:
        """Says once that choices are dropped."""
        worst = max(rows, key=lambda row: row["dropped"])
        if self._alarmed or not worst["dropped"]:
            return
        self._alarmed = True
        routed = sum(count for name, count in worst.items() if name.startswith("rows_l"))
        self._progress.say(
            f"alarm: step {worst['step']} dropped {worst['dropped']} of {routed} choices, "
            f"{100 * worst['dropped'] / routed:.1f} %, which then add nothing to their tokens; "
            "give a larger --capacity-factor, or none to drop nothing"
        )


def _finite(metrics: StepMetrics) -> bool:
    return math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)


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

    def show(self, text: str, step: int, count: int) -> None:
        """Shows the text of a step, the last of `count` new ones."""
        if self._bar is None:
            self.say(f"step {step}/{self._steps}: {text}")
        else:
            self._bar.update(count)
            self._bar.set_postfix_str(text)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        if self._bar is not None:
            self._bar.close()


def describe(last: Row, mfu: float | None) -> str:
    """A row in words."""
    speed = last["tokens_per_second"]
    parts = (
        f"loss {last['loss']:.3f}",
        f"validation {last['valid_loss']:.3f}" if last["valid_loss"] != "" else "",
        f"{speed:.0f} tokens/s" if speed != "" else "",
        "" if mfu is None else f"MFU {100 * mfu:.1f} %",
        f"imbalance {last['imbalance']:.2f}",
        f"dropped {last['dropped']}",
    )
    return ", ".join(filter(None, parts))
