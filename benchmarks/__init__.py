"""Benchmarks, one module per op; `python -m benchmarks` runs them all. Not in the wheels."""

import pathlib


def runnable() -> list[str]:
    """The modules here that are benchmarks."""
    paths = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    return [path.stem for path in paths if "def main(" in path.read_text()]
