"""Plants each fault of table.toml in a copy of the tree and demands that its test fails.

    tests/faults/run.py [NAME...] [-j N]      plant these faults, or all
    tests/faults/run.py --list                print them, and whether each can be planted

A fault is found if pytest ends with exit status 1: some test failed. Tests that can't be collected, or that pass, do
not find it. The same tests must pass in a copy without any fault. A fault whose test needs a package that is not
installed is skipped. Standard library only.

Git has 300 more, most of them of one op each: `git log -- 'tests/faults/*.patch'`.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from planting import GREEN, RED, TIMEOUT, copy_tree, run_tests, uses_copy  # noqa: E402

TABLE = pathlib.Path(__file__).with_name("table.toml")
SECONDS = 400  # for one run of pytest
TOGETHER = 30  # faults whose tests are run by one pytest, where none is planted
ENDS = {
    GREEN: "not found: the tests pass",
    RED: "found",
    2: "not found: pytest was interrupted, as by an error in collection",
    3: "not found: an internal error of pytest",
    4: "not found: pytest can't use its arguments",
    5: "not found: no test was collected",
    TIMEOUT: "not found: the tests ran past their time",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table, which describes the fields."""

    name: str
    broken: str
    file: str
    old: str
    new: str
    test: str
    crash: bool = False
    needs: str = ""

    @property
    def is_testable(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.test))

    def finds(self, status: int) -> bool:
        return status not in ENDS if self.crash else status == RED

    def problem(self, tree: pathlib.Path) -> str:
        """Why it can't be planted, or ""."""
        path = tree / self.file
        if not path.is_file():
            return f"file must be in the repository; got file={self.file!r}; name the one that has its code"
        if (count := path.read_text().count(self.old)) != 1:
            return (
                f"old must occur once in {self.file}; got {count} times {self.old!r}; "
                "write what stands there now"
            )
        return ""

    def plant(self, tree: pathlib.Path) -> None:
        path = tree / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def all_faults() -> list[Fault]:
    rows = tomllib.loads(TABLE.read_text())
    return [Fault(name=name, **row) for name, row in rows.items()]


def look_for(fault: Fault, original: pathlib.Path) -> tuple[bool, str, float]:
    """Whether the fault is found, what to say of it, and seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(original, tree)
        if problem := fault.problem(tree):
            return False, problem, time.monotonic() - start
        fault.plant(tree)
        status, output = run_tests(tree, ["-x", *fault.tests], SECONDS)
    seconds, found = time.monotonic() - start, fault.finds(status)
    if found:
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return True, f"found by {first[1] if first else 'a crash'}", seconds
    said = ENDS.get(status, f"not found: pytest ended with {status}")
    return False, "\n".join([said, *output.splitlines()[-15:]]), seconds


def red_without_fault(faults: list[Fault], tree: pathlib.Path, jobs: int) -> dict[str, str]:
    """Name of each fault whose tests do not pass in the tree as it is, and the end of the output."""

    def check(group):
        status, output = run_tests(tree, sorted({t for f in group for t in f.tests}), SECONDS)
        if status == GREEN:
            return {}
        sets = {fault.tests for fault in group}
        if len(sets) > 1:  # whose tests are they?
            parts = [[fault for fault in group if fault.tests == tests] for tests in sets]
            return {name: end for part in parts for name, end in check(part).items()}
        end = "\n".join(["its tests fail without it", *output.splitlines()[-15:]])
        return {fault.name: end for fault in group}

    groups = [faults[i : i + TOGETHER] for i in range(0, len(faults), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return {name: end for ends in pool.map(check, groups) for name, end in ends.items()}


def list_faults(faults: list[Fault], tree: pathlib.Path) -> int:
    """Prints the faults; returns how many can't be planted."""
    failed = 0
    for fault in faults:
        problem = fault.problem(tree)
        failed += bool(problem)
        print(f"{fault.name}: {fault.broken}\n    {fault.test}")
        if problem:
            print(f"    {problem}")
    return failed


def run_faults(faults: list[Fault], original: pathlib.Path, jobs: int) -> int:
    """Prints one line per fault; returns how many were not found."""
    if not uses_copy(original):
        print("the packages are not imported from the copy: PYTHONPATH does not come first")
        return len(faults)
    print(f"without a fault: the tests of {len(faults)} faults", flush=True)
    for fault in faults:
        if not fault.is_testable:
            print(f"skip   {fault.name:32}         needs {fault.needs}", flush=True)
    faults = [fault for fault in faults if fault.is_testable]
    red, failed = red_without_fault(faults, original, jobs), 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        planted = [None if f.name in red else pool.submit(look_for, f, original) for f in faults]
        for fault, future in zip(faults, planted, strict=True):
            found, said, seconds = future.result() if future else (False, red[fault.name], 0.0)
            failed += not found
            state = "ok" if found else "FAILED"
            print(f"{state:6} {fault.name:32} {seconds:4.0f} s  {said}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all if none is named")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print them; run no test")
    options = parser.parse_args()
    faults = all_faults()
    if unknown := set(options.names) - {fault.name for fault in faults}:
        parser.error(f"no fault is named {', '.join(sorted(unknown))}; --list prints the names")
    chosen = [fault for fault in faults if not options.names or fault.name in options.names]

    with tempfile.TemporaryDirectory() as folder:
        original = pathlib.Path(folder, "tree")
        copy_tree(original)
        if options.list:
            failed = list_faults(chosen, original)
        else:
            failed = run_faults(chosen, original, options.jobs)
    skipped = 0 if options.list else sum(not fault.is_testable for fault in chosen)
    print(
        f"{len(chosen) - failed - skipped} passed, {failed} failed, {skipped} skipped", flush=True
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
