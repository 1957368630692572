"""Trains the main job's default model under each recipe, and compares validation losses with those of bfloat16.

    python docs/training_curves.py                          train what is missing, then write table, plot and JSON
    python docs/training_curves.py --recipes mxfp8 --seeds 0    only these runs; the others come later
    python docs/training_curves.py --report                 only write, from the runs that there are
    python docs/training_curves.py -- --cpu-devices 4       what follows -- goes to each run

A run is one process of the main job, in a folder of its own, and is resumed where it was killed. Finished ones are
kept in docs/numerics.json; one with other settings or another text is run again. Exit status 1: a recipe of 8 bits is
farther than 1 % from bfloat16. With +save_8_bits behind a name, the main job has --remat
save_8_bits.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import threading

from marks import filled

from expertmesh.train.checkpoint import write_whole
from expertmesh.train.data import load_corpus
from expertmesh.train.options import RECIPES, ModelOptions

DOCS = pathlib.Path(__file__).resolve().parent
BEGIN = "<!-- docs/training_curves.py -->"
PLAIN = "bfloat16"
KEPT = [f"{recipe}+save_8_bits" for recipe in (PLAIN, "fp8_current", "fp8_block")]
NAMES = [PLAIN, *RECIPES, *KEPT]
WITHIN = 0.01  # of the validation loss of bfloat16, for each recipe of 8 bits
SMOOTHED = 10  # steps of training loss to a point of the plot


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. `recipe` is one of NAMES."""

    recipe: str
    seed: int

    def __str__(self) -> str:
        return f"{self.recipe}-{self.seed}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each on its share of the cores"
    )
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/numerics"))
    parser.add_argument(
        "--docs", type=pathlib.Path, default=DOCS, help="where results are read and written"
    )
    parser.add_argument("arguments", nargs="*", help="after --: arguments of each run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    results = Results(options.docs / "numerics.json")
    if not options.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        train_missing(options, results)
    return report(results.runs, options.docs)


class Results:
    """The finished runs, by name, on disk after each change."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.runs: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
        self._lock = threading.Lock()

    def add(self, run: Run, result: dict) -> None:
        with self._lock:
            self.runs[str(run)] = result
            lines = (
                f"{json.dumps(name)}: {json.dumps(self.runs[name])}" for name in sorted(self.runs)
            )
            write_whole(self.path, "{\n" + ",\n".join(lines) + "\n}\n")


def settings(options: argparse.Namespace) -> dict:
    return {"steps": options.steps, "arguments": options.arguments}


def train_missing(options: argparse.Namespace, results: Results) -> None:
    """Trains what is not in `results`, several at a time.

    Raises:
      RuntimeError: a run failed.
    """
    corpus = (
        load_corpus(None, ModelOptions().seq_len) if "--data" not in options.arguments else None
    )
    runs = [Run(*pair) for pair in itertools.product(options.recipes, options.seeds)]
    runs.sort(key=lambda run: (run.seed, options.recipes.index(run.recipe)))

    def is_done(run: Run) -> bool:
        found = results.runs.get(str(run), {})
        same_text = corpus is None or found.get("data") == corpus.fingerprint
        return found.get("settings") == settings(options) and same_text

    cores = shares_of_cores(options.jobs)
    started: list[subprocess.Popen] = []

    def train_one(run: Run) -> None:
        share = cores.get()
        try:
            results.add(run, train(run, options, share, started))
        finally:
            cores.put(share)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        try:
            waiting = [pool.submit(train_one, run) for run in runs if not is_done(run)]
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                done.result()
                print(f"{number} of {len(waiting)} runs are done", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.terminate()  # the main job writes a checkpoint
            raise


def shares_of_cores(jobs: int) -> queue.SimpleQueue:
    """One set of cores for each job; None where they cannot be chosen."""
    shares: queue.SimpleQueue = queue.SimpleQueue()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for job in range(jobs):
        shares.put(set(cores[job::jobs]) or None)
    return shares


def train(run: Run, options: argparse.Namespace, cores, started: list) -> dict:
    """Runs the main job to its end, from its last checkpoint if there is one; returns the result."""
    folder = options.runs / str(run)
    options.runs.mkdir(parents=True, exist_ok=True)
    for resume in [True, False] if (folder / "options.json").exists() else [False]:
        with open(options.runs / f"{run}.log", "a") as log:
            process = subprocess.Popen(
                command(run, folder, options, resume), stdout=log, stderr=subprocess.STDOUT
            )
            started.append(process)
            if cores:
                os.sched_setaffinity(process.pid, cores)
            status = process.wait()
        if status == 0:
            return result_of(folder, settings(options))
        if status != 2:  # 2: that run was another one, which a fresh start moves away
            break
    raise RuntimeError(f"{run} ended with status {status}; see {options.runs / f'{run}.log'}")


def command(run: Run, folder: pathlib.Path, options: argparse.Namespace, resume: bool) -> list[str]:
    program = [sys.executable, "-m", "expertmesh.train"]
    recipe, _, remat = run.recipe.partition("+")
    return [
        *(*program, "--dtype", "bfloat16", "--steps", str(options.steps)),
        *("--seed", str(run.seed), "--out", str(folder)),
        *(("--recipe", recipe) if recipe != PLAIN else ()),
        *(("--remat", remat) if remat else ()),
        *(("--resume",) if resume else ()),
        *options.arguments,
    ]


def result_of(folder: pathlib.Path, chosen: dict) -> dict:
    """What is kept of a finished run."""
    with open(folder / "metrics.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    losses = [float(row["loss"]) for row in rows]
    parts = [losses[i : i + SMOOTHED] for i in range(0, len(losses), SMOOTHED)]
    return {
        "settings": chosen,
        "data": json.loads((folder / "options.json").read_text())["data"],
        "valid_loss": {row["step"]: float(row["valid_loss"]) for row in rows if row["valid_loss"]},
        "train_loss": [round(statistics.fmean(part), 5) for part in parts],
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """A recipe's validation loss after the last step: of each seed, and their mean, relative to bfloat16's."""

    recipe: str
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    difference: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def is_within(self) -> bool:
        """Of 4 bits nothing is asked."""
        return self.recipe == "nvfp4" or abs(self.difference) <= WITHIN


def compare(runs: dict[str, dict]) -> list[Row]:
    """One row for bfloat16 and for each recipe, over the seeds that both have.

    Raises:
      ValueError: no run of bfloat16, or runs that cannot be compared.
    """
    if len({json.dumps([run["settings"], run["data"]]) for run in runs.values()}) > 1:
        raise ValueError(
            "training_curves: all runs must have the same settings and text; got "
            f"{sorted({str(run['settings']) + run['data'][:8] for run in runs.values()})}; "
            "run them on one machine, or delete docs/numerics.json"
        )
    last = {name: list(run["valid_loss"].values())[-1] for name, run in runs.items()}
    rows = []
    for recipe in NAMES:
        seeds = seeds_of(runs, recipe)
        if not seeds and recipe == PLAIN:
            raise ValueError(
                f"training_curves: there must be runs of {PLAIN}; got {sorted(runs)}; make them"
            )
        if not seeds:
            print(f"not yet: {recipe}")
            continue
        losses = tuple(last[str(Run(recipe, seed))] for seed in seeds)
        plain = statistics.fmean(last[str(Run(PLAIN, seed))] for seed in seeds)
        rows.append(Row(recipe, seeds, losses, statistics.fmean(losses) / plain - 1))
    return rows


def seeds_of(runs: dict[str, dict], recipe: str) -> tuple[int, ...]:
    """The seeds with which the recipe and bfloat16 were run."""
    seeds = sorted(int(n.rpartition("-")[2]) for n in runs if n.rpartition("-")[0] == recipe)
    return tuple(seed for seed in seeds if str(Run(PLAIN, seed)) in runs)


def table(rows: list[Row]) -> str:
    lines = ["| | mean | to bfloat16 | each seed |", "|---|---|---|---|"]
    for row in rows:
        change = (
            "" if row.recipe == PLAIN else f"{100 * row.difference:+.2f} %, {len(row.seeds)} seeds"
        )
        each = ", ".join(f"{loss:.4f}" for loss in row.losses)
        lines.append(f"| {row.recipe} | {row.mean:.4f} | {change} | {each} |")
    return "\n".join(lines)


def plot(runs: dict[str, dict], rows: list[Row], path: pathlib.Path) -> None:
    """Training losses, and how far validation losses are from those of bfloat16 with the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        mine, plain = (
            [runs[str(Run(name, seed))] for seed in row.seeds] for name in (row.recipe, PLAIN)
        )
        mean = [statistics.fmean(p) for p in zip(*(r["train_loss"] for r in mine), strict=True)]
        steps = [SMOOTHED * (i + 0.5) for i in range(len(mean))]
        (line,) = left.plot(steps, mean, linewidth=0.9, label=row.recipe)
        if row.recipe == PLAIN:
            continue
        each = [percent(run, base) for run, base in zip(mine, plain, strict=True)]
        at, color = [int(step) for step in plain[0]["valid_loss"]], line.get_color()
        for one in each:
            right.plot(at, one, color=color, alpha=0.25, linewidth=0.7)
        mean = [statistics.fmean(p) for p in zip(*each, strict=True)]
        right.plot(at, mean, "o-", color=color, markersize=3, label=row.recipe)
    right.axhspan(-100 * WITHIN, 100 * WITHIN, color="grey", alpha=0.15)
    left.set(xlabel="step", ylabel="nats per byte", title="Training loss, mean of the seeds")
    right.set(
        xlabel="step", ylabel="%", title="Validation loss, relative to bfloat16", ylim=(-4, 4)
    )
    left.legend()
    figure.savefig(path, dpi=100)


def percent(run: dict, base: dict) -> list[float]:
    """How far the validation losses of a run are above those of another."""
    losses = zip(run["valid_loss"].values(), base["valid_loss"].values(), strict=True)
    return [100 * (mine / other - 1) for mine, other in losses]


def report(runs: dict[str, dict], docs: pathlib.Path) -> int:
    """Writes the table into the page, and the plot; returns the exit status."""
    rows = compare(runs)
    new = table(rows)
    print(new)
    picture = "![Training losses, and validation losses relative to bfloat16](numerics.png)"
    page = docs / "numerics.md"
    write_whole(page, filled(page.read_text(), BEGIN, f"{new}\n\n{picture}"))
    plot(runs, rows, docs / "numerics.png")
    for row in rows:
        if not row.is_within:
            print(
                f"{row.recipe} is {100 * row.difference:+.2f} % from {PLAIN}, more than {100 * WITHIN:g} %"
            )
    return int(not all(row.is_within for row in rows))


if __name__ == "__main__":
    sys.exit(main())
