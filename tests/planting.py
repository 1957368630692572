"""Runs tests in a copy of the working tree, in which a fault or a mutant is planted. Standard library only."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
GREEN, RED = 0, 1  # pytest's exit status where all tests pass, and where some fail
TIMEOUT = 124  # ours


def copy_tree(target: pathlib.Path) -> None:
    """The working tree's files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in set(listed.stdout.split("\0")) - {""}:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_tests(tree: pathlib.Path, arguments: Iterable[str], seconds: float) -> tuple[int, str]:
    """pytest's exit status and output, with the packages of `tree`; TIMEOUT where it takes longer than `seconds`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        result = subprocess.run(
            command,
            cwd=tree,
            env=environment(tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        return TIMEOUT, f"ran past {seconds:.0f} s\n{error.output!r}"
    return result.returncode, result.stdout


def environment(tree: pathlib.Path) -> dict[str, str]:
    """This process', but for what tests read."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "PYTHONPATH": python_path(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        # A program that is not changed is not compiled again.
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/jax"),
    }


def python_path(tree: pathlib.Path) -> str:
    """The packages of `tree`, before what is on the path already."""
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    return os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])


def uses_copy(tree: pathlib.Path) -> bool:
    """Whether the copy's packages are the ones that get imported."""
    program = "import expertmesh.core.specs as specs; print(specs.__file__)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, env=environment(tree), capture_output=True, text=True, check=True
    )
    return pathlib.Path(found.stdout.strip()).resolve().is_relative_to(tree.resolve())
