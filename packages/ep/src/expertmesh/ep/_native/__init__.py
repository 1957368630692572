"""The native part of the transport "nvlink".

`_host` is XLA's side, an extension that g++ builds with the package (build.py): it fits every jaxlib from the one on
whose headers it was built. The kernels are compiled by NVRTC at first use, for the GPU and the NCCL that are there, and
kept (kernels.py).
"""

import dataclasses
import functools
from types import ModuleType

import jax

from expertmesh.core.native import load_extension
from expertmesh.ep._native import build, kernels

# XLA's names of the custom calls, by those in the extension.
TARGETS = {
    name: f"expertmesh_ep_nvlink_{name.lower()}"
    for name in ("DISPATCH", "COMBINE", "DISPATCH_BY_ROW", "COMBINE_BY_ROW")
}
DISPATCH, COMBINE, DISPATCH_BY_ROW, COMBINE_BY_ROW = TARGETS.values()


def unsupported() -> str | None:
    """Why the transport cannot run in this installation, or None."""
    return next((x for x in (host(), kernels.find_headers()) if isinstance(x, str)), None)


@functools.cache
def host() -> ModuleType | str:
    """The extension, or why it cannot be used."""
    return load_extension(__name__, "expertmesh-ep", build.fingerprint())


@functools.cache
def load(architecture: str) -> None:
    """Compiles what no earlier process has, and gives XLA the custom calls `TARGETS`.

    Args:
      architecture: such as "sm_90a", of this process' GPUs.

    Raises:
      RuntimeError: something is missing, or the compiler fails.

    Costs about 15 s once per machine and installation.
    """
    module, headers = host(), kernels.find_headers()
    if isinstance(module, str) or isinstance(headers, str):
        raise RuntimeError(f"expertmesh.ep: transport 'nvlink' cannot run: {unsupported()}")
    exchange = kernels.compile_once(kernels.exchange(architecture, headers, module.KERNELS))
    peers = kernels.peers(architecture, headers)
    query = kernels.compile_once(peers).code if peers else b""
    module.load(exchange.code, list(exchange.names), query, headers.nccl_version)
    for name, target in TARGETS.items():
        jax.ffi.register_ffi_target(target, getattr(module, name), platform="CUDA")


@dataclasses.dataclass(frozen=True)
class Stall:
    """A wait that timed out; exchange.h."""

    epoch: int
    rank: int
    peer: int
    phase: int


def take_stall() -> Stall | None:
    """A wait of this process' devices that timed out and was not taken yet."""
    module = host()
    record = None if isinstance(module, str) else module.take_stall()
    return None if record is None else Stall(*record)


def window_bytes() -> int:
    """What this process' GPUs hold for exchanges, outside of XLA's memory."""
    module = host()
    return 0 if isinstance(module, str) else module.window_bytes()
