"""The kernels of the transport "nvlink", compiled at first use for the GPU, the jaxlib and the NCCL that are there.

A wheel with them would fit one jaxlib and one NCCL: XLA refuses handlers built with newer headers than its own, and
NCCL 2.28 tells peer addresses only to device code compiled with its own headers.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import jax

from expertmesh.core.support import compute_capability

SOURCES = pathlib.Path(__file__).parent
UNITS = ("exchange.cu", "peers.cu", "handlers.cc")
DISPATCH, COMBINE = "expertmesh_ep_nvlink_dispatch", "expertmesh_ep_nvlink_combine"


@dataclasses.dataclass(frozen=True)
class Tools:
    """What compiles the kernels."""

    nvcc: str
    nccl: pathlib.Path  # the folder of NCCL's headers


def missing() -> str | None:
    """Why the kernels cannot be compiled in this installation, or None."""
    tools = find_tools()
    return tools if isinstance(tools, str) else None


def find_tools() -> Tools | str:
    """What compiles the kernels, or what is missing."""
    if not pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/collectives_api.h").exists():
        return f"jaxlib {jax.lib.__version__} gives custom calls no communicator; jaxlib >= 0.11.2 does"
    # The toolkit's, or that of the wheels which come with jax[cuda13].
    nvcc = shutil.which("nvcc") or _in_wheel("nvidia.cu13", "bin/nvcc")
    if nvcc is None:
        return "nvcc is not on the PATH (install the CUDA toolkit, or `pip install 'jax[cuda13]'`)"
    if shutil.which("g++") is None:
        return "g++ is not on the PATH (`apt-get install g++`)"
    header = _in_wheel("nvidia.nccl", "include/nccl_device.h")
    if header is None:
        return "NCCL's headers are not there (`pip install 'nvidia-nccl-cu13>=2.28'`)"
    return Tools(str(nvcc), header.parent)


@functools.cache
def load(architecture: str) -> ctypes.CDLL:
    """Compiles what no earlier process has, and gives XLA the custom calls `DISPATCH` and `COMBINE`.

    Args:
      architecture: such as "sm_90", of this process' GPUs.

    Raises:
      RuntimeError: the compiler fails.

    Costs 5 to 20 s once per machine and installation.
    """
    library = ctypes.CDLL(str(_built(architecture)))
    library.expertmesh_window_bytes.restype = ctypes.c_int64
    stages = {
        stage: jax.ffi.pycapsule(getattr(library, f"expertmesh_{stage}"))
        for stage in ("prepare", "initialize", "dispatch", "combine")
    }
    for target in (DISPATCH, COMBINE):
        execute = stages[target.rpartition("_")[2]]
        handlers = {
            "prepare": stages["prepare"],
            "initialize": stages["initialize"],
            "execute": execute,
        }
        jax.ffi.register_ffi_target(target, handlers, platform="CUDA")
    return library


class Stall(ctypes.Structure):
    """A wait that timed out; exchange.h."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("epoch", "rank", "peer", "phase")]


def take_stall() -> Stall | None:
    """A wait of this process' devices that timed out and was not taken yet."""
    stall = Stall()
    taken = any(library.expertmesh_take_stall(ctypes.byref(stall)) for library in _loaded())
    return stall if taken else None


def window_bytes() -> int:
    """What this process' GPUs hold for exchanges, outside of XLA's memory."""
    return sum(library.expertmesh_window_bytes() for library in _loaded())


def _loaded() -> list[ctypes.CDLL]:
    """Of a process that never exchanged nothing is compiled to ask for it."""
    capability = compute_capability() if load.cache_info().currsize else None
    return [] if capability is None else [load(architecture(capability))]


def architecture(capability: float) -> str:
    """nvcc's name of GPUs of a compute capability."""
    return f"sm_{round(10 * capability)}"


def compile_commands(tools: Tools, architecture: str, folder: pathlib.Path) -> list[list[str]]:
    """One command per unit, which may run side by side."""
    kernels = [tools.nvcc, "-std=c++17", "-O3", f"-arch={architecture}", "-Xcompiler=-fPIC"]
    more = {
        "exchange.cu": [],
        "peers.cu": ["-isystem", str(tools.nccl)],
        "handlers.cc": ["-isystem", jax.ffi.include_dir(), "-Xcompiler=-fvisibility=hidden"],
    }
    return [
        [*kernels, *more[unit], "-c", str(SOURCES / unit), "-o", str(folder / f"{unit}.o")]
        for unit in UNITS
    ]


def _built(architecture: str) -> pathlib.Path:
    """The library; built by one process while others wait."""
    tools = find_tools()
    if isinstance(tools, str):
        raise RuntimeError(
            f"expertmesh.ep: the kernels of transport 'nvlink' cannot be compiled: {tools}"
        )
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = base / "expertmesh"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"nvlink-{_key(tools, architecture)}.so"
    with _locked(folder / "nvlink.lock"):
        if not library.exists():
            _build(tools, architecture, library)
    return library


def _build(tools, architecture, library):
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = pathlib.Path(name)
        _run(compile_commands(tools, architecture, folder))
        objects = [str(folder / f"{unit}.o") for unit in UNITS]
        built = folder / "library.so"
        _run([[tools.nvcc, "-shared", "-cudart=static", *objects, "-o", str(built)]])
        built.rename(library)


def _run(commands):
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in started]
    for command, process, output in zip(commands, started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(
                f"expertmesh.ep: the kernels of transport 'nvlink' must compile; got exit {process.returncode} of "
                f"`{' '.join(command)}`:\n{output[-2000:]}\nuse transport='all_to_all' meanwhile"
            )


def _key(tools, architecture) -> str:
    version = subprocess.run([tools.nvcc, "--version"], capture_output=True, text=True).stdout
    parts = [architecture, version, jax.lib.__version__, (tools.nccl / "nccl.h").read_text()]
    parts += [path.read_text() for path in sorted(SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _in_wheel(package: str, path: str) -> pathlib.Path | None:
    """A file of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec else None
    files = (pathlib.Path(folder, path) for folder in folders or ())
    return next((file for file in files if file.exists()), None)
