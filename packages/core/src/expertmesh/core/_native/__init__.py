"""The native part of core: XLA's custom call that launches kernels (launch.cc), built by build.py."""

import functools
from types import ModuleType

import jax

from expertmesh.core._native import build
from expertmesh.core.native import load_extension

LAUNCH = "expertmesh_core_launch"


@functools.cache
def host() -> ModuleType | str:
    """The extension, whose custom call `LAUNCH` XLA then has; or why it cannot be used."""
    module = load_extension(__name__, "expertmesh-core", build.fingerprint())
    if not isinstance(module, str):
        jax.ffi.register_ffi_target(LAUNCH, module.LAUNCH, platform="CUDA")
    return module
