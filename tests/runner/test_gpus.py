"""`--as-gpu`: for which GPU kernels are chosen, and in what form they are compiled."""

import pytest

from cases.gpus import NAMES, as_gpu
from expertmesh.core import _jax
from expertmesh.core.kernels.device import current_device


def kernel_of(capability, form="cubin"):
    return capability, form


@pytest.mark.parametrize(
    "name, capability, compiled",
    [
        ("sm_90", 90, (90, "cubin")),
        ("sm_90, Triton", 90, (90, "cubin")),
        ("sm_100", 100, (90, "cubin")),
        ("sm_89", 89, (90, "cubin")),
        ("PTX of sm_89", 89, (89, "ptx")),
        ("PTX of sm_80", 80, (80, "ptx")),
    ],
)
def test_what_kernels_are_of(name, capability, compiled, monkeypatch):
    monkeypatch.setattr(_jax, "compile_triton", kernel_of)
    before = current_device()
    with as_gpu(name):
        assert current_device().capability == capability
        assert _jax.compile_triton(90) == compiled
        assert current_device().runs_cuda == (name == "sm_90" and before.runs_cuda)
    assert (current_device(), _jax.compile_triton) == (before, kernel_of)


def test_names_are_known():
    with pytest.raises(ValueError, match="got name='sm_70'"), as_gpu("sm_70"):
        pass
    assert len(NAMES) == 6
