"""Plants each fault of this folder in a copy of the tree and demands that its tests turn red.

    tests/faults/run.py [NAME...] [-j N]      plant these faults, or all
    tests/faults/run.py --list                print them, and whether each patch still applies

A fault is a `NAME.patch`: a header, then a unified diff against the top of the repository. The header is

    What is broken, in one sentence of one or more lines.
    Test: arguments of pytest, the cheapest that must turn red
    Expect: crash                             where the tests end the interpreter instead of failing

A fault is found if pytest ends with exit status 1: some test failed. Tests that can't be collected, or that pass, do
not find it. The same tests must pass in a copy without any fault. Standard library only.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

FAULTS = pathlib.Path(__file__).resolve().parent
ROOT = FAULTS.parents[1]
TIMEOUT = 400  # seconds, for one run of pytest
TOGETHER = 30  # faults whose tests are run by one pytest, where none is planted
GREEN, RED = 0, 1
ENDS = {
    GREEN: "not found: the tests pass",
    RED: "found",
    2: "not found: pytest was interrupted, as by an error in collection",
    3: "not found: an internal error of pytest",
    4: "not found: pytest can't use its arguments",
    5: "not found: no test was collected",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One patch.

    Attributes:
      name: of the file, without its suffix.
      summary: what is broken.
      tests: arguments of pytest.
      crash: whether the tests end the interpreter.
      path: the file.
    """

    name: str
    summary: str
    tests: tuple[str, ...]
    crash: bool
    path: pathlib.Path

    def finds(self, status: int) -> bool:
        return status not in ENDS if self.crash else status == RED

    @property
    def selects(self) -> bool:
        """Whether it needs a pytest of its own: an option such as -k holds for all that are named."""
        return any(argument.startswith("-") for argument in self.tests)


def read_fault(path: pathlib.Path) -> Fault:
    """Parses a patch.

    Raises:
      ValueError: a header without a summary or a test.
    """
    header = path.read_text().partition("\n--- ")[0].partition("\ndiff ")[0]
    fields = dict(re.findall(r"^(Test|Expect): *(.+)$", header, re.MULTILINE))
    summary = " ".join(re.sub(r"^(Test|Expect):.*$", "", header, flags=re.MULTILINE).split())
    if not summary or "Test" not in fields or fields.get("Expect", "crash") != "crash":
        raise ValueError(
            f"{path.name}: the header must be a sentence, `Test: ...` and at most `Expect: crash`; got {header!r}; "
            "see tests/faults/run.py"
        )
    tests = tuple(shlex.split(fields["Test"]))
    return Fault(path.stem, summary, tests, "Expect" in fields, path)


def all_faults() -> list[Fault]:
    return [read_fault(path) for path in sorted(FAULTS.glob("*.patch"))]


def copy_tree(target: pathlib.Path) -> None:
    """The working tree's files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in set(listed.stdout.split("\0")) - {""}:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def apply(fault: Fault, tree: pathlib.Path, *, check: bool = False) -> str:
    """Plants the fault; returns why that is impossible, or ""."""
    # The folder above is no repository to git, even if the temporary folder lies in one.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", "-p1", *["--check"] * check, str(fault.path)]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return result.stderr.strip()


def test(tree: pathlib.Path, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit status and output, with the packages of `tree`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "PYTHONPATH": python_path(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        # A program that a fault does not change is not compiled again.
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/jax"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        result = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        return 2, f"ran past {TIMEOUT} s\n{error.output!r}"
    return result.returncode, result.stdout


def python_path(tree: pathlib.Path) -> str:
    """The packages of `tree`, before what is on the path already."""
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    return os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])


def uses_copy(tree: pathlib.Path) -> bool:
    """Whether the copy's packages are the ones that get imported."""
    program = "import expertmesh.core.specs as specs; print(specs.__file__)"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": python_path(tree), "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return pathlib.Path(found.stdout.strip()).resolve().is_relative_to(tree.resolve())


def plant(fault: Fault, original: pathlib.Path) -> tuple[bool, str, float]:
    """Whether the fault is found, what to say of it, and seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(original, tree)
        if problem := apply(fault, tree):
            return False, f"the patch does not apply: {problem}", time.monotonic() - start
        status, output = test(tree, ["-x", *fault.tests])
    seconds, found = time.monotonic() - start, fault.finds(status)
    if found:
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return True, f"found by {first[1] if first else 'a crash'}", seconds
    said = ENDS.get(status, f"not found: pytest ended with {status}")
    return False, "\n".join([said, *output.splitlines()[-15:]]), seconds


def red_without_fault(faults: list[Fault], tree: pathlib.Path, jobs: int) -> dict[str, str]:
    """Name of each fault whose tests do not pass in the tree as it is, and the end of the output."""
    together = [fault for fault in faults if not fault.selects]
    alone = dict.fromkeys(fault.tests for fault in faults if fault.selects)
    groups = [together[i : i + TOGETHER] for i in range(0, len(together), TOGETHER)]
    groups += [[fault for fault in faults if fault.tests == tests] for tests in alone]

    def check(group):
        status, output = test(tree, sorted({a for fault in group for a in fault.tests}))
        if status == GREEN:
            return {}
        sets = {fault.tests for fault in group}
        if len(sets) > 1:  # whose tests are they?
            parts = [[fault for fault in group if fault.tests == tests] for tests in sets]
            return {name: end for part in parts for name, end in check(part).items()}
        end = "\n".join(["its tests fail without it", *output.splitlines()[-15:]])
        return {fault.name: end for fault in group}

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return {name: end for ends in pool.map(check, groups) for name, end in ends.items()}


def list_faults(faults: list[Fault], tree: pathlib.Path) -> int:
    failed = 0
    for fault in faults:
        problem = apply(fault, tree, check=True)
        failed += bool(problem)
        print(f"{fault.name}: {fault.summary}\n    {shlex.join(fault.tests)}")
        if problem:
            print(f"    does not apply: {problem}")
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
    print(f"{len(chosen) - failed} passed, {failed} failed", flush=True)
    return bool(failed)


def run_faults(faults: list[Fault], original: pathlib.Path, jobs: int) -> int:
    """Prints one line per fault; returns how many were not found."""
    if not uses_copy(original):
        print("the packages are not imported from the copy: PYTHONPATH does not come first")
        return len(faults)
    print(f"without a fault: the tests of {len(faults)} faults", flush=True)
    red, failed = red_without_fault(faults, original, jobs), 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        planted = [None if f.name in red else pool.submit(plant, f, original) for f in faults]
        for fault, future in zip(faults, planted, strict=True):
            found, said, seconds = future.result() if future else (False, red[fault.name], 0.0)
            failed += not found
            state = "ok" if found else "FAILED"
            print(f"{state:6} {fault.name:32} {seconds:4.0f} s  {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
