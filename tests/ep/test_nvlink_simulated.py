"""The exchange's kernels between four ranks without a GPU: tests/ep/nvlink_alone.cu, its lanes being fibers (simt/).

What it cannot see are copies that are still on the way, and what of a memory's order a CPU does not break.
"""

import pathlib
import subprocess
from shutil import copy, which

import pytest

from expertmesh.ep._native import kernels

HERE = pathlib.Path(__file__).parent
LAUNCH = "kernel<<<kBlocks, 32 * kWarps, kShared, stream>>>(arguments...)"
SIMULATED = "simt::Launch(kBlocks, 32 * kWarps, kShared, [=] { kernel(arguments...); })"


def replaced(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds it; `fault` is what is wrong in the kernels, and by what it is replaced."""
    if which("g++") is None:
        pytest.skip("g++ is not on the PATH")

    def build(fault=("", "")):
        folder = tmp_path_factory.mktemp("simulated")
        for header in (HERE / "simt").glob("*.h"):
            copy(header, folder)
        sources, program = kernels.SOURCES, folder / "alone"
        # Fewer warps, as lanes run in turn.
        few = replaced(sources / "exchange.h", "kWarps = 16;", "kWarps = 2;")
        (folder / "exchange.h").write_text(few)
        kernel = sources / "exchange.cu"
        text = replaced(kernel, *fault) if any(fault) else kernel.read_text()
        (folder / "exchange.cu").write_text(text)
        (folder / "alone.cc").write_text(replaced(HERE / "nvlink_alone.cu", LAUNCH, SIMULATED))
        # Pragmas are nvcc's.
        command = [
            "g++",
            "-std=c++20",
            "-O1",
            "-Wno-unknown-pragmas",
            "-I.",
            "alone.cc",
            "-o",
            program,
        ]
        subprocess.run(command, check=True, cwd=folder)
        return program

    return build


def said(program, *arguments):
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    return run.stdout.strip()


@pytest.mark.full
def test_four_ranks(build):
    assert said(build()) == "ok"


# By row: where a token is stored, where it is read, which sum is whose, which rows are cleared.
FAULTS = [
    ("f(r, next.slot % x.capacity)", "f(r, 0)"),
    ("int32_t held) { return Only(held); }", "int32_t held) { return 0 * held; }"),
    ("x.rank * x.capacity + Only(held)", "Only(held)"),
    ("r) row = other;", "r) row = other % x.capacity;"),
    ("words * (slice + 1) / slices * 16", "words / 2 * 16"),
]


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_seen(build, fault):
    assert "wrong at" in said(build(fault), "--by-row")
