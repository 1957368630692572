"""Kernels of other GPUs than the one that is there."""

import jax
import pytest

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher

# What kernels are chosen for; the others are compiled for the GPU that is there.
CHOSEN_FOR = {"sm_100": 10.0, "sm_89": 8.9, "PTX of sm_89": 8.9, "PTX of sm_80": 8.0}


@pytest.fixture(params=["sm_90", *CHOSEN_FOR])
def capability(request, monkeypatch):
    """Hopper's kernels, and those of other GPUs, which run on Hopper too: as compiled for it, or for the others."""
    chosen = CHOSEN_FOR.get(request.param)
    if chosen is None:
        yield
        return
    if chosen < 8.9 and "quantized" in request.module.__name__:
        pytest.skip("multiplies no 8 bits")
    jax.clear_caches()  # of programs for the GPU that is there
    monkeypatch.setattr(_jax, "compute_capability", lambda: chosen)
    if request.param.startswith("PTX"):
        monkeypatch.setattr(launcher, "capability", lambda: round(10 * chosen))
    yield
    jax.clear_caches()
