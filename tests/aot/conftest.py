"""Meshes of H100s that are not there: XLA compiles whole programs for them, ptxas included."""

import importlib.util
import math
import os
import pathlib
import shutil

import numpy as np
import pytest

GPUS_PER_HOST = 8

# Without it the plugin insists on the CUDA libraries, which compiling does not need.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def _unsupported() -> str | None:
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13)
    ):
        return "needs jax-cuda13-plugin and jax-cuda13-pjrt: `ci/matrix.py run aot` installs them"
    if not shutil.which("ptxas") and importlib.util.find_spec("nvidia.cu13") is None:
        return "needs ptxas on the PATH or the wheels nvidia-cuda-nvcc and nvidia-nvvm"
    return None


@pytest.fixture(scope="session")
def h100_mesh():
    """`h100_mesh({"fsdp": 2, "ep": 8}, axis_type=Auto)`: a Mesh in hosts of 8 GPUs, no GPU needed.

    Lower with `jax.ShapeDtypeStruct(shape, dtype, sharding=...)` and compile; nothing can run.
    """
    if reason := _unsupported():
        pytest.skip(reason)
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    target = pathlib.Path(__file__).with_name("h100.txt").read_text()

    def mesh(axes: dict[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
        size = math.prod(axes.values())
        hosts = max(1, size // GPUS_PER_HOST)
        if size != hosts * min(size, GPUS_PER_HOST):
            raise ValueError(
                f"h100_mesh: more than {GPUS_PER_HOST} devices must be whole hosts; got {axes}"
            )
        # Slices x hosts x GPUs per host.
        topology = f"1x{hosts}x{size // hosts}"
        found = topologies.get_topology_desc(
            "h100", "cuda", target_config=target, topology=topology
        )
        devices = np.array(found.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))

    return mesh
