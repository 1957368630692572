"""The kernels' programs, compiled by NVRTC for the GPUs that are there, and kept on disk."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable

from expertmesh.core import disk_cache, nvrtc

SOURCES = pathlib.Path(__file__).parent
HOST_TELLS = 22900  # ncclGetVersion from which on the host is told the peers' addresses

_INTEGERS = "#pragma once\n" + "".join(
    f"typedef {sign} {kind} {letter}int{bits}_t;\n"
    for sign, letter in (("signed", ""), ("unsigned", "u"))
    for kind, bits in (
        ("char", 8),
        ("short", 16),
        ("int", 32),
        ("long long", 64),
        ("long long", "ptr"),
    )
)
# Of what NCCL's headers include, the layout of a window needs no more than that it can be parsed.
_UNUSED = {
    "cuda/atomic": "#pragma once\n"
    "namespace cuda {\n"
    "enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel };\n"
    "enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };\n"
    "template <typename T, thread_scope scope> struct atomic_ref;\n"
    "}\n",
    **dict.fromkeys(("limits.h", "stdbool.h", "stddef.h", "stdio.h", "stdlib.h", "assert.h"), ""),
}


@dataclasses.dataclass(frozen=True)
class Headers:
    """What the kernels are compiled with."""

    cuda: pathlib.Path  # the folder of CUDA's headers
    nccl: pathlib.Path  # and of NCCL's

    @property
    def nccl_version(self) -> int:
        """As ncclGetVersion says it."""
        return _nccl_version((self.nccl / "nccl.h").read_text())


@dataclasses.dataclass(frozen=True)
class Program:
    """What NVRTC is given; `reads` are texts of headers in folders, so that others are not taken for these."""

    source: str
    options: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def key(self) -> str:
        """The same for the same result."""
        return repr((nvrtc.version(), self))

    def compile(self) -> nvrtc.Compiled:
        return nvrtc.compile_program(
            self.source,
            *self.options,
            headers=dict(self.headers),
            kernels=self.kernels,
        )


def architecture(capability: float) -> str:
    """NVRTC's name of GPUs of a compute capability >= 9.0, with all of its instructions."""
    return f"sm_{round(10 * capability)}a"


def find_headers() -> Headers | str:
    """What the kernels are compiled with, or what is missing."""
    if nvrtc.library() is None:
        return "NVRTC is not there (`pip install 'jax[cuda13]'`)"
    if (cuda := find_cuda()) is None:
        return "CUDA's headers are not there (`pip install nvidia-cuda-runtime`)"
    nccl = _first_with("nccl_device.h", nvrtc.in_wheels("nccl/include"))
    if nccl is None:
        return "NCCL's headers are not there (`pip install 'nvidia-nccl-cu13>=2.28'`)"
    return Headers(cuda, nccl)


def find_cuda() -> pathlib.Path | None:
    """The folder of CUDA's headers, of pip's packages, else of a toolkit."""
    named = [
        pathlib.Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    toolkits = [*named, *sorted(pathlib.Path("/usr/local").glob("cuda*"))]
    return _first_with(
        "cuda_bf16.h", [*nvrtc.in_wheels("*/include"), *(t / "include" for t in toolkits)]
    )


def exchange(architecture: str, headers: Headers, names: list[str]) -> Program:
    """Dispatch and combine; `names` are the extension's."""
    return Program(
        source=(SOURCES / "exchange.cu").read_text(),
        options=_options(architecture, headers.cuda),
        headers=(
            ("cstdint", _INTEGERS),
            *((n, (SOURCES / n).read_text()) for n in ("bulk.h", "exchange.h", "peer_memory.h")),
        ),
        kernels=tuple(names),
        reads=((headers.cuda / "cuda_bf16.h").read_text(),),
    )


def peers(architecture: str, headers: Headers) -> Program | None:
    """Asks for the peers' addresses; None where the host is told them."""
    if headers.nccl_version >= HOST_TELLS:
        return None
    return Program(
        source=(SOURCES / "peers.cu").read_text(),
        options=_options(architecture, headers.cuda, headers.nccl),
        headers=tuple({"stdint.h": _INTEGERS, "cstdint": _INTEGERS, **_UNUSED}.items()),
        kernels=(),
        reads=tuple(
            (headers.nccl / n).read_text() for n in ("nccl.h", "nccl_device/impl/core__types.h")
        ),
    )


def _options(architecture: str, *folders: pathlib.Path) -> tuple[str, ...]:
    return (
        f"-arch={architecture}",
        "-std=c++17",
        "-default-device",  # without it NVRTC refuses lambdas and the declarations of host functions
        *(f"-I{folder}" for folder in folders),
    )


def compile_once(program: Program) -> nvrtc.Compiled:
    """What an earlier process has made of it, else what this one makes while others wait."""

    def compile() -> bytes:
        compiled = program.compile()
        return " ".join(compiled.names).encode() + b"\n" + compiled.code

    names, _, code = disk_cache.kept(program.key, compile).partition(b"\n")
    return nvrtc.Compiled(code, tuple(names.decode().split()))


def _first_with(file: str, folders: Iterable[pathlib.Path]) -> pathlib.Path | None:
    return next((folder for folder in folders if (folder / file).exists()), None)


def _nccl_version(header: str) -> int:
    found = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) (\d+)", header))
    return sum(
        int(found[part]) * unit for part, unit in (("MAJOR", 10000), ("MINOR", 100), ("PATCH", 1))
    )
