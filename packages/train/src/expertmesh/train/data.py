"""Text as bytes: which files, the held-out split, and batches that depend on (seed, step) alone."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from expertmesh.train.options import MAX_BYTES, UsageError
from expertmesh.train.rundir import RunFolder

Bytes = npt.NDArray[np.uint8]

HELD_OUT = 10  # one file in ten, or the last tenth of fewer
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, and where they come from."""

    train: Bytes
    valid: Bytes
    source: str

    @property
    def fingerprint(self) -> str:
        """A digest of all bytes and of the split."""
        digest = hashlib.sha256(self.train)
        digest.update(len(self.train).to_bytes(8))
        digest.update(self.valid)
        return digest.hexdigest()


def load_corpus(path: Path | None, seq_len: int) -> Corpus:
    """The corpus at `path` (a file or a folder), or the standard library's sources when None.

    Takes the first MAX_BYTES in the order of the sorted file names; where there are more, `source` says so. Runs in the
    folder are no text.

    Raises:
      UsageError: if nothing can be read, or a part is shorter than one sequence and its target byte.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    name = "the standard library" if path is None else str(path)
    paths = sorted(_list(root, only_python=path is None))
    files, is_cut = _read(paths)
    if not files:
        raise UsageError(
            f"--data must hold text; got {name}, which has no bytes; give a file or folder with text"
        )
    train, valid = _split(files)
    for part, data in (("training", train), ("held-out", valid)):
        if len(data) <= seq_len:
            raise UsageError(
                f"--data must have more than seq_len bytes in its {part} part; got {len(data)} bytes "
                f"of {name} with --seq-len {seq_len}; give more text or a smaller --seq-len"
            )
    said = _counted(len(files))
    if is_cut:
        said = f"the first {MAX_BYTES >> 20} MiB of {_counted(len(paths))}"
    return Corpus(train, valid, f"{name}: {said}")


def _counted(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"


def batch_starts(
    seed: int, step: int, count: int, num_bytes: int, seq_len: int
) -> npt.NDArray[np.int64]:
    """Where the `count` sequences of a step start: uniform over the corpus, from (seed, step) alone."""
    return np.random.default_rng((seed, step)).integers(0, num_bytes - seq_len, size=count)


def spread_starts(count: int, num_bytes: int, seq_len: int) -> npt.NDArray[np.int64]:
    """`count` starts at even distances from the first to the last possible one."""
    return np.linspace(0, num_bytes - seq_len - 1, count).astype(np.int64)


def windows(data: Bytes, starts: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int32]:
    """int32[len(starts), seq_len + 1]: each sequence with the byte that follows it."""
    out: npt.NDArray[np.int32] = data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return out


def device_windows(
    data: Bytes, starts: npt.NDArray[np.int64], seq_len: int, sharding: NamedSharding
) -> jax.Array:
    """`windows` as one global array; every process cuts out only the rows of its own devices."""

    def rows(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
        assert index is not None  # no shape has unknown dimensions
        return windows(data, starts[index[0]], seq_len)

    return jax.make_array_from_callback((len(starts), seq_len + 1), sharding, rows)


def _list(root: Path, only_python: bool) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        if RunFolder(Path(folder)).has_run:
            folders.clear()
            continue
        folders[:] = [f for f in folders if not f.startswith(".")]
        if only_python:
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS]
            names = [n for n in names if n.endswith(".py")]
        files = (Path(folder, n) for n in names if not n.startswith("."))
        yield from (file for file in files if os.path.isfile(file))


def _read(files: list[Path]) -> tuple[list[Bytes], bool]:
    """The contents of the files that are not empty, up to MAX_BYTES in all; and whether there is more."""
    contents: list[Bytes] = []
    left = MAX_BYTES
    for file in files:
        try:
            with open(file, "rb") as stream:
                data = np.frombuffer(stream.read(left + 1), np.uint8)
        except OSError as error:
            _unreadable(error)
        if len(data[:left]):
            contents.append(data[:left])
        if len(data) > left:
            return contents, True
        left -= len(data)
    return contents, False


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(
        f"--data must be readable; got {error.filename}: {error.strerror}; "
        "give an existing file or folder that you may read"
    ) from error


def _split(files: list[Bytes]) -> tuple[Bytes, Bytes]:
    """Training and held-out bytes: by file; fewer than HELD_OUT files give the last tenth of their bytes."""
    if len(files) < HELD_OUT:
        text = np.concatenate(files)
        cut = len(text) - len(text) // HELD_OUT
        return text[:cut], text[cut:]
    held_out = [i % HELD_OUT == HELD_OUT - 1 for i in range(len(files))]
    train = [data for data, out in zip(files, held_out, strict=True) if not out]
    valid = [data for data, out in zip(files, held_out, strict=True) if out]
    return np.concatenate(train), np.concatenate(valid)
