"""The order of clusters, from latencies of a GPU that is made up; its kernel assembles for Hopper."""

import jax
import numpy as np
import pytest

from aot.test_kernels import _assemble_cuda
from cases.marks import needs_triton
from expertmesh.core import _jax

pytestmark = [pytest.mark.aot, needs_triton]

LINES = 48


def _gpu(seed, clusters=66, noise=4.0):
    """Which half and pair of it each cluster is in, and its latencies in clocks."""
    rng = np.random.default_rng(seed)
    half, pair = rng.integers(0, 2, (2, clusters))
    home, nearest = rng.integers(0, 2, (2, LINES))
    far = half[:, None] != home[None]
    aside = pair[:, None] != nearest[None]
    row = rng.integers(0, 3, clusters)[:, None]  # within a pair some are farther from everything
    latencies = 275 + 195 * far + 30 * (aside & ~far) + 8 * row + rng.normal(0, noise, far.shape)
    return half, pair, latencies.round().astype(np.int32)


@pytest.mark.parametrize("seed", range(8))
def test_neighbours_are_of_one_half_and_pair(seed):
    from expertmesh.core.kernels.cuda.cluster_order import places

    half, pair, latencies = _gpu(seed)
    got = places(latencies)
    assert sorted(got) == list(range(len(half)))
    in_order = np.argsort(got)
    assert half[in_order[0]] == half[0] and pair[in_order[0]] == pair[0]
    assert np.count_nonzero(np.diff(half[in_order])) == 1
    assert np.count_nonzero(np.diff(2 * half[in_order] + pair[in_order])) == 3


def test_the_same_whatever_lines_are_asked():
    """And wherever they lie: in each process they lie elsewhere."""
    from expertmesh.core.kernels.cuda.cluster_order import places

    half, pair, latencies = _gpu(1)
    rng = np.random.default_rng(0)
    for _ in range(10):
        noisy = latencies[:, rng.permutation(LINES)] + rng.integers(-3, 4, latencies.shape)
        np.testing.assert_array_equal(places(noisy), places(latencies))


@pytest.mark.parametrize("clusters", [1, 57])
def test_a_permutation_where_nothing_differs(clusters):
    from expertmesh.core.kernels.cuda.cluster_order import places

    np.testing.assert_array_equal(places(np.full((clusters, LINES), 300)), np.arange(clusters))


def test_measured_on_a_single_gpu_alone(monkeypatch):
    """Without one there is nothing to measure; programs for several, perhaps of several processes, must not differ."""
    from expertmesh.core.kernels.cuda import cluster_order as kernels

    def order_on(gpus):
        monkeypatch.setattr(_jax, "local_gpu", lambda: gpus[0])
        monkeypatch.setattr(jax, "device_count", lambda backend: len(gpus))
        return kernels.cluster_order(132, 1024)

    assert kernels.cluster_order(132, 1024) == ()
    monkeypatch.setattr(kernels, "_kept", lambda gpu, *_: (gpu,))
    assert order_on(["gpu0", "gpu1"]) == ()
    assert order_on(["gpu0"]) == ("gpu0",)


def test_the_same_in_the_next_process(monkeypatch, tmp_path):
    """Whatever it measured: a program that holds another order is compiled once more."""
    from expertmesh.core.kernels.cuda import cluster_order as kernels

    measured = []

    def measure(gpu, programs, shared):
        measured.append(gpu)
        return tuple(np.random.default_rng(len(measured)).permutation(programs // 2).tolist())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_measured", measure)
    monkeypatch.setattr(kernels, "_uuid", lambda gpu: gpu)

    def in_a_process(gpu, programs=132):
        kernels._kept.cache_clear()
        return kernels._kept(gpu, programs, 1024)

    first, other = in_a_process("gpu0"), in_a_process("gpu1")
    assert in_a_process("gpu0") == first != other == in_a_process("gpu1")
    assert len(in_a_process("gpu0", 64)) == 32
    assert in_a_process("gpu0") == first, "of as many programs"
    assert measured == ["gpu0", "gpu1", "gpu0"]
    for path in tmp_path.glob("expertmesh/*[!k]"):
        path.write_text("[0, 0]")
    again = in_a_process("gpu0")
    assert sorted(again) == sorted(first) and len(measured) == 4, "a damaged file is an order"


def test_kernels():
    from expertmesh.core.kernels.cuda import cluster_order, grouped_gemm

    ptx, _ = _assemble_cuda(cluster_order.source())
    assert "atom.global.or.b32" in ptx
    text = grouped_gemm.rows_source(
        ("bfloat16",) * 2, "bfloat16", True, places=tuple(range(65, -1, -1))
    )
    ptx, _ = _assemble_cuda(text)
    assert "ld.const" in ptx, "the places of clusters are not read"
