"""Runs the tests of each module of table.toml on its mutants, in a copy of the tree, and lists those that survive.

    tests/mutants/run.py [MODULE...]          of these modules, such as core/specs.py, or of all
    tests/mutants/run.py --list [MODULE...]   print the mutants; run no test
    --again                                   those that survived too, as after a new test
    --seconds N                               begin no other mutant after that time

Results are kept in runs/mutants and taken from there while the module's text is the same, so that a run that was
cut off goes on. survivors.toml has the reason for each mutant that may survive; the others are printed with a diff, and
the exit status is 1 if there is one, or if a module's tests fail without a mutant.

This process imports JAX and none of the packages; each mutant is tested in a fork of it.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import tomllib

sys.path[:0] = [str(path) for path in pathlib.Path(__file__).resolve().parents[:2]]

from mutate import Mutant, mutants  # noqa: E402

from planting import GREEN, RED, ROOT, TIMEOUT, copy_tree, environment, uses_copy  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = ROOT / "runs/mutants"
KILLED, SURVIVED = "killed", "survived"
SECONDS = 300  # for the tests of a module without a mutant


def table() -> dict[str, dict]:
    """Each module's tests."""
    return tomllib.loads((HERE / "table.toml").read_text())


def reasons() -> dict[tuple[str, str], str]:
    """Why a mutant, by module and name, may survive."""
    rows = tomllib.loads((HERE / "survivors.toml").read_text())["survivors"]
    return {(row["module"], name): row["reason"] for row in rows for name in row["mutants"]}


def path_of(module: str) -> str:
    """`core/specs.py` in the repository."""
    package, _, rest = module.partition("/")
    return f"packages/{package}/src/expertmesh/{package}/{rest}"


def text_of(module: str) -> str:
    return (ROOT / path_of(module)).read_text()


class Results:
    """What became of each mutant, on disk after each; a file for each module, so that two runs go side by side."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def of(self, module: str) -> dict[str, str]:
        """By name, of the module as its text is now."""
        path = self._path(module)
        kept = json.loads(path.read_text()) if path.exists() else {}
        return kept["mutants"] if kept.get("digest") == _digest(module) else {}

    def add(self, module: str, mutant: Mutant, end: str) -> None:
        ends = self.of(module) | {mutant.name: end}
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = {"digest": _digest(module), "mutants": ends}
        self._path(module).write_text(json.dumps(kept, indent=1) + "\n")

    def _path(self, module: str) -> pathlib.Path:
        return self._folder / module.replace("/", ".").replace(".py", ".json")


def _digest(module: str) -> str:
    return hashlib.sha256(text_of(module).encode()).hexdigest()


def import_once(tree: pathlib.Path) -> None:
    """What every fork has then; conftest.py has the settings that JAX reads when it is imported."""
    os.chdir(tree)
    os.environ |= environment(tree)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    for name in ("conftest", "jax", "flax.linen", "hypothesis", "pytest"):
        importlib.import_module(name)


def run_tests(tests, seconds: float) -> tuple[int, str]:
    """pytest's exit status and output, in a fork; TIMEOUT where it takes longer than `seconds`."""
    import pytest

    with tempfile.TemporaryFile("w+") as output:
        if (fork := os.fork()) == 0:
            os.setsid()
            for stream in (sys.stdout, sys.stderr):
                os.dup2(output.fileno(), stream.fileno())
            os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))
        status = _wait(fork, time.monotonic() + seconds)
        output.seek(0)
        return status, output.read()


def _wait(fork: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(fork, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    return TIMEOUT


def run_module(module, tests, tree, results: Results, *, again: bool, deadline: float) -> bool:
    """Runs the tests on each mutant that has no result yet; returns whether they pass without any."""
    known = results.of(module)
    wanted = [
        mutant
        for mutant in mutants(text_of(module))
        if mutant.name not in known or again and known[mutant.name] == SURVIVED
    ]
    if not wanted:
        return True
    start = time.monotonic()
    status, output = run_tests(tests, SECONDS)
    if status != GREEN:
        print(f"{module}: its tests must pass without a mutant; got\n{output[-3000:]}", flush=True)
        return False
    limit = 10 + 5 * (time.monotonic() - start)
    path = tree / path_of(module)
    print(f"{module}: {len(wanted)} mutants, at most {limit:.0f} s each", flush=True)
    for mutant in wanted:
        if time.monotonic() > deadline:
            break
        with written(path, mutant.text):
            status, output = run_tests(tests, limit)
        end = SURVIVED if status == GREEN else KILLED if status == RED else f"{KILLED}: {status}"
        results.add(module, mutant, end)
        if end == SURVIVED:
            print(f"  survived: {mutant.name}", flush=True)
    return True


@contextlib.contextmanager
def written(path: pathlib.Path, text: str):
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def report(modules, results: Results) -> int:
    """Prints counts, the survivors without a reason, and reasons for none; returns how many survivors have none."""
    known, unexplained = reasons(), 0
    for module in modules:
        source, ends = text_of(module), results.of(module)
        every = {mutant.name: mutant for mutant in mutants(source)}
        survived = [every[name] for name, end in ends.items() if end == SURVIVED and name in every]
        new = [mutant for mutant in survived if (module, mutant.name) not in known]
        counted = collections.Counter(
            ends[name].partition(":")[0] for name in every if name in ends
        )
        print(
            f"{module}: {len(every)} mutants, {counted[KILLED]} killed, {len(survived) - len(new)} may survive, "
            f"{len(new)} survive without a reason, {len(every) - counted.total()} not run"
        )
        for mutant in new:
            print(f"{path_of(module)}:{mutant.line}: {mutant.name}\n{mutant.diff(source)}")
        for of, name in known:
            if of == module and (name not in every or ends.get(name, SURVIVED) != SURVIVED):
                print(f"survivors.toml: {module} has no such survivor: {name}")
        unexplained += len(new)
    return unexplained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as core/specs.py")
    parser.add_argument("--list", action="store_true", help="print the mutants; run no test")
    parser.add_argument("--again", action="store_true", help="run those that survived, too")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    tests, start = table(), time.monotonic()
    if unknown := set(options.modules) - set(tests):
        parser.error(f"MODULE must be in table.toml; got {', '.join(sorted(unknown))}; add it")
    modules = options.modules or list(tests)
    if options.list:
        for module in modules:
            for mutant in mutants(text_of(module)):
                print(f"{path_of(module)}:{mutant.line}: {mutant.name}")
        return 0
    results = Results(RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        copy_tree(tree)
        if not uses_copy(tree):
            raise SystemExit("the packages must be imported from the copy; clear PYTHONPATH")
        import_once(tree)
        deadline = start + options.seconds
        green = [
            run_module(m, tests[m]["tests"], tree, results, again=options.again, deadline=deadline)
            for m in modules
        ]
    return bool(report(modules, results)) or not all(green)


if __name__ == "__main__":
    sys.exit(main())
