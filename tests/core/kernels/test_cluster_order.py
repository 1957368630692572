"""The order of clusters on the GPU that is there: a permutation, which changes no bit of what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import _jax

pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.fixture
def cores():
    if _jax.compute_capability() != 9.0:
        pytest.skip("clusters are ordered on Hopper alone")
    return jax.local_devices(backend="cuda")[0].core_count


def test_a_permutation_that_is_the_same_again(cores):
    from expertmesh.core.kernels import cluster_order as kernels
    from expertmesh.core.kernels.grouped_gemm import SHARED_BYTES

    programs = cores // 2 * 2
    first = kernels.cluster_order(programs, SHARED_BYTES)
    assert sorted(first) == list(range(programs // 2))
    for _ in range(5):
        kernels._measured.cache_clear()
        assert kernels.cluster_order(programs, SHARED_BYTES) == first


@pytest.mark.parametrize("width", [4104, 520])
def test_changes_no_bit(cores, width, monkeypatch):
    """Measured, in reverse, and the order of the launch; several rounds of tiles, and less than one."""
    from expertmesh.core.kernels import grouped_gemm as kernels

    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(1, 3000, 520)), jnp.bfloat16)
    rhs = jnp.asarray(rng.normal(size=(5, 520, width)), jnp.bfloat16)
    sizes = jnp.asarray([[900, 0, 1023, 77, 800]], jnp.int32)

    def result():
        run = jax.jit(lambda *given: kernels.rows(*given, out_dtype=jnp.dtype("bfloat16")))
        return np.asarray(run(lhs, rhs, sizes), np.float32)

    measured = result()
    for places in (tuple(range(cores // 2))[::-1], ()):
        monkeypatch.setattr(kernels, "cluster_order", lambda *_, places=places: places)
        np.testing.assert_array_equal(result(), measured)
