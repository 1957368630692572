"""NVRTC, which compiles CUDA C++ where it runs and comes with jax[cuda13]: no compiler is installed for it."""

import contextlib
import ctypes
import ctypes.util
import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Compiled", "compile_program", "library", "version"]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code, its names of the kernels that were asked for, in their order, what NVRTC said, and the PTX."""

    code: bytes
    names: tuple[str, ...]
    log: str = ""
    ptx: str = ""


def in_wheels(pattern: str) -> list[pathlib.Path]:
    """Files and folders of this pattern in NVIDIA's installed packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    return [path for folder in folders for path in sorted(pathlib.Path(folder).glob(pattern))]


@functools.cache  # each choice of a kernel asks
def library() -> str | None:
    """The path of NVRTC's library, or None: of pip's packages, else of the system."""
    found = in_wheels("*/lib/libnvrtc.so.*")
    return str(found[0]) if found else ctypes.util.find_library("nvrtc")


def version() -> str:
    """NVRTC's release, such as "13.1"."""
    numbers = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(library()).nvrtcVersion(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def compile_program(
    source: str,
    *options: str,
    headers: Mapping[str, str] | None = None,
    kernels: Sequence[str] = (),
) -> Compiled:
    """Compiles CUDA C++.

    Args:
      options: NVRTC's, among them an architecture "-arch=sm_...".
      headers: what a program includes, by name, before folders are searched.
      kernels: C++ names of kernels, such as "f<float>", whose templates are made then.

    Raises:
      RuntimeError: the program does not compile; with NVRTC's log.
    """
    nvrtc, headers = ctypes.CDLL(library()), headers or {}
    program = ctypes.c_void_p()

    def output(of: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, buffer)
        return buffer.raw

    def text(of: str) -> str:
        return output(of).rstrip(b"\0").decode()

    def name(kernel: str) -> str:
        lowered = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(lowered))
        assert lowered.value is not None, f"{kernel} is not a kernel of the program"
        return lowered.value.decode()

    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        b"kernel.cu",
        len(headers),
        _strings(headers.values()),
        _strings(headers),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(nvrtc.nvrtcDestroyProgram, ctypes.byref(program))
        for kernel in kernels:
            nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = text("ProgramLog")
        if failed:
            raise RuntimeError(f"NVRTC {version()} cannot compile a kernel of expertmesh: {log}")
        return Compiled(output("CUBIN"), tuple(map(name, kernels)), log, text("PTX"))


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)
