"""Which axes of a mesh go over hosts, by what all processes know: the job's devices, not what one process sees."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh


def of_mesh(mesh: AbstractMesh) -> np.ndarray | None:
    """The host of each device, in the shape of the mesh, which has the job's devices in their order.

    So `jax.make_mesh` makes it. A function is traced once for all orders of devices, so no other can be known. None for
    a mesh that is not of all of the job's devices, as where it is compiled for those of another machine.
    """
    devices = jax.devices()
    kind = mesh.abstract_device
    if mesh.size != len(devices) or kind is not None and kind.device_kind != devices[0].device_kind:
        return None
    return np.reshape([host_of(device) for device in devices], mesh.axis_sizes)


def host_of(device: jax.Device) -> int:
    """A number of the device's host: as XLA counts hosts in a job of several processes, else that of the process."""
    index: int | None = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def are_over(hosts: np.ndarray | None, names: Sequence[str], axis: Sequence[str]) -> bool:
    """Whether the first EP axis goes over hosts, and the ranks along the others are on one host.

    Args:
      hosts: of each device, in the shape of the mesh; None: not known.
      names: of the mesh's axes.
      axis: the EP axes.
    """
    if hosts is None:
        return False
    outer, *inner = (names.index(name) for name in axis)
    first, last = hosts.min(tuple(inner), keepdims=True), hosts.max(tuple(inner), keepdims=True)
    alone = first.min(outer) == first.max(outer)
    return bool((first == last).all() and not alone.all())
