"""Kernels of other GPUs than the one that is there."""

from functools import partial

import jax
import pytest

from expertmesh.core import _jax
from expertmesh.core.kernels import device

TRITON = "sm_90, Triton"  # alone, as where kernels in CUDA C++ are refused
# What kernels are chosen for; the others are compiled for the GPU that is there.
CHOSEN_FOR = {"sm_100": 10.0, "sm_89": 8.9, "PTX of sm_89": 8.9, "PTX of sm_80": 8.0}
FIRST_OF_8_BITS = 8.9


def pytest_generate_tests(metafunc):
    if "capability" in metafunc.fixturenames:
        test = f"{metafunc.module.__name__} {metafunc.function.__name__}"
        names = ["sm_90", TRITON, *CHOSEN_FOR]
        if "quantized" in test or "mixed" in test:
            names = [name for name in names if CHOSEN_FOR.get(name, 9.0) >= FIRST_OF_8_BITS]
        metafunc.parametrize("capability", names, indirect=True)


@pytest.fixture
def capability(request, monkeypatch):
    """Hopper's kernels, and those of other GPUs, which run on Hopper too: as compiled for it, or for the others."""
    chosen = CHOSEN_FOR.get(request.param)
    if request.param == "sm_90":
        yield
        return
    jax.clear_caches()  # of programs for the GPU that is there
    if chosen is None:
        monkeypatch.setattr(device, "nvrtc", lambda: None)
    else:
        monkeypatch.setattr(_jax, "compute_capability", lambda: chosen)
    if request.param.startswith("PTX"):
        compiled = partial(compiled_as_ptx, _jax.compile_triton, round(10 * chosen))
        monkeypatch.setattr(_jax, "compile_triton", compiled)
    yield
    jax.clear_caches()


def compiled_as_ptx(compile_triton, capability, *kernel_and_options):
    """What `compile_triton` gives for another capability, as PTX, which the driver compiles for this GPU."""
    *kernel, _ = kernel_and_options
    return compile_triton(*kernel, capability, "ptx")
