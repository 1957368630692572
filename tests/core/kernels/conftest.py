"""Kernels of other GPUs than the one that is there."""

import jax
import pytest

from expertmesh.core import _jax


@pytest.fixture(params=["sm_90", "sm_100"])
def capability(request, monkeypatch):
    """Hopper's kernels, and those of later GPUs, which run on Hopper too."""
    if request.param == "sm_100":
        jax.clear_caches()  # of programs for the GPU that is there
        monkeypatch.setattr(_jax, "compute_capability", lambda: 10.0)
        yield
        jax.clear_caches()
    else:
        yield
