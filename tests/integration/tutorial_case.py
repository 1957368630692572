"""The tutorial in a process that has joined others."""

import importlib.util
import pathlib

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "examples/tutorial.py"


def load():
    spec = importlib.util.spec_from_file_location("tutorial", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run():
    """What `main` returns, on the devices of all processes."""
    return load().main()
