"""The order of clusters on the GPU that is there: a permutation, which changes no bit of what is computed."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import _jax

pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The places of clusters by one of two functions, which measures them, or also keeps them."""
    from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES
    from expertmesh.core.kernels.cuda import cluster_order

    if _jax.compute_capability() != 9.0:
        pytest.skip(
            "the kernel has instructions of Hopper, and no other GPU's kernels ask for the order"
        )
    gpu = _jax.local_gpu()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of = gpu, gpu.core_count // 2 * 2, SHARED_BYTES
    functions = {"measured": cluster_order._measured, "kept": cluster_order._kept.__wrapped__}
    return lambda function: functions[function](*of)


@pytest.mark.parametrize("function", ["measured", "kept"])
def test_a_permutation_that_is_the_same_again(asked, function):
    first = asked(function)
    assert sorted(first) == list(range(len(first)))
    for _ in range(5):
        assert asked(function) == first


@pytest.mark.parametrize("width", [4104, 520])
def test_changes_no_bit(asked, width, monkeypatch):
    """Measured, in reverse, and the order of the launch; several rounds of tiles, and less than one."""
    from expertmesh.core.kernels import grouped_gemm as kernels
    from expertmesh.core.kernels.cuda import grouped_gemm as cuda

    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(1, 3000, 520)), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=(5, 520, width)), jnp.bfloat16)
    sizes = jnp.asarray([[900, 0, 1023, 77, 800]], jnp.int32)

    def result(places):
        monkeypatch.setattr(cuda, "cluster_order", lambda *_: places)
        run = jax.jit(lambda *given: kernels.rows(*given, out_dtype=jnp.dtype("bfloat16")))
        return np.asarray(run(lhs, rhs, sizes), np.float32)

    places = asked("measured")
    as_launched = result(())
    for order in (places, places[::-1]):
        np.testing.assert_array_equal(result(order), as_launched)


PRODUCT = """
import jax, jax.numpy as jnp
from expertmesh.core.kernels.grouped_gemm import rows

lhs, rhs = jnp.ones((1, 512, 128), jnp.bfloat16), jnp.ones((2, 128, 256), jnp.bfloat16)
sizes = jnp.full((1, 2), 256, jnp.int32)
product = jax.jit(lambda *given: rows(*given, out_dtype=jnp.dtype("bfloat16")))
assert (product(lhs, rhs, sizes) == 128).all()
"""


def test_the_next_process_finds_the_program(tmp_path):
    caches = {
        "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TRITON_CACHE_DIR": f"{tmp_path}/triton",
        "XDG_CACHE_HOME": str(tmp_path),
    }

    def programs():
        subprocess.run([sys.executable, "-c", PRODUCT], env=os.environ | caches, check=True)
        return {path.name for path in tmp_path.glob("jax/*-cache")}

    first = programs()
    assert any("lambda" in name for name in first)
    assert programs() == first
