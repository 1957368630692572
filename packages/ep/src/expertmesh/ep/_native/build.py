"""Builds the module `_host` by one command of g++, which needs jaxlib's and pybind11's headers, and nothing of CUDA.

The package's setup.py calls it by this file's path, where JAX is not installed; `python -m expertmesh.ep._native` for a
tree that is not installed.
"""

import hashlib
import importlib.util
import pathlib
import subprocess
import sysconfig

SOURCES = pathlib.Path(__file__).parent
PACKAGE = "expertmesh.ep"
# The program, and what it includes; the kernels, which are compiled later, must have the same structures.
UNITS = ("handlers.cc", "libraries.h", "exchange.h")

# From here on as the other packages' build.py: none can be imported where one is built.


def fingerprint() -> str:
    """Of the sources."""
    texts = b"\0".join((SOURCES / unit).read_bytes() for unit in UNITS)
    return hashlib.sha256(texts).hexdigest()[:16]


def module_path() -> pathlib.Path:
    """Where Python finds the module if it is built beside the sources."""
    return SOURCES / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"


def command(output: pathlib.Path) -> list[str]:
    """What makes `output`."""
    folders = (_folder("jaxlib"), _folder("pybind11"), sysconfig.get_paths()["include"])
    return [
        *("g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f'-DEXPERTMESH_SOURCES="{fingerprint()}"',
        # Others' headers, whose warnings are not ours.
        *(part for folder in folders for part in ("-isystem", str(folder))),
        str(SOURCES / UNITS[0]),
        *("-o", str(output)),
    ]


def build(output: pathlib.Path) -> None:
    """Runs the command.

    Raises:
      ModuleNotFoundError: pybind11 or jaxlib is not installed.
      subprocess.CalledProcessError: g++ fails; it has said why.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(output), check=True)


def _folder(package: str) -> pathlib.Path:
    """The headers in an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{PACKAGE}: building _host needs the headers of {package} (`pip install {package}`)"
        )
    return pathlib.Path(spec.origin).parent / "include"
