"""Expert parallelism: moves tokens to the devices that hold their experts, and the results back."""

from expertmesh.ep.agreement import wait_for
from expertmesh.ep.balance import Balanced, Copies, balance, copy_experts
from expertmesh.ep.bootstrap import EpGroup, bootstrap
from expertmesh.ep.capacity import recv_capacity
from expertmesh.ep.config import EpConfig
from expertmesh.ep.copy_plan import CopyPlan, least_rows_of_a_copy, plan_copies
from expertmesh.ep.dispatch import Handle, combine, dispatch, dispatch_weights, prepare
from expertmesh.ep.overflow import Overflow, find_overflow, raise_overflow
from expertmesh.ep.stall import raise_stall
from expertmesh.ep.support import is_supported
from expertmesh.ep.version import __version__ as __version__

__all__ = [
    "Balanced",
    "Copies",
    "CopyPlan",
    "EpConfig",
    "EpGroup",
    "Handle",
    "Overflow",
    "balance",
    "bootstrap",
    "combine",
    "copy_experts",
    "dispatch",
    "dispatch_weights",
    "find_overflow",
    "is_supported",
    "least_rows_of_a_copy",
    "plan_copies",
    "prepare",
    "raise_overflow",
    "raise_stall",
    "recv_capacity",
    "wait_for",
]
