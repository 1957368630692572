"""What is compiled or measured once for a machine, kept on disk for its next processes."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator

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
    if path is None:
        return make()
    if (content := _read(path)) is not None:
        return content
    with _locked(path):
        if (content := _read(path)) is None:
            content = make()
            _write(path, content)
    return content


def _path_of(key: str) -> pathlib.Path | None:
    """None where the user has no folder."""
    try:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "expertmesh" / hashlib.sha256(key.encode()).hexdigest()


def _read(path: pathlib.Path) -> bytes | None:
    """None where there is no such file, one of others alone, or a damaged one."""
    try:
        both = path.read_bytes()
    except OSError:
        return None
    digest, content = both[:32], both[32:]
    return content if hashlib.sha256(content).digest() == digest else None


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Alone, where the folder can be written and its file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: pathlib.Path, content: bytes) -> None:
    """At once: a process that does not wait sees all of it or nothing; nothing where it cannot be written."""
    with contextlib.suppress(OSError):  # as where the disk is full
        with tempfile.NamedTemporaryFile(dir=path.parent, delete_on_close=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.close()
            written = pathlib.Path(file.name)
            written.chmod(0o644)  # others may share the folder
            written.rename(path)
