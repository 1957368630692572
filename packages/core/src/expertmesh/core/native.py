"""Extensions that a C++ compiler builds with a package: whether one is there and fits the installed jaxlib."""

import importlib
import pathlib
import re
from types import ModuleType

import jax

__all__ = ["load_extension"]


def load_extension(package: str, distribution: str, fingerprint: str) -> ModuleType | str:
    """The module `_host` of `package`, or why it cannot be used.

    Args:
      package: such as "expertmesh.core._native".
      distribution: what pip calls it.
      fingerprint: of the sources that are there now.

    Returns:
      The module, which fits every jaxlib from the one on whose headers it was built; or a reason with its remedy.
    """
    what = f"the extension _host of {distribution}"
    rebuild = f"`python -m {package}` builds it, with g++ and pybind11"
    try:
        module = importlib.import_module(f"{package}._host")
    except ImportError as error:
        return f"{what} is not built ({error}); {rebuild}"
    if module.SOURCES != fingerprint:
        return f"{what} was built from other sources; {rebuild}"
    # XLA refuses handlers that know more than it does only when it starts, and then does not start.
    if module.FFI_VERSION > _version_of_jaxlib():
        return f"{what} was built for a newer jaxlib; {rebuild}"
    return module


def _version_of_jaxlib() -> tuple[int, ...]:
    """Of XLA's interface for handlers, as the installed jaxlib's headers have it."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    return tuple(map(int, re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header)))
