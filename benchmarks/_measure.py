"""Timing and records that the benchmarks share."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import gzip
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

LEAD = 0.15
SHORT = 8  # calls in a step of the loop, where a call takes less than 0.2 ms


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark: `--json FILE`, where its rows go."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--json", type=pathlib.Path)
    return made


def in_turns(
    functions: dict[str, Callable], operands: tuple, turns: int, calls: int
) -> dict[str, list[float]]:
    """Seconds of a call of each in each turn; programs of so many calls, without pauses."""
    return turns_of(all_steps(functions, operands, calls), operands, turns)


def all_steps(
    functions: dict[str, Callable],
    types: tuple,
    calls: int,
    *,
    prepared: dict[str, Callable] | None = None,
) -> dict[str, Callable]:
    """`steps` of each, compiled side by side.

    Args:
      types: operands, or what says their types.
      prepared: the `prepare` of a function that has one.
    """
    prepared = prepared or {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {
            name: pool.submit(steps, function, types, calls, prepare=prepared.get(name))
            for name, function in functions.items()
        }
        return {name: job.result() for name, job in jobs.items()}


def turns_of(programs: dict[str, Callable], operands: tuple, turns: int) -> dict[str, list[float]]:
    """Seconds of a call of each of these `steps` in each turn.

    In its turn a program runs for `LEAD` seconds before the run that counts: the GPU's clock follows what ran before.
    """

    def led(run):
        start = time.perf_counter()
        while run(*operands) and time.perf_counter() - start < LEAD:
            pass
        return run(*operands)

    found = [{name: led(run) for name, run in programs.items()} for _ in range(turns)]
    return {name: [turn[name] for turn in found] for name in programs}


def program(
    function: Callable, operands: tuple, seconds: float = 0.03, least: int = 20
) -> Callable[[], float]:
    """Measures the device time of a call: several run one after the other inside one jitted program.

    By default 20 calls at least: what a dispatch costs must not count as device time; nor must, of short ones, what a
    step costs. Another program of more calls is compiled if these are over in much less than `seconds`.
    """

    def run(steps, calls):
        repeat = _repeated(function, steps, calls)
        jax.block_until_ready(repeat(*operands))

        def once():
            start = time.perf_counter()
            jax.block_until_ready(repeat(*operands))
            return (time.perf_counter() - start) / ((steps + 1) * calls)

        return once

    few = run(least - 1, 1)
    one = min(few() for _ in range(3))
    steps = min(1000, int(seconds / one))
    if steps < 2 * least:
        return few
    return run(max(1, steps // SHORT), SHORT) if one < 2e-4 else run(steps, 1)


def _repeated(function: Callable, steps: int, calls: int) -> Callable:
    """A program of (steps + 1) x calls calls one after the other; two steps at least, as one is no loop."""

    @jax.jit
    def repeat(*operands):
        def step(_, before):
            given, done = operands, before[-1:]
            for _ in range(calls):
                # Each call waits for the one before; none is hoisted or merged, and each result is kept.
                given, _ = jax.lax.optimization_barrier((given, done[-1]))
                done.append(function(*given))
            return done[1:]

        first = step(0, [jnp.zeros(())])
        return jax.lax.fori_loop(0, steps, step, first)

    return repeat


def steps(
    function: Callable,
    operands: tuple,
    count: int = 20,
    *,
    prepare: Callable[..., tuple] | None = None,
    placed: Any = None,
) -> Callable[..., float]:
    """As `program`, for calls of milliseconds: `count` calls in a scan, each after the one before, compiled once.

    What is returned takes other operands of the same types, or none. The operands here may then be their types alone.

    Args:
      prepare: a function of the operands. What it makes, once for all calls, each call is given after them; a call's
        time has its part of what that takes.
      placed: the shardings of what `function` returns; None: as its types say.
    """
    prepare = prepare or (lambda *_: ())
    types = jax.eval_shape(lambda *given: function(*given, *prepare(*given)), *operands)
    # What a call returns is carried, so that no part of it is left out.
    placed = placed or _places(types, jax.tree.leaves(operands)[0].sharding)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types), out_shardings=placed
    )

    def repeat(first, *operands):
        operands += prepare(*operands)

        def step(before, _):
            given, _ = jax.lax.optimization_barrier((operands, before))
            return function(*given), None

        return jax.lax.scan(step, first, length=count)[0]

    repeat = jax.jit(repeat, out_shardings=placed).lower(jax.eval_shape(zeros), *operands).compile()

    def once(*given):
        first = jax.block_until_ready(zeros())
        start = time.perf_counter()
        jax.block_until_ready(repeat(first, *(given or operands)))
        return (time.perf_counter() - start) / count

    return once


def has_gpu() -> bool:
    """Whether processes will find a GPU; asked without taking its memory, as JAX would."""
    return pathlib.Path("/dev/nvidia0").exists() and os.environ.get("JAX_PLATFORMS") != "cpu"


def process(name: str, *arguments: str, env: dict[str, str]) -> tuple[int, Any]:
    """The exit status of a benchmark in a process of its own, and the JSON that it wrote, None if it wrote none."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(out)]
        done = subprocess.run(command, env=os.environ | env)
        return done.returncode, json.loads(out.read_text()) if out.exists() else None


@contextlib.contextmanager
def held(path: pathlib.Path | None, *, shared: bool = False):
    """While this process measures and no other one with this file does anything; None: there are no others.

    `shared`: while it compiles, as others may. XLA tries GEMMs on the GPU then, which would disturb a measurement.
    """
    if path is None:
        yield
        return
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@dataclasses.dataclass(frozen=True)
class Turns:
    """Processes that compile side by side, and then measure one after the other.

    Attributes:
      folder: which all of them share.
      number: of this process, from 0: the order of turns.
      count: how many there are.
      until: when none waits for others that still compile, in seconds of `time.monotonic()`.
      after: a file, before which nobody measures; None: there is none.
    """

    folder: pathlib.Path
    number: int
    count: int
    until: float
    after: pathlib.Path | None = None

    def may_begin(self) -> bool:
        return self.after is None or self.after.exists()

    def mark(self, what: str) -> None:
        """Says that this process is "ready" to measure, or "done"; another one says it for a process that has ended."""
        (self.folder / f"{what}{self.number}").touch()

    def seconds_held(self) -> float:
        """For how long this process has had its turn; 0 before and after it."""
        held = self.folder / f"held{self.number}"
        return time.time() - held.stat().st_mtime if held.exists() else 0

    def _has(self, what: str, number: int) -> bool:
        return (self.folder / f"{what}{number}").exists()

    @contextlib.contextmanager
    def mine(self):
        """When all are ready or have had their time, and those before this one that are ready are done."""
        self.mark("ready")
        while not self.may_begin() or (
            time.monotonic() < self.until
            and not all(self._has("ready", number) for number in range(self.count))
        ):
            time.sleep(0.1)
        with (self.folder / "lock").open("w") as lock:
            while True:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not any(
                    self._has("ready", other) and not self._has("done", other)
                    for other in range(self.number)
                ):
                    break
                fcntl.flock(lock, fcntl.LOCK_UN)
                time.sleep(0.05)
            self.mark("held")
            yield
            (self.folder / f"held{self.number}").unlink()
        self.mark("done")


WARM, TRACES = 3, 5  # calls that are traced


class Kernel(NamedTuple):
    """What a GPU ran: its name, its time, and the instruction of the program that it belongs to, "" if unknown."""

    name: str
    microseconds: float
    instruction: str


def kernels(call: Callable, operands: tuple) -> list[Kernel]:
    """What the first GPU runs in one call of a compiled program, in order of time."""
    jax.block_until_ready(call(*operands))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call(*operands))
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    first = min((name for name in processes.values() if "GPU:" in name), default=None)
    ran = [e for e in events if e.get("ph") == "X" and processes.get(e["pid"]) == first]
    return [
        Kernel(e["name"], e["dur"], e.get("args", {}).get("hlo_op", ""))
        for e in sorted(ran, key=lambda e: e["ts"])
    ]


def traces(call: Callable, operands: tuple) -> list[list[Kernel]]:
    """The kernels of calls in a row, the first of which, slower ones, are left out."""
    return [kernels(call, operands) for _ in range(WARM + TRACES)][WARM:]


def _places(types, like):
    """The shardings that these types say, on the mesh of a sharding; None where it has no mesh."""

    def place(t):
        return (
            NamedSharding(like.mesh, t.sharding.spec) if isinstance(like, NamedSharding) else None
        )

    return jax.tree.map(place, types)


PAUSE = 0.05  # seconds before a burst
BURST = 0.006  # seconds that a program of a burst takes, about
PAIRS = 20  # of a kernel and its reference, whose median is a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What will be a row of a results file.

    Attributes:
      ours, reference: a function and its operands, each.
      seconds: about how long a call of each takes: so many of them fill a burst.
      row: the row for median seconds of both and the median of the ratios reference / ours of pairs.
      check: raises if ours is wrong; what is wrong is not timed.
    """

    ours: tuple[Callable, tuple]
    reference: tuple[Callable, tuple]
    seconds: tuple[float, float]
    row: Callable[[float, float, float], dict]
    check: Callable[[], None] = lambda: None


def burst(
    function: Callable, operands: tuple, seconds: float, length: float = BURST
) -> Callable[[], float]:
    """Measures the device time of a call that takes about so many seconds, in bursts after pauses.

    An H200 that works without pauses is at its power limit after tens of milliseconds: its clock then depends on its
    temperature and on what ran before. A burst is over earlier. It is one program twice, each of several calls one
    after the other; what counts is the second, from the first's end to its own, by the GPU's clock: the dispatch and
    the start are over by then.

    Args:
      length: seconds that a program of the burst takes, about.
    """
    repeat, calls = _filling(function, operands, seconds, length)
    now = _clock()

    def once():
        time.sleep(PAUSE)
        start = now(repeat(*operands))
        end = now(repeat(*operands))
        return int((end - start)[0]) * 1e-9 / calls

    return once


def hot(
    function: Callable, operands: tuple, seconds: float, length: float = 0.03, pause: float = 0
) -> Callable[[], float]:
    """As `burst`, of one program, as a training step is: without pauses, or after one of so many seconds.

    What is returned takes operands, as that of `steps` does.
    """
    repeat, calls = _filling(function, operands, seconds, length)

    def once(*given):
        time.sleep(pause)
        start = time.perf_counter()
        jax.block_until_ready(repeat(*(given or operands)))
        return (time.perf_counter() - start) / calls

    return once


def _filling(
    function: Callable, operands: tuple, seconds: float, length: float
) -> tuple[Callable, int]:
    """A program of calls that take so many seconds each and so many together, and how many they are."""
    calls, steps = 1, 2
    if jax.default_backend() == "gpu":  # elsewhere the programs are tried, not timed
        calls = SHORT if seconds < 2e-4 else 1
        steps = max(2, round(length / seconds / calls) - 1)
    repeat = _repeated(function, steps, calls).lower(*operands).compile()
    return repeat, (steps + 1) * calls


def _clock() -> Callable[[object], object]:
    """A function that says when what it is given is there, in nanoseconds, uint32[1]."""
    if jax.default_backend() == "gpu":
        from benchmarks import _clock  # needs Triton

        zero = jnp.zeros(1, jnp.int32)
        return lambda _: _clock.read(zero)

    def now(result):
        jax.block_until_ready(result)
        return np.array([time.perf_counter_ns() % 2**32], np.uint32)

    return now


def measured(cases: Iterable[Case], pairs: int = PAIRS, length: float = BURST) -> Iterable[dict]:
    """The rows of all cases: first everything is compiled, side by side; then each pair alternates so many times.

    Args:
      length: of a burst's programs, in seconds.

    Raises:
      RuntimeError: some cases failed, after the rows of all others.
    """
    cases, failed = list(cases), []
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = {}  # a reference of several cases is compiled once

        def compiled(side, seconds):
            key = (id(side[0]), *map(id, side[1]))
            if key not in programs:
                programs[key] = pool.submit(burst, *side, seconds, length)
            return programs[key]

        sides = [tuple(map(compiled, (c.ours, c.reference), c.seconds)) for c in cases]
        # XLA chooses algorithms by their time while it compiles: nothing else may run then.
        concurrent.futures.wait(programs.values())
        jobs = [(pool.submit(c.check), *pair) for c, pair in zip(cases, sides, strict=True)]
    print(f"compiled and checked in {time.perf_counter() - start:.1f} s", flush=True)
    for case, (checked, *sides) in zip(cases, jobs, strict=True):
        try:
            checked.result()
            ours, theirs = (side.result() for side in sides)
            ours(), theirs()
            # Each is the first one in turn: what runs before decides about the clock.
            timed = [
                (ours(), theirs()) if i % 2 else (theirs(), ours())[::-1] for i in range(pairs)
            ]
        except Exception as error:
            traceback.print_exception(error)
            failed.append(repr(error).splitlines()[0])
            continue
        mine, others = (statistics.median(times) for times in zip(*timed, strict=True))
        yield case.row(mine, others, statistics.median(b / a for a, b in timed))
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cases)} rows failed: {'; '.join(failed)}")


def copy_of(num_bytes: int) -> tuple[Callable, tuple]:
    """What copies, and its operands: so many bytes, half of them read and half written."""
    return (lambda x: x + 1), (jnp.zeros(num_bytes // 4, jnp.bfloat16),)


def copy_case(bench: str, case: str, function: Callable, operands: tuple, num_bytes: int) -> Case:
    """For what moves `num_bytes`, read and written, against a copy of as many bytes."""

    def describe(mine, theirs, ratio):
        name = "a copy of as many bytes"
        return rate_row(bench, case, num_bytes, mine, name, theirs, ratio, unit="TB/s")

    return Case(
        ours=(function, operands),
        reference=copy_of(num_bytes),
        seconds=(num_bytes / 4e12, num_bytes / 3e12),
        row=describe,
    )


def gemm_case(
    bench: str,
    case: str,
    flops: int,
    ours: tuple,
    other: tuple,
    name: str,
    rates=(600e12, 600e12),
    check: Callable[[], None] = lambda: None,
) -> Case:
    """For a GEMM, a (function, operands), against another of as many operations; `rates` are about those of both."""

    def describe(mine, theirs, ratio):
        return rate_row(bench, case, flops, mine, name, theirs, ratio)

    seconds = tuple(flops / rate for rate in rates)
    return Case(ours=ours, reference=other, seconds=seconds, row=describe, check=check)


def time_case(
    bench: str,
    case: str,
    ours: tuple,
    other: tuple,
    name: str,
    seconds,
    check: Callable[[], None] = lambda: None,
) -> Case:
    """For a (function, operands), against another that does the same; times in microseconds."""

    def describe(mine, theirs, ratio):
        return time_row(bench, case, mine, name, theirs, ratio=ratio)

    return Case(ours=ours, reference=other, seconds=seconds, row=describe, check=check)


def alternate(
    ours: tuple[Callable, tuple],
    reference: tuple[Callable, tuple],
    pairs: int = PAIRS,
    measure: Callable = program,
) -> tuple[float, float, float]:
    """Median seconds of two (function, operands), and the median of the ratios reference / ours of pairs."""
    a, b = measure(*ours), measure(*reference)
    a(), b()
    timed = [(a(), b()) for _ in range(pairs)]
    mine, theirs = (statistics.median(times) for times in zip(*timed, strict=True))
    return mine, theirs, statistics.median(other / own for own, other in timed)


def rate_row(
    bench: str,
    case: str,
    amount: int,
    seconds: float,
    name: str,
    other: float,
    ratio=None,
    *,
    unit="TFLOP/s",
):
    """A row for so many operations, or bytes, in so many seconds, against another that takes `other`.

    Args:
      ratio: None: other / seconds.
      unit: "TFLOP/s" or "TB/s".
    """
    theirs = amount / other / 1e12
    return row(
        bench=bench,
        case=case,
        metric="rate",
        value=amount / seconds / 1e12,
        unit=unit,
        reference=f"{name}, {theirs:{'.2f' if unit == 'TB/s' else '.0f'}} {unit}",
        ratio=ratio or other / seconds,
    )


def time_row(
    bench: str,
    case: str,
    seconds: float,
    name: str,
    other: float,
    *,
    unit="us",
    ratio=None,
    note="",
):
    """A row for what takes so many seconds, against another that takes `other`; `ratio` None: other / seconds."""
    scale = {"us": 1e6, "ms": 1e3, "s": 1}[unit]
    theirs = scale * other
    return row(
        bench=bench,
        case=case,
        metric="time",
        value=scale * seconds,
        unit=unit,
        reference=f"{name}, {theirs:{'.0f' if theirs >= 100 else '.3g'}} {unit}{note}",
        ratio=ratio or other / seconds,
    )


def with_means(rows: Iterable[dict], group_of: Callable[[dict], str | None]) -> Iterable[dict]:
    """The rows, then one for each group of several: the geometric mean of their ratios."""
    groups: dict[str, list[dict]] = {}
    for one in rows:
        if group := group_of(one):
            groups.setdefault(group, []).append(one)
        yield one
    for name, members in groups.items():
        if len(members) == 1:
            continue
        mean = statistics.geometric_mean(one["ratio"] for one in members)
        yield members[0] | {
            "case": f"{name}, mean of {len(members)} shapes",
            "metric": "ratio",
            "value": round(mean, 3),
            "unit": "times",
            "reference": members[0]["reference"].partition(",")[0],
            "ratio": round(mean, 4),
        }


def row(**measured) -> dict:
    """A row of a results file: what was measured, and where."""
    packages = ("jax", "jaxlib", "jax-triton", "triton", "expertmesh-core")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        **measured,
        "value": round(measured["value"], 3),
        "ratio": round(measured["ratio"], 4),
        "gpus": jax.device_count() if jax.default_backend() == "gpu" else 0,
        "device": jax.devices()[0].device_kind,
        "versions": {name: version for name in packages if (version := _version(name))},
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def line(row: dict) -> str:
    """What a row says, for a person."""
    result = f"{row['value']:.4g} {row['unit']}, {row['ratio']:.3f} of {row['reference']}"
    return f"{row['case']}: {result}"


def write(path: pathlib.Path | None, rows: Iterable[dict]) -> None:
    """Prints each row when it is there, and writes those that there are as a JSON list: a run may be cut short."""
    done, start = [], time.perf_counter()
    for one in rows:
        now = time.perf_counter()
        print(f"{line(one)} ({now - start:.1f} s)", flush=True)
        start = now
        done.append(one)
        if path:
            path.write_text(json.dumps(done, indent=1) + "\n")
