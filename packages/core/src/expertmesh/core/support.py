"""What kernels need of this installation, and of the device."""

import functools
import importlib.metadata
import re
import warnings
from typing import Any

import jax

from expertmesh.core import _jax, _native

TRITON = "triton>=3.8"  # older ones lack TMA descriptors as parameters
EIGHT_BITS_FROM = 8.9  # compute capability
INSTALL = "pip install 'expertmesh-core[cuda13]'"


class KernelError(RuntimeError):
    """A kernel that this installation cannot compile, or this GPU not load."""


def no_reason(*args: Any, **kwargs: Any) -> None:
    """The `unsupported` of a kernel or a transport that takes everything."""


def refusal(function: str, argument: str, name: str, reason: str) -> str:
    """The message where what an argument names, a kernel or a transport, does not support the call."""
    return f"{function}: {argument}={name!r} cannot run: {reason}; use {argument}='auto'"


def distribution_unsupported(requirement: str) -> str | None:
    """Why "name>=X.Y.Z" does not hold in this installation, or None; the first numbers of versions are compared."""
    name, _, least = requirement.partition(">=")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {name} is not installed"
    if _numbers(found) < _numbers(least):
        return f"{requirement} is needed, and {name} {found} is installed"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def triton_unsupported() -> str | None:
    """Why Triton's kernels cannot run in this installation, or None."""
    if problem := distribution_unsupported(TRITON):
        return f"{problem} (`{INSTALL}`)"
    return launcher_unsupported()


def launcher_unsupported() -> str | None:
    """Why kernels cannot be launched in this installation, or None."""
    host = _native.host()
    return host if isinstance(host, str) and not _jax.has_jax_triton() else None


def tested_versions() -> str:
    """What the extras of this package allow: the versions that it was tested with."""
    try:
        needs = importlib.metadata.requires("expertmesh-core") or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        return "what pyproject.toml names"
    extra = [need.split(";")[0].strip() for need in needs if "cuda13" in need.partition(";")[2]]
    return ", ".join(extra)


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning, once in this process."""
    warnings.warn(message, category, stacklevel=3)


def platform_of(*operands: jax.Array) -> str:
    """The platform ("cuda", "cpu", ...) that a call on these operands is compiled for, by JAX's names at lowering.

    That of their mesh's devices, which may be there only to compile for, else of the default device.
    """
    return _jax.platform(operands)


def eight_bits_unsupported() -> str | None:
    """What keeps kernels from numbers of 8 bits on this process' GPU, or None."""
    capability = _jax.target_capability()
    if capability < EIGHT_BITS_FROM:
        return (
            f"GPUs have numbers of 8 bits from compute capability {EIGHT_BITS_FROM} on; "
            f"this one has {capability}"
        )
    return None


def compute_capability() -> float | None:
    """Of this process' first NVIDIA GPU; None where it has none, as when compiling ahead of time."""
    return _jax.compute_capability()
