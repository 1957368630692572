"""What the extensions take of a GPU they give back where something fails, and loading holds nothing up.

In a process of its own, where stand-ins are open by the names of CUDA's driver and NCCL: fake_gpu/gpu.cc.
"""

import ctypes
import importlib
import multiprocessing
import pathlib
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from shutil import which

import pytest

from expertmesh.core import _native as core_native
from expertmesh.ep._native import build

HERE = pathlib.Path(__file__).parent / "fake_gpu"
DRIVER, NCCL = "libcuda.so.1", "libnccl.so.2"
UNREACHABLE, NO_PEERS, NO_ADDRESS, NO_WINDOW = range(1, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("fake_gpu")
    for name in (DRIVER, NCCL):
        options = ("-std=c++17", "-fPIC", "-shared", f"-Wl,-soname,{name}", "-o", folder / name)
        subprocess.run(["g++", *options, HERE / "gpu.cc"], check=True)
    return folder


def alone(function, *arguments):
    """The function's result in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(timeout=120)


class FakeGpu:
    """The stand-ins, open in this process from now on."""

    def __init__(self, folder):
        self.libraries = {name: ctypes.CDLL(folder / name) for name in (DRIVER, NCCL)}

    def number(self, name, library=DRIVER):
        return ctypes.c_int.in_dll(self.libraries[library], f"fake_{name}")


def load_kernels(folder):
    """Problems of loads, and what is open and retained after each."""
    gpu = FakeGpu(folder)
    load = importlib.import_module("expertmesh.core._native._host").load
    said = {}

    def note(name, *problems):
        open_now = [gpu.number(each).value for each in ("libraries", "contexts")]
        said[name] = [*problems, *open_now]

    def meanwhile(first, second):
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(load, 0, "kernel", first, 0, b"wait")
            while not gpu.number("waiting").value and not waiting.done():
                time.sleep(0.01)
            there = load(0, "kernel", second, 0, b"code")
            return waiting.result(), there

    note("loaded", load(0, "kernel", "a", 0, b"code"))
    note("loaded already", load(0, "kernel", "a", 0, b"code"))
    note("on another device", load(1, "kernel", "a", 0, b"code"))
    note("no such kernel", bool(load(0, "missing", "b", 0, b"code")))
    note("another meanwhile", *meanwhile("c", "d"))
    note("the same meanwhile", *meanwhile("e", "e"))
    return said


def test_kernels_are_loaded_once_and_hold_nothing_up(folder):
    if isinstance(host := core_native.host(), str):
        pytest.skip(host)
    assert alone(load_kernels, folder) == {
        "loaded": [None, 1, 0],
        "loaded already": [None, 1, 0],
        "on another device": [None, 1, 0],
        "no such kernel": [True, 1, 0],
        "another meanwhile": [None, None, 3, 0],
        "the same meanwhile": [None, None, 4, 0],
    }


@pytest.fixture(scope="module")
def grown(folder):
    """`grow.cc`, built as the extension is."""
    try:
        command = build.command(folder / "grow.so")
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    handlers = str(build.SOURCES / "handlers.cc")
    changed = {handlers: str(HERE / "grow.cc"), "-O2": "-O0"}
    command = [changed.get(part, part) for part in command]
    subprocess.run([*command, "-I", build.SOURCES], check=True)
    return folder


def grow_windows(folder):
    """By fault: whether the growth failed, and the memory, windows, streams and contexts that are there then."""
    gpu = FakeGpu(folder)
    fails = ctypes.CDLL(folder / "grow.so").grow_fails
    fails.restype, fails.argtypes = ctypes.c_bool, [ctypes.c_int64]
    said = []
    for rows, fault in enumerate(
        [UNREACHABLE, NO_PEERS, NO_ADDRESS, NO_WINDOW, 0, UNREACHABLE, NO_PEERS, NO_WINDOW, 0], 1
    ):
        gpu.number("fault", NCCL).value = fault
        failed = fails(rows * 4096)
        there = [gpu.number(name, NCCL).value for name in ("memories", "windows")]
        there += [gpu.number(name).value for name in ("streams", "contexts")]
        said.append([failed, *there])
    return said


def test_a_window_that_fails_is_given_back(grown):
    """The first, and one that was to be larger: then the one before stays."""
    none, one = [True, 0, 0, 0, 0], [True, 1, 1, 0, 0]
    made = [False, 1, 1, 0, 0]
    assert alone(grow_windows, grown) == [none] * 4 + [made] + [one] * 3 + [made]
