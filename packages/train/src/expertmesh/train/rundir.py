"""The folder of a run: its files, starting it, and continuing it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertmesh.train.checkpoint import part_of, write_whole
from expertmesh.train.options import ModelOptions, TrainingOptions, UsageError

EXACT = (
    "steps",
    "batch_size",
    "grad_accum",
    "remat",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "clip",
    "seed",
)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files."""

    path: Path

    @property
    def options(self) -> Path:
        """JSON of what must not change on `--resume`; its presence marks a run folder."""
        return self.path / "options.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_run(self) -> bool:
        """Whether a run was started here, or was about to be. Text may have an `options.json` of its own."""
        record = self.options.is_file() or part_of(self.options).is_file()
        return record and self.checkpoints.is_dir()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def experts_plot(self) -> Path:
        return self.path / "experts.png"


def record(
    model: ModelOptions, training: TrainingOptions, fingerprint: str, *, spare_experts: int = 0
) -> dict[str, Any]:
    """What `options.json` holds: the model, the options that change the numbers, the data's digest.

    `spare_experts` are of the devices' options, and bound the buffers of an exchange.
    """
    exact = {name: getattr(training, name) for name in EXACT} | {"spare_experts": spare_experts}
    return {"model": dataclasses.asdict(model), "training": exact, "data": fingerprint}


def begin(folder: RunFolder, content: dict[str, Any]) -> str | None:
    """Makes an empty run folder. An earlier run is moved to `<folder>.previous`, in place of the run before it; returns
    a note of it.

    Raises:
      UsageError: if the folder or that of the earlier run holds other files, another run writes to it, or it cannot be
        made.
    """
    try:
        note = _move_away(folder)
        # The record last: a folder with one is that of a run.
        (folder.path.resolve() / folder.checkpoints.name).mkdir(parents=True, exist_ok=True)
        write_whole(folder.options, json.dumps(content, indent=1))
    except (OSError, RuntimeError) as error:  # the latter where links lead in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--out must be a folder that can be written; got {folder.path}: {reason}; give another --out"
        ) from error
    return note


def _is_other(folder: RunFolder) -> bool:
    """Whether files that are no run's are there. What a start that failed has left is none."""
    path = folder.path
    if not path.exists() or folder.options.is_file():
        return False
    return not path.is_dir() or any(not _is_of_start(folder, file) for file in path.iterdir())


def _is_of_start(folder: RunFolder, file: Path) -> bool:
    """Whether it is what `begin` makes before the record."""
    empty = file == folder.checkpoints and file.is_dir() and not any(file.iterdir())
    return empty or file == part_of(folder.options)


def _move_away(folder: RunFolder) -> str | None:
    if _is_other(folder):
        raise UsageError(
            f"--out must be new, empty or the folder of a run; got {folder.path}, which holds other "
            "files; give another --out"
        )
    if not folder.options.is_file():
        return None
    path = folder.path.resolve()  # a link stays
    if path == Path.cwd():
        raise UsageError(
            f"--out must not be the working folder if that holds a run; got {folder.path}; give another --out, or "
            "--resume"
        )
    previous = RunFolder(path.with_name(path.name + ".previous"))
    if _is_other(previous):
        raise UsageError(
            f"--out holds a run, which goes to {previous.path}; got other files there; move them, or give another --out"
        )
    deletes = previous.options.is_file()
    replaced = held(previous) if previous.path.exists() else contextlib.nullcontext()
    with held(folder), replaced:
        shutil.rmtree(previous.path, ignore_errors=True)
        path.rename(previous.path)
    note = f"{folder.path} held a run, which is in {previous.path} now; --resume would have continued it"
    return f"{note}; the run that was there before is deleted" if deletes else note


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Keeps other runs from writing to a folder that is there, or moving it, until the end of this or of its process.

    Raises:
      UsageError: another run holds it.

    Where the file system has no locks of folders, nothing is kept from it.
    """
    number = os.open(folder.path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(number, folder)
        yield
    finally:
        os.close(number)


def _lock(number: int, folder: RunFolder) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--out must not use or replace the folder of a run that goes on; got {folder.path}; give another --out, "
            "or stop that run"
        ) from error


def batch_size_of(folder: RunFolder) -> int | None:
    """The batch size of the run there; None where there is no record of it, which `check_resumable` says."""
    try:
        size = _recorded(folder)[2].get("batch_size")
    except UsageError:
        return None
    return size if isinstance(size, int) and size > 0 else None


def _recorded(folder: RunFolder) -> tuple[dict[str, Any], object, dict[str, Any]]:
    """The model, the data's digest and the training of the run's record."""
    try:
        recorded = json.loads(folder.options.read_text())
        model, text, training = (recorded[name] for name in ("model", "data", "training"))
        if not (isinstance(model, dict) and isinstance(training, dict)):
            raise TypeError("its model and training must be mappings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume must find a run in --out; got {folder.path} without a readable "
            f"{folder.options.name}; leave --resume out to start one, or give its --out"
        ) from error
    return model, text, training


def check_resumable(folder: RunFolder, content: dict[str, Any]) -> str | None:
    """Compares `content` with the run's record; returns a note if the rest of the run will differ.

    Raises:
      UsageError: if there is no run, or its model, data or optimizer are others.
    """
    model, text, training = _recorded(folder)
    if changed := _changes(model, content["model"]):
        raise UsageError(
            f"--resume must keep the options of the model; got {changed}; give the values the run "
            "was started with, or start another with another --out"
        )
    if text != content["data"]:
        raise UsageError(
            "--resume must keep the data; got other bytes than the run's; give "
            "the --data the run was started with, or start another with another --out"
        )
    was, now = {"spare_experts": 0, **training}, content["training"]
    if was.get("optimizer") != now["optimizer"]:
        raise UsageError(
            f"--resume must keep the optimizer, whose state is in the checkpoints; got {_changes(was, now)}; "
            f"give --optimizer {was.get('optimizer')}, or start another run with another --out"
        )
    if changed := _changes(was, now):
        return f"changed since the run was started: {changed}; from here on it is another run"
    return None


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """ "--name new instead of old" for each entry that differs."""
    return ", ".join(
        f"--{name.replace('_', '-')} {value} instead of {old.get(name)}"
        for name, value in new.items()
        if old.get(name) != value
    )
