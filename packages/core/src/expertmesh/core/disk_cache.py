"""What is compiled or measured once for a machine, kept on disk for its next processes."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["kept"]


def kept(key: str, make: Callable[[], bytes]) -> bytes:
    """What an earlier process has made, else what this one makes while others wait.

    Args:
      key: says all that the result depends on.
      make: called where nothing is kept; what it raises is not kept.

    Returns:
      The bytes. They lie in `expertmesh` under $XDG_CACHE_HOME, else under ~/.cache; where that cannot be written they
      are made anew each time.
    """
    path = _path_of(key)
    if (content := _read(path)) is not None:
        return content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        return make()
    with _locked(lock):
        if (content := _read(path)) is None:
            content = make()
            _write(path, content)
    return content


def _path_of(key: str) -> pathlib.Path:
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "expertmesh" / hashlib.sha256(key.encode()).hexdigest()


def _read(path: pathlib.Path) -> bytes | None:
    """None where there is no such file, or a damaged one."""
    if not path.exists():
        return None
    digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
    return content if hashlib.sha256(content).digest() == digest else None


@contextlib.contextmanager
def _locked(file: TextIO) -> Iterator[None]:
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: pathlib.Path, content: bytes) -> None:
    """At once: a process that does not wait sees all of it or nothing; nothing where it cannot be written."""
    file = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)
    written = pathlib.Path(file.name)
    try:
        with file:
            file.write(hashlib.sha256(content).digest() + content)
        written.rename(path)
    except OSError:  # as where the disk is full
        written.unlink(missing_ok=True)
