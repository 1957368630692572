"""What a device can do for an exchange."""

import jax

from expertmesh.core.features import check_feature
from expertmesh.ep.transports import BY_NAME
from expertmesh.ep.transports.choice import Exchange

FEATURES = tuple(BY_NAME)


def is_supported(feature: str, device: jax.Device | None = None) -> tuple[bool, str]:
    """Whether a transport can be used on a device, and why not.

    Args:
      feature: a name of `EpConfig.transport` but "auto".
      device: None for the default device.

    Returns:
      (True, "") or (False, reason). "local" needs an EP group of one rank, on any device.

    Raises:
      ValueError: unknown feature.
    """
    check_feature(feature, FEATURES)
    device = jax.devices()[0] if device is None else device
    platform = "cuda" if device.platform == "gpu" else device.platform
    reason = BY_NAME[feature].unsupported(Exchange(platform=platform))
    return reason is None, reason or ""
