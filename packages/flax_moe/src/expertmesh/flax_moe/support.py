"""What this installation and a device can do with the block."""

import jax

from expertmesh.core.features import check_feature
from expertmesh.core.features import is_supported as core_is_supported
from expertmesh.core.quantization.recipe import RECIPES

__all__ = ["FEATURES", "is_supported"]

FEATURES = ("moe", "native_moe", "native_ragged", *RECIPES)


def is_supported(feature: str, device: jax.Device | None = None) -> tuple[bool, str]:
    """Whether a feature of flax_moe can be used on a device, and why not.

    Args:
      feature: "moe" and "native_moe" run everywhere; "native_ragged" is `native_moe(exchange="ragged")`; the name
        of a recipe: as `expertmesh.core.is_supported`.
      device: None for the default device.

    Returns:
      (True, "") or (False, reason); of a recipe also (True, "compiled, not run: ...").

    Raises:
      ValueError: unknown feature.
    """
    check_feature(feature, FEATURES)
    if feature in RECIPES:
        return core_is_supported(feature, device)
    if feature == "native_ragged":
        platform = (jax.devices()[0] if device is None else device).platform
        if platform == "cpu":
            return False, "XLA has no ragged_all_to_all on CPU; use exchange='padded' or 'auto'"
    return True, ""
