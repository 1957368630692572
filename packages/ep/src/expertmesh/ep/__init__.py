"""Expert parallelism: moves tokens to the devices that hold their experts, and back."""

__version__ = "0.1.0"

from expertmesh.ep.capacity import recv_capacity
from expertmesh.ep.config import EpConfig
from expertmesh.ep.dispatch import Handle, combine, dispatch, dispatch_weights, prepare

__all__ = [
    "EpConfig",
    "Handle",
    "combine",
    "dispatch",
    "dispatch_weights",
    "prepare",
    "recv_capacity",
]
