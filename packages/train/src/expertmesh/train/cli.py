"""The command line of the main job: argparse derived from options.py, and the exit codes.

0: finished. 1: training cannot go on, one line on stderr. 2: bad input, the same. 130, 143: stopped by SIGINT, SIGTERM
after a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from expertmesh.train.options import Options, TrainingError, UsageError

PROGRAM = "python -m expertmesh.train"
_DEPENDENCIES = ("optax", "orbax", "matplotlib", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (`sys.argv[1:]` when None), trains, and returns the exit code."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        _check_dependencies()
        from expertmesh.train.job import run  # after the options: it imports everything

        return run(options)
    except UsageError as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train: interrupted before the first step", file=sys.stderr)
        return 130


def _check_dependencies() -> None:
    missing = [name for name in _DEPENDENCIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} must be installed (`pip install expertmesh-train`)")


def parse(argv: Sequence[str]) -> Options:
    """Options from arguments.

    Raises:
      UsageError: for an unknown option or a value that breaks its option's rule.
    """
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options]",
        description="Train a byte-level MoE decoder on text.",
        allow_abbrev=False,
    )
    groups = dataclasses.fields(Options)
    for group in groups:
        _add_group(parser, type(group.default))
    values, unknown = parser.parse_known_args(_join_negatives(argv))
    if unknown:
        raise UsageError(_unknown(parser, unknown[0]))
    return Options(**{group.name: _build(type(group.default), values) for group in groups})


def _join_negatives(argv: Sequence[str]) -> list[str]:
    """Writes `--name -1e-2` as `--name=-1e-2`; argparse would take some negative numbers for options."""
    joined: list[str] = []
    for argument in argv:
        if re.match(r"-[\d.]", argument) and joined and joined[-1].startswith("--"):
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _add_group(parser: argparse.ArgumentParser, kind: type) -> None:
    group = parser.add_argument_group(kind.__doc__)
    for field in dataclasses.fields(kind):
        flag, meta = "--" + field.name.replace("_", "-"), field.metadata
        if field.default is False:
            group.add_argument(flag, action="store_true", help=meta["help"])
            continue
        shown = "" if field.default in (None, ()) else f" (default {field.default})"
        group.add_argument(
            flag,
            type=meta["parse"],
            default=field.default,
            metavar=meta["metavar"],
            help=meta["help"] + shown,
        )


def _build(kind: type, values: argparse.Namespace) -> Any:
    return kind(**{field.name: getattr(values, field.name) for field in dataclasses.fields(kind)})


def _unknown(parser: argparse.ArgumentParser, argument: str) -> str:
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(argument.partition("=")[0], known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see --help"
    return f"every argument must be an option of --help; got {argument!r}; {remedy}"
