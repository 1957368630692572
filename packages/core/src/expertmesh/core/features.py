"""What of core can be used here: `is_supported`."""

import functools

import jax

from expertmesh.core.quantization.recipe import RECIPES
from expertmesh.core.support import KernelError, emulated, tested_versions, triton_unsupported

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
      feature: "reference", the pure-JAX ops, which run everywhere; "triton", Triton kernels on NVIDIA GPUs; a name of
        `expertmesh.core.RECIPES`: GEMMs that multiply its operands as they are. Where that is not so the recipe runs
        emulated: the operands are dequantized inside the GEMM, to the same numbers.
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
        reason = emulated(feature, device)
        return not reason, reason
    if device.platform != "gpu":
        return False, f"Triton kernels need an NVIDIA GPU; the device is {device.device_kind}"
    problem = triton_unsupported() or _kernels_unsupported()
    return problem is None, problem or ""


@functools.cache
def _kernels_unsupported() -> str | None:
    """Why the installed versions do not compile a small kernel, or the GPU does not load it, or None."""
    from expertmesh.core.kernels.triton import probe

    try:
        jax.eval_shape(probe.copy, jax.ShapeDtypeStruct((128,), jax.numpy.float32))
    except KernelError as error:
        return f"{error}; tested versions: {tested_versions()}"
    return None
