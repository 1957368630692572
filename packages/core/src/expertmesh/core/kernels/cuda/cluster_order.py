"""In which order clusters of two blocks are near each other on a Hopper GPU.

Its L2 has two halves, and beside each half lie two pairs of GPCs (groups of multiprocessors). What the clusters of one
half read is kept in that half, and requests of near multiprocessors for the same line are merged. Where the blocks of a
launch lie is not documented and differs from GPU to GPU; how long they wait for lines of memory tells.
"""

import ctypes
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core import _jax, disk_cache
from expertmesh.core.kernels.cuda.cuda_call import cuda_call, source_text

LINES = 96  # of which enough lie in each half, and near each pair
LAUNCHES = 5  # whose median counts: some clusters may change places
STRIDE = 17 * 4096 + 128  # bytes from one line to the next, so that they lie all over L2
WARPS = 12


def cluster_order(programs: int, shared: int) -> tuple[int, ...]:
    """The place of each cluster of two blocks in an order in which neighbours are near each other.

    Measured once, in microseconds, while the first caller is traced, and kept on disk: a program
    holds it, and is found in JAX's cache only if it is the same in the next process. It decides about speed alone.

    Args:
      programs: blocks of the launch, one for each multiprocessor.
      shared: bytes of shared memory of a block, more than half of a multiprocessor's.

    Returns:
      A permutation of programs / 2; none without a GPU, as when compiling ahead of time, nor with several, of this
      process or of others: a program for all of them must be the same everywhere.
    """
    gpu = _jax.local_gpu()
    if gpu is None or jax.device_count("cuda") > 1:
        return ()
    return _kept(gpu, programs, shared)


@functools.cache  # of a device: where blocks lie does not change
def _kept(gpu: jax.Device, programs: int, shared: int) -> tuple[int, ...]:
    """The order that an earlier process measured, else this one: a launch's first clusters do not always lie alike."""
    of = f"{_uuid(gpu)} {programs} {shared} {LAUNCHES} {source()}"

    def measure() -> bytes:
        return json.dumps(_measured(gpu, programs, shared)).encode()

    return tuple(json.loads(disk_cache.kept(of, measure)))


def _uuid(gpu: jax.Device) -> str:
    """The GPU's own, whatever its number is in this process. Zeros if the driver does not tell: of speed alone."""
    found = (ctypes.c_ubyte * 16)()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(found, gpu.local_hardware_id)
    return bytes(found).hex()


def _measured(gpu: jax.Device, programs: int, shared: int) -> tuple[int, ...]:
    with jax.ensure_compile_time_eval(), jax.default_device(gpu):
        launches = [jax.device_get(_line_latencies(programs, shared)) for _ in range(LAUNCHES)]
    return tuple(places(np.median(launches, axis=0)).tolist())


def _line_latencies(programs: int, shared: int):
    latencies, _ = cuda_call(
        source=source(), name="line_latencies", scalars=(0,),
        out_type=(
            jax.ShapeDtypeStruct((programs // 2, LINES), jnp.int32),
            jax.ShapeDtypeStruct((LINES * STRIDE,), jnp.uint8),
        ),
        programs=programs, warps=WARPS, shared=shared,
    )  # fmt: skip
    return latencies


def source() -> str:
    """The kernel in CUDA C++."""
    return source_text("cluster_order.cu", defined=dict(LINES=LINES, STRIDE=STRIDE, WARPS=WARPS))


def places(latencies: np.ndarray) -> np.ndarray:
    """The place of each cluster when they are sorted by half and pair, from latencies [clusters, lines] in clocks.

    They begin with the first cluster's half and pair, so that the numbers of neither matter. A line of the other half
    takes nearly twice as long. To some of the lines of its own half a pair is nearer than to others: what differs from
    their mean as for the half's first cluster is of the same pair.
    """
    near = latencies <= (latencies.min(1) + latencies.max(1))[:, None] / 2
    mean = np.sum(latencies * near, 1) / np.sum(near, 1)
    apart = np.where(near, latencies - mean[:, None], 0)
    other = near[:, 0] != near[0, 0]
    first = np.where(other, np.argmax(other), 0)
    far = np.sum(apart * apart[first], 1) < 0
    order = np.lexsort((far, other))
    return np.argsort(order)
