"""The GPU that kernels are compiled for: the first of a process whose GPUs are alike."""

import jax
import pytest

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher


class Gpu:
    def __init__(self, capability):
        self.compute_capability = capability


def have(monkeypatch, *capabilities):
    gpus = [Gpu(capability) for capability in capabilities]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    return gpus


def test_the_first_of_gpus_that_are_alike(monkeypatch):
    gpus = have(monkeypatch, "10.0", "10.0")
    assert _jax.local_gpu() is gpus[0]
    assert _jax.compute_capability() == 10.0 and launcher.capability() == 100


@pytest.mark.parametrize("ask", [_jax.local_gpu, _jax.compute_capability, launcher.capability])
def test_gpus_of_two_kinds_are_refused(monkeypatch, ask):
    have(monkeypatch, "9.0", "9.0", "10.0")
    with pytest.raises(
        ValueError, match=r"must have one .*got 9\.0, 10\.0; .*CUDA_VISIBLE_DEVICES"
    ):
        ask()


def test_none_without_a_gpu(monkeypatch):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    assert _jax.local_gpu() is None and _jax.compute_capability() is None
    assert launcher.capability() == 90
