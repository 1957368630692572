"""What is kept on disk for the next process."""

import subprocess
import sys

import pytest

from expertmesh.core import disk_cache


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "expertmesh"


def files(folder):
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_made_once_for_a_key(folder):
    made = []

    def make():
        made.append(1)
        return b"result %d" % len(made)

    assert disk_cache.kept("a", make) == disk_cache.kept("a", make) == b"result 1"
    assert disk_cache.kept("b", make) == b"result 2"
    assert len(files(folder)) == 2


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_a_damaged_file_is_made_anew(folder, damage):
    disk_cache.kept("a", lambda: b"first")
    (path,) = files(folder)
    path.write_bytes(damage)
    assert disk_cache.kept("a", lambda: b"second") == b"second"
    assert disk_cache.kept("a", lambda: b"third") == b"second"


def test_what_raises_is_not_kept(folder):
    with pytest.raises(ZeroDivisionError):
        disk_cache.kept("a", lambda: bytes(1 // 0))
    assert disk_cache.kept("a", lambda: b"now") == b"now"


def test_without_a_place_it_is_made_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [disk_cache.kept("a", lambda: b"made") for _ in range(2)] == [b"made"] * 2


def refuse(error):
    def call(*args, **options):
        raise error

    return call


def test_without_locks_it_is_kept_all_the_same(folder, monkeypatch):
    monkeypatch.setattr(disk_cache.fcntl, "flock", refuse(OSError("No locks available")))
    assert disk_cache.kept("a", lambda: b"first") == b"first"
    assert disk_cache.kept("a", lambda: b"second") == b"first"


def test_a_file_of_others_alone_is_made_anew(folder, monkeypatch):
    disk_cache.kept("a", lambda: b"first")
    (path,) = files(folder)
    assert path.stat().st_mode & 0o777 == 0o644, "others may share the folder"
    monkeypatch.setattr(type(path), "read_bytes", refuse(PermissionError("Permission denied")))
    assert disk_cache.kept("a", lambda: b"second") == b"second"


def test_without_a_home_it_is_made_each_time(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(disk_cache.pathlib.Path, "home", refuse(RuntimeError("no home")))
    assert [disk_cache.kept("a", lambda: b"made") for _ in range(2)] == [b"made"] * 2


def test_what_does_not_fit_is_not_kept(folder):
    """By the largest size that a file may have, of a process of its own."""
    ask = """
import resource, signal
from expertmesh.core import disk_cache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
assert disk_cache.kept("a", lambda: bytes(1000)) == bytes(1000)
"""
    subprocess.run([sys.executable, "-c", ask], check=True)
    assert files(folder) == []


ASK = """
import runpy, sys

def make():
    with open(sys.argv[2], "a") as file:
        file.write("x")
    return b"result"

print(runpy.run_path(sys.argv[1])["kept"]("a", make).decode())
"""


def test_processes_wait_for_the_one_that_makes_it(tmp_path):
    command = [sys.executable, "-c", ASK, disk_cache.__file__, f"{tmp_path}/made"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["result\n"] * 4
    assert (tmp_path / "made").read_text() == "x"
