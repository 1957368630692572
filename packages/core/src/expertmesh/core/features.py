"""Which features and recipes a device runs natively, emulated, or not at all."""

import functools

import jax

from expertmesh.core.quantization.recipe import RECIPES, Recipe
from expertmesh.core.support import (
    EIGHT_BITS_FROM,
    KernelError,
    platform_of,
    tested_versions,
    triton_unsupported,
    warn_once,
)

# The compute capability from which on kernels multiply the operands of a recipe as they are.
_NATIVE_FROM = {
    **dict.fromkeys(("fp8_delayed", "fp8_current", "fp8_block"), EIGHT_BITS_FROM),
    **dict.fromkeys(("mxfp8", "nvfp4"), 10.0),
}
# Compute capabilities of GPUs on which the tests of kernels ran; for others CI compiles.
_RUN_ON = ("9.0",)
FEATURES = ("reference", "triton", *RECIPES)


def check_feature(feature: str, features: tuple[str, ...]) -> None:
    """Raises ValueError for what is not one of a package's features."""
    if feature not in features:
        raise ValueError(
            f"is_supported: feature must be one of {', '.join(features)}; got feature={feature!r}; choose one of these"
        )


def is_supported(feature: str, device: jax.Device | None = None) -> tuple[bool, str]:
    """Whether a feature of core can be used on a device, and why not.

    Args:
      feature: "reference", the pure-JAX ops, which run everywhere; "triton", Triton kernels on NVIDIA GPUs; or a name
        of `expertmesh.core.RECIPES`: GEMMs that multiply its operands natively. Otherwise the recipe runs emulated:
        GEMMs dequantize the operands, to the same numbers.
      device: None for the default device.

    Returns:
      (True, ""), or (False, reason). (True, "compiled, not run: ...") for kernels of GPUs on which nobody has run them.

    Raises:
      ValueError: unknown feature.
    """
    check_feature(feature, FEATURES)
    if feature == "reference":
        return True, ""
    device = jax.devices()[0] if device is None else device
    if feature in RECIPES:
        reason = _emulated(feature, device)
        return not reason, reason or _not_run(device)
    if device.platform != "gpu":
        return False, f"Triton kernels need an NVIDIA GPU; the device is {device.device_kind}"
    problem = triton_unsupported() or _kernels_unsupported()
    return problem is None, problem or _not_run(device)


def _not_run(device: jax.Device) -> str:
    """That kernels for a GPU are only compiled; "" where they ran."""
    if device.compute_capability in _RUN_ON:
        return ""
    return (
        f"compiled, not run: the tests met no GPU of compute capability {device.compute_capability}"
    )


@functools.cache
def _kernels_unsupported() -> str | None:
    """Why the installed versions do not compile a small kernel, or the GPU does not load it, or None."""
    from expertmesh.core.kernels.triton import probe

    try:
        jax.eval_shape(probe.copy, jax.ShapeDtypeStruct((128,), jax.numpy.float32))
    except KernelError as error:
        return f"{error}; tested versions: {tested_versions()}"
    return None


def _emulated(recipe: str, device: jax.Device) -> str:
    """That a device does not multiply a recipe's operands natively, and why; "" where it does."""
    reason = _native_unsupported(recipe, device)
    return f"{recipe} runs emulated: {reason}" if reason else ""


def _native_unsupported(recipe: str, device: jax.Device) -> str | None:
    first = _NATIVE_FROM.get(recipe)
    if first is None:
        return "this version has no kernel for it"
    if device.platform != "gpu":
        return f"native GEMMs need an NVIDIA GPU; the device is {device.device_kind}"
    if float(device.compute_capability) < first:
        return f"native GEMMs need compute capability {first}; the device has {device.compute_capability}"
    return triton_unsupported()


def warn_if_emulated(recipe: Recipe, *operands: jax.Array) -> None:
    """A UserWarning, once per process and recipe, if a GPU that runs this call does not multiply its operands natively.

    Args:
      recipe: whose GEMMs the call makes.
      operands: of the call, concrete or traced.
    """
    if platform_of(*operands) != "cuda" or not any(d.platform == "gpu" for d in jax.devices()):
        return
    names = (name for name, cls in RECIPES.items() if isinstance(recipe, cls))
    # A recipe of the user's own has no name.
    if reason := _emulated(next(names, type(recipe).__name__), jax.devices()[0]):
        warn_once(f"{reason}; the numbers are the same")
