"""Checkpoints that are either whole or refused.

`<folder>/<step>/state` is Orbax's; `<folder>/<step>/manifest.json` lists every file of it with its
SHA-256 and is written last, in one rename. A checkpoint without a manifest was not finished; one whose
files differ from it is corrupt. With several processes the folder must be on a file system they share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from expertmesh.train.options import UsageError

MANIFEST = "manifest.json"
NONE, CORRUPT = -1, -2  # instead of a step: none was finished; none of the finished ones is good


def save(folder: Path, step: int, state: Any, keep: int) -> None:
    """Writes the checkpoint of `step`, returns when it is on disk, and keeps the last `keep` up to it.

    What was not finished before `step` goes. Later steps, which a run that resumed from an earlier one has yet to
    reach, stay, and count for nothing. Every process calls it.

    Raises:
      OSError: a file cannot be written.
    """
    target = folder / str(step)
    if jax.process_index() == 0:
        (target / MANIFEST).unlink(missing_ok=True)
    with _errors_of_system(target), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target.absolute() / "state", state, force=True)
    if jax.process_index() == 0:
        _write_manifest(target)
        steps = [old for old in _steps(folder) if old <= step]
        finished = [old for old in steps if (folder / str(old) / MANIFEST).exists()]
        for old in set(steps) - set(finished[:keep]):
            shutil.rmtree(folder / str(old))


@contextlib.contextmanager
def _errors_of_system(target: Path) -> Iterator[None]:
    """What the system refuses Orbax is an OSError; Orbax makes some of them ValueErrors.

    Orbax logs each several times, with tracebacks. Its threads go on to do so after it has failed, so it stays silent.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except ValueError as error:
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(target)) from error
        logger.setLevel(level)
        raise
    logger.setLevel(level)


def restore(
    folder: Path, abstract_state: Any, report: Callable[[str], None]
) -> tuple[int, Any] | None:
    """The step and state of the newest good checkpoint; each refused one is reported.

    Args:
      abstract_state: `jax.ShapeDtypeStruct`s with shardings. They may differ from those it was saved with.

    Returns:
      None if no checkpoint was ever finished.

    Raises:
      UsageError: if there are finished checkpoints, but none is good.

    Every process calls it and gets the same step: process 0 decides.
    """
    choice = _choose(folder, report) if jax.process_index() == 0 else NONE
    step = int(multihost_utils.broadcast_one_to_all(np.int32(choice)))
    if step == CORRUPT:
        raise UsageError(
            f"--resume must find a good checkpoint; got only corrupt ones in {folder}; leave --resume "
            "out to start the run again"
        )
    if step == NONE:
        return None
    with ocp.StandardCheckpointer() as checkpointer:
        return step, checkpointer.restore(folder.absolute() / str(step) / "state", abstract_state)


def last_good(folder: Path, report: Callable[[str], None]) -> int | None:
    """The newest step whose files match their manifest; each newer one is reported with its fault."""
    for step in _steps(folder):
        fault = _fault(folder / str(step))
        if fault is None:
            return step
        report(f"refused the checkpoint of step {step}: {fault}")
    return None


def _choose(folder: Path, report: Callable[[str], None]) -> int:
    """The step to restore, NONE or CORRUPT."""
    step = last_good(folder, report)
    if step is not None:
        return step
    return CORRUPT if any((folder / str(s) / MANIFEST).exists() for s in _steps(folder)) else NONE


def _steps(folder: Path) -> list[int]:
    """Steps that have a folder, newest first."""
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = json.loads((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its writing was not finished"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} is unreadable ({error})"
    if not isinstance(expected, dict):
        return f"its {MANIFEST} is no list of files with their digests"
    found = _digests(checkpoint)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"its file {name} is missing"
        if expected.get(name) != found[name]:
            return f"its file {name} does not match its checksum"
    return None


def _write_manifest(checkpoint: Path) -> None:
    text = json.dumps(_digests(checkpoint), indent=1)
    write_whole(checkpoint / MANIFEST, text)


def _digests(checkpoint: Path) -> dict[str, str]:
    files = (file for file in sorted((checkpoint / "state").rglob("*")) if file.is_file())
    return {str(file.relative_to(checkpoint)): _digest(file) for file in files}


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Writes a text file such that a reader, after any crash, finds all of it or none."""
    part = part_of(path)
    try:
        with naming(path), open(part, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def part_of(path: Path) -> Path:
    """Where `write_whole` writes what becomes `path`; a crash may leave it."""
    return path.with_name(path.name + ".part")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError names the file, also where the system does not: in a write, not in an open."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
