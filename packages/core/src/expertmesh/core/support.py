"""What this installation and a device can do."""

import functools
import importlib.metadata
import re
import warnings

import jax

from expertmesh.core import _jax
from expertmesh.core.recipe import RECIPES

# The compute capability from which on kernels multiply the operands of a recipe as they are; NVFP4 has none.
_NATIVE_FROM = {"fp8_delayed": 9.0, "fp8_current": 9.0, "fp8_block": 9.0, "mxfp8": 10.0}
FEATURES = ("reference", "triton", *RECIPES)
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
      feature: "reference", the pure-JAX ops, which run everywhere; "triton", Triton kernels on NVIDIA GPUs; a name of
        `expertmesh.core.recipe.RECIPES`: GEMMs that multiply its operands as they are. Where that is not so the recipe
        runs emulated: the operands are dequantized inside the GEMM, to the same numbers.
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
    if feature in RECIPES:
        reason = _why_emulated(feature, device)
        return reason is None, f"{feature} runs emulated: {reason}" if reason else ""
    if device.platform != "gpu":
        return False, f"Triton kernels need an NVIDIA GPU; the device is {device.device_kind}"
    problem = _missing_triton()
    return problem is None, problem or ""


def _missing_triton() -> str | None:
    problem = first_missing(TRITON)
    return problem and f"{problem} (`pip install 'expertmesh-core[cuda13]'`)"


def _why_emulated(recipe: str, device: jax.Device) -> str | None:
    first = _NATIVE_FROM.get(recipe)
    if first is None:
        return "this version has no kernel for it"
    if device.platform != "gpu":
        return f"native GEMMs need an NVIDIA GPU; the device is {device.device_kind}"
    if float(device.compute_capability) < first:
        return f"native GEMMs need compute capability {first}; the device has {device.compute_capability}"
    return _missing_triton()


def warn_if_emulated(recipe, *operands: jax.Array) -> None:
    """A UserWarning, once per process and recipe, if a GPU that runs this call does not multiply its operands natively.

    Args:
      recipe: whose GEMMs the call makes.
      operands: of the call, concrete or traced.
    """
    if platform_of(*operands) != "cuda" or not any(d.platform == "gpu" for d in jax.devices()):
        return
    native, reason = is_supported(
        next(name for name, cls in RECIPES.items() if isinstance(recipe, cls))
    )
    if not native:
        _warn_once(reason)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}; the numbers are the same", stacklevel=3)


def platform_of(*operands: jax.Array) -> str:
    """The platform ("cuda", "cpu", ...) that a call on these operands is compiled for, by JAX's names at lowering.

    That of their mesh's devices, which may be there only to compile for, else of the default device.
    """
    return _jax.platform(operands)


def compute_capability() -> float | None:
    """Of this process' first NVIDIA GPU; None where it has none, as when compiling ahead of time."""
    return _jax.compute_capability()
