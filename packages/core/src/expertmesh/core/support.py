"""What this installation and a device can do."""

import importlib.metadata
import re

import jax

from expertmesh.core import _jax

FEATURES = ("reference", "triton")
TRITON = ("jax-triton>=0.4.1", "triton>=3.8")  # older ones lack TMA descriptors as parameters


def missing_distribution(requirement: str) -> str | None:
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


def first_missing(requirements: tuple[str, ...]) -> str | None:
    """Why the first of `requirements` that does not hold does not, or None."""
    return next(filter(None, map(missing_distribution, requirements)), None)


def check_feature(feature: str, features: tuple[str, ...]) -> None:
    """Raises ValueError for what is not one of a package's features."""
    if feature not in features:
        raise ValueError(
            f"is_supported: feature must be one of {', '.join(features)}; got feature={feature!r}; choose one of these"
        )


def is_supported(feature: str, device: jax.Device | None = None) -> tuple[bool, str]:
    """Whether a feature of core can be used on a device, and why not.

    Args:
      feature: "reference", the pure-JAX ops, which run everywhere; "triton", Triton kernels on NVIDIA GPUs.
      device: None for the default device.

    Returns:
      (True, "") or (False, reason).

    Raises:
      ValueError: unknown feature.
    """
    check_feature(feature, FEATURES)
    if feature == "reference":
        return True, ""
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return False, f"Triton kernels need an NVIDIA GPU; the device is {device.device_kind}"
    problem = first_missing(TRITON)
    if problem:
        return False, f"{problem} (`pip install 'expertmesh-core[cuda13]'`)"
    return True, ""


def platform_of(*operands: jax.Array) -> str:
    """The platform ("cuda", "cpu", ...) that a call on these operands is compiled for, by JAX's names at lowering.

    That of their mesh's devices, which may be there only to compile for, else of the default device.
    """
    return _jax.platform(operands)
