"""This tree's kernels and another commit's, by turns in one process: `python -m benchmarks.turns COMMIT [NAME...]`.

What `_measure.measured` would time in the benchmarks of both trees is paired by names of rows; `moe_block` stands for
both passes of the block on one GPU, under each recipe of `single_gpu_blocks`. Programs run hot, each once untimed
before it is timed, in an order drawn anew for each turn, and ours twice: how far the two figures are apart says what a
ratio is worth. Ratios are the other commit's time over ours.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import io
import itertools
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest import mock

import jax

from benchmarks import _measure, runnable, single_gpu_blocks

ROOT = pathlib.Path(__file__).parents[1]
BLOCK, BOTH = "moe_block", "forward and backward"
TEXT_OF = {name: (ROOT / f"benchmarks/{name}.py").read_text() for name in runnable()}
WITH_CASES = [name for name, text in TEXT_OF.items() if "measured(" in text]
# Those, what calls one of them, and the block.
NAMES = sorted(
    {BLOCK, *WITH_CASES}
    | {name for name, text in TEXT_OF.items() if any(f"{of}.main(" in text for of in WITH_CASES)}
)
PACKAGE, BENCHMARKS = "expertmesh_before", "benchmarks_before"  # the other commit's
TEXTS = (".py", ".cc", ".h", ".cu", ".cuh")
TURNS = 11


class Pair(NamedTuple):
    """A row's case in this tree and in the other."""

    name: str
    ours: _measure.Case
    theirs: _measure.Case


def tree_of(commit: str, folder: pathlib.Path) -> pathlib.Path:
    """A commit's files, or those of a folder."""
    if pathlib.Path(commit).is_dir():
        return pathlib.Path(commit)
    command = ["git", "-C", str(ROOT), "archive", commit, "packages", "benchmarks"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / "tree", filter="data")
    return folder / "tree"


def rename(tree: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a tree's packages and benchmarks under names of their own, which Python finds from then on."""
    for source in tree.glob("packages/*/src/expertmesh"):
        shutil.copytree(source, folder / PACKAGE, dirs_exist_ok=True)
    shutil.copytree(tree / "benchmarks", folder / BENCHMARKS)
    for path in folder.glob("*_before/**/*"):
        if path.suffix in TEXTS:
            text = path.read_text().replace("expertmesh", PACKAGE)
            if BENCHMARKS in path.parts:
                text = text.replace("benchmarks", BENCHMARKS)
            path.write_text(text)
    sys.path.append(str(folder))


def build(folder: pathlib.Path) -> None:
    """The extensions of the renamed packages."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    for path in folder.glob(f"{PACKAGE}/*/_native/__main__.py"):
        module = ".".join(path.parent.relative_to(folder).parts)
        subprocess.run([sys.executable, "-m", module], env=env, check=True)


def cases_of(package: str, benchmark: str) -> dict[str, _measure.Case]:
    """What a benchmark would time, by the names of its rows; the first of those of one name."""
    if benchmark == BLOCK:
        return dict(blocks_of(package))
    found: dict[str, _measure.Case] = {}
    module = importlib.import_module(f"{package}.{benchmark}")

    def keep(cases, **_):
        for case in cases:
            found.setdefault(case.row(1.0, 1.0, 1.0)["case"], case)
        return ()

    with (
        mock.patch.object(importlib.import_module(f"{package}._measure"), "measured", keep),
        mock.patch.object(sys, "argv", [benchmark]),
    ):
        module.main()
    return found


def blocks_of(package: str) -> Iterator[tuple[str, _measure.Case]]:
    """Both passes of the block, at the shapes that are compared with Transformer Engine's."""
    module = importlib.import_module(f"{package}.{BLOCK}")
    on_gpu = jax.default_backend() == "gpu"
    for each in single_gpu_blocks.TRANSFORMER_ENGINE if on_gpu else (single_gpu_blocks.SMALL,):
        shape = module.Shape(*(getattr(each, field.name) for field in dataclasses.fields(each)))
        arrays = module.operands(shape, None)
        for recipe in (None, *single_gpu_blocks.RECIPES):
            name = f"{recipe or 'bfloat16'} {BOTH}, {shape}"
            side = module.passes(module.moe, shape.config(recipe=recipe))[BOTH], arrays
            yield (
                name,
                _measure.time_case(BLOCK, name, side, side, "itself", [shape.flops() / 2e14] * 2),
            )


def pairs(benchmark: str, match: str) -> Iterator[Pair]:
    ours, theirs = (cases_of(package, benchmark) for package in ("benchmarks", BENCHMARKS))
    for name, case in ours.items():
        if match in name and name in theirs:
            yield Pair(name, case, theirs[name])
    if alone := sorted(name for name in {*ours} ^ {*theirs} if match in name):
        print(f"{benchmark}: in one tree alone: {', '.join(alone)}", flush=True)


def row_of(benchmark: str, pair: Pair, commit: str) -> dict:
    """Times a pair by turns."""
    sides = {"ours": pair.ours.ours, "again": pair.ours.ours, "theirs": pair.theirs.ours}
    seconds = pair.ours.seconds[0]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = pool.map(lambda side: _measure.hot(*side, seconds), sides.values())
        programs = dict(zip(sides, made, strict=True))
    times: dict[str, list[float]] = {name: [] for name in programs}
    order, rng = list(programs), random.Random(0)
    for _ in range(TURNS):
        rng.shuffle(order)
        for name in order:
            programs[name]()
            times[name].append(programs[name]())
    ours, again, theirs = (statistics.median(times[name]) for name in sides)
    return _measure.time_row(
        "turns",
        f"{benchmark}: {pair.name}",
        ours,
        commit,
        theirs,
        note=f"; ours once more {theirs / again:.3f}",
    )


def rows(commit: str, names: Iterable[str], match: str, failed: list[str]) -> Iterator[dict]:
    for name, pair in itertools.chain.from_iterable(
        ((name, pair) for pair in pairs(name, match)) for name in names
    ):
        try:
            yield row_of(name, pair, commit)
        except Exception as error:
            traceback.print_exception(error)
            failed.append(f"{name}: {pair.name}")


def compare() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="of git, or a folder that has its files")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--match", default="", help="rows whose names have this alone")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*NAMES}):
        parser.error(f"no such benchmark has cases: {', '.join(unknown)}; there are {NAMES}")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rename(tree_of(options.commit, folder), folder)
        build(folder)
        found = rows(options.commit, options.names or NAMES, options.match, failed)
        _measure.write(options.json, found)
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(compare())
