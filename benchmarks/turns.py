"""This tree's kernels and other commits', by turns in one process: `python -m benchmarks.turns COMMIT,... [NAME...]`.

What `_measure.measured` would time in the benchmarks of all trees is compared by names of rows; `moe_block` stands for
both passes of the block on one GPU, under each recipe of `single_gpu_blocks`. Programs run hot on the same arrays, each
once untimed before it is timed, in an order drawn anew for each turn, and ours twice: a difference is worth nothing
unless it is larger than between those two. Identical programs of two trees are up to 2 % apart. Ratios are the other's
time over ours. With `--peers` what a row is compared with in its benchmark, such as XLA's GEMM, takes turns, too: rows
of one name and several references are then told apart.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import io
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
TEXTS = (".py", ".cc", ".h", ".cu", ".cuh")
TURNS = 11


class Tree(NamedTuple):
    """What another commit's packages and benchmarks are called here."""

    commit: str
    package: str
    benchmarks: str


class Row(NamedTuple):
    """A row's case in this tree, and in others by commit."""

    name: str
    ours: _measure.Case
    theirs: dict[str, _measure.Case]


def tree_of(commit: str, folder: pathlib.Path) -> pathlib.Path:
    """A commit's files, or those of a folder."""
    if pathlib.Path(commit).is_dir():
        return pathlib.Path(commit)
    command = ["git", "-C", str(ROOT), "archive", commit, "packages", "benchmarks"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / "tree", filter="data")
    return folder / "tree"


def rename(source: pathlib.Path, commit: str, number: int, folder: pathlib.Path) -> Tree:
    """Copies packages and benchmarks to a folder that Python searches, under names of their own."""
    tree = Tree(commit, f"expertmesh_before_{number}", f"benchmarks_before_{number}")
    for packages in source.glob("packages/*/src/expertmesh"):
        shutil.copytree(packages, folder / tree.package, dirs_exist_ok=True)
    shutil.copytree(source / "benchmarks", folder / tree.benchmarks)
    for path in folder.glob(f"*_before_{number}/**/*"):
        if path.suffix in TEXTS:
            text = path.read_text().replace("expertmesh", tree.package)
            if tree.benchmarks in path.parts:
                text = text.replace("benchmarks", tree.benchmarks)
            path.write_text(text)
    return tree


def build(tree: Tree, folder: pathlib.Path) -> None:
    """The extensions of the renamed packages."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    for path in folder.glob(f"{tree.package}/*/_native/__main__.py"):
        module = ".".join(path.parent.relative_to(folder).parts)
        subprocess.run([sys.executable, "-m", module], env=env, check=True)


def trees_of(commits: Iterable[str], folder: pathlib.Path) -> list[Tree]:
    """Those of all commits, ready to be imported."""
    trees = []
    for number, commit in enumerate(dict.fromkeys(commits)):
        archived = folder / str(number)
        archived.mkdir()
        trees.append(rename(tree_of(commit, archived), commit, number, folder))
        build(trees[-1], folder)
    sys.path.append(str(folder))
    return trees


def cases_of(package: str, benchmark: str, peers: bool) -> dict[str, _measure.Case]:
    """What a benchmark would time, by the names of its rows; the first of those of one name, or of one peer beside."""
    if benchmark == BLOCK:
        return dict(blocks_of(package))
    found: dict[str, _measure.Case] = {}
    module = importlib.import_module(f"{package}.{benchmark}")

    def keep(cases, **_):
        for case in cases:
            row = case.row(1.0, 1.0, 1.0)
            beside = f" beside {_peer_of(row)}" if peers else ""
            found.setdefault(row["case"] + beside, case)
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


def _peer_of(row: dict) -> str:
    """The reference without its figure."""
    return row["reference"].rpartition(", ")[0]


def in_all(benchmark: str, trees: list[Tree], options: argparse.Namespace) -> Iterator[Row]:
    """The rows that every tree has."""
    ours = cases_of("benchmarks", benchmark, options.peers)
    theirs = {of.commit: cases_of(of.benchmarks, benchmark, options.peers) for of in trees}
    for name, case in ours.items():
        if options.match in name and all(name in cases for cases in theirs.values()):
            yield Row(name, case, {commit: cases[name] for commit, cases in theirs.items()})
    for commit, cases in theirs.items():
        if alone := sorted(name for name in {*ours} ^ {*cases} if options.match in name):
            print(f"{benchmark}: of {commit} and ours in one alone: {', '.join(alone)}", flush=True)


def of_same(ours: tuple, theirs: tuple) -> tuple:
    """Their function, of our operands if those are alike."""
    (_, operands), (function, others) = ours, theirs
    alike = jax.tree.map(jax.typeof, operands) == jax.tree.map(jax.typeof, others)
    return function, operands if alike else others


def rows_of(benchmark: str, row: Row, peers: bool) -> Iterator[dict]:
    """Times all sides of a row by turns: one row for each commit, and for the peer."""
    others = {commit: of_same(row.ours.ours, case.ours) for commit, case in row.theirs.items()}
    if peers and row.ours.reference is not row.ours.ours:
        others[_peer_of(row.ours.row(1.0, 1.0, 1.0))] = row.ours.reference
    sides = [row.ours.ours, row.ours.ours, *others.values()]
    seconds = row.ours.seconds[0]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda side: _measure.hot(*side, seconds), sides))
    times: list[list[float]] = [[] for _ in programs]
    order, rng = list(range(len(programs))), random.Random(0)
    for _ in range(TURNS):
        rng.shuffle(order)
        for number in order:
            programs[number]()
            times[number].append(programs[number]())
    ours, again, *medians = map(statistics.median, times)
    for name, theirs in zip(others, medians, strict=True):
        note = f"; ours once more {theirs / again:.3f}"
        yield _measure.time_row("turns", f"{benchmark}: {row.name}", ours, name, theirs, note=note)


def rows(trees: list[Tree], options: argparse.Namespace, failed: list[str]) -> Iterator[dict]:
    for name in options.names or NAMES:
        for row in in_all(name, trees, options):
            try:
                yield from rows_of(name, row, options.peers)
            except Exception as error:
                traceback.print_exception(error)
                failed.append(f"{name}: {row.name}")


def compare() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", metavar="COMMIT,...", help="of git, or folders of such files")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--match", default="", help="rows whose names have this alone")
    parser.add_argument("--peers", action="store_true", help="with what rows are compared with")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*NAMES}):
        parser.error(f"no such benchmark has cases: {', '.join(unknown)}; there are {NAMES}")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        trees = trees_of(options.commits.split(","), pathlib.Path(name))
        _measure.write(options.json, rows(trees, options, failed))
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(compare())
