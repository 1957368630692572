"""The command line: exit code 0; 2 and a line on stderr where the folder is no run or the page cannot be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page of the run that `argv` names (`sys.argv[1:]` when None), and prints its path.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m expertmesh.report",
        description="Write one self-contained HTML page about a run of python -m expertmesh.train.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    options = parser.parse_args(argv)
    out = options.out or options.run / "report.html"
    from expertmesh.report.run import (
        RunError,
        read,
    )  # after the options: they import JAX and matplotlib

    try:
        run = read(options.run)
    except RunError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    from expertmesh.report.page import page

    try:
        out.write_text(page(run))
    except OSError as error:
        print(
            f"report: error: --out must be a file that can be written; got {out}: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    print(out)
    return 0
