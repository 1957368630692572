"""The devices that a cell promises are the ones that its tests see."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multiprocess_runner import on_gpu

pytestmark = pytest.mark.default_jax


@pytest.mark.any_device
def test_default_platform():
    assert jax.default_backend() == ("gpu" if on_gpu() else "cpu")
    if not on_gpu():
        assert jax.device_count() == 8


@pytest.mark.any_device
def test_sum_over_every_device():
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(4.0 * devices), NamedSharding(mesh, PartitionSpec("x")))
    total = jax.jit(jnp.sum)(x)
    assert float(total) == sum(range(4 * devices))


@pytest.mark.gpu
def test_gpu_beside_cpu_devices():
    """JAX_PLATFORMS=cuda,cpu keeps the CPU as an oracle."""
    assert jax.devices("cpu")
    assert jax.devices()[0].platform == "gpu"
