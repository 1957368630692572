"""What a device can do for an exchange."""

import jax

from expertmesh.core.support import check_feature
from expertmesh.ep.config import TRANSPORTS
from expertmesh.ep.transports import nvlink, ragged

FEATURES = tuple(name for name in TRANSPORTS if name != "auto")


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
    transport = {"ragged": ragged, "nvlink": nvlink}.get(feature)
    reason = transport.missing_on(platform) if transport else None
    return reason is None, reason or ""
