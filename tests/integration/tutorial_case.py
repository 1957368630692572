"""The tutorial in a process that has joined others."""

import pathlib

from cases.scripts import load_script

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "examples/tutorial.py"


def load():
    return load_script(PROGRAM)


def run():
    """What `main` returns, on the devices of all processes."""
    return load().main()
