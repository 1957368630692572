"""The device mesh of the main job: its two axes, how `--mesh` sizes them, and placing values on it.

"fsdp" splits weights, "ep" splits experts, and both together split the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from expertmesh.core import MeshResource
from expertmesh.train.options import UsageError

AXES = ("fsdp", "ep")
BATCH = PartitionSpec(AXES)
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
LARGEST_DEFAULT_EP = 4


def mesh_sizes(entries: dict[str, int], num_devices: int, num_experts: int) -> tuple[int, int]:
    """Sizes of ("fsdp", "ep") from the entries of `--mesh`; an axis without an entry takes the rest.

    Without entries "ep" is the largest common divisor of `num_devices` and `num_experts` up to 4.

    Raises:
      UsageError: if the sizes do not multiply to `num_devices`, or "ep" does not divide the experts.
    """
    if not entries:
        common = (
            n for n in range(1, LARGEST_DEFAULT_EP + 1) if num_devices % n == num_experts % n == 0
        )
        entries = {"ep": max(common)}
    fsdp = entries.get("fsdp", max(1, num_devices // entries.get("ep", 1)))
    ep = entries.get("ep", max(1, num_devices // fsdp))
    if fsdp * ep != num_devices:
        raise UsageError(
            f"--mesh must multiply to the number of devices; got fsdp={fsdp} x ep={ep} = {fsdp * ep} "
            f"with {num_devices} devices; change --mesh, or --cpu-devices where there is no GPU"
        )
    if num_experts % ep:
        raise UsageError(
            f"--experts must be a multiple of the mesh axis ep; got experts={num_experts}, ep={ep}; "
            f"give --experts {-(-num_experts // ep) * ep} or another --mesh"
        )
    return fsdp, ep


def make_mesh(fsdp: int, ep: int, axis_types: str) -> Mesh:
    """A mesh of all devices; `axis_types` is "explicit" or "auto"."""
    kind = AxisType.Explicit if axis_types == "explicit" else AxisType.Auto
    return jax.make_mesh((fsdp, ep), AXES, axis_types=(kind, kind))


def place(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`x` laid out as `spec` says on the mesh in context; `x` itself where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    placed: jax.Array
    if AxisType.Explicit in mesh.axis_types:
        placed = jax.sharding.reshard(x, spec)
    else:
        placed = jax.lax.with_sharding_constraint(x, spec)
    return placed


def on_shards(
    function: Callable[..., jax.Array], *batches: jax.Array, out_spec: PartitionSpec = BATCH
) -> jax.Array:
    """Applies `function` to each device's part of batches that are split over both axes; without a mesh, to all of
    them.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function(*batches)
    return jax.shard_map(function, in_specs=BATCH, out_specs=out_spec)(*batches)


def microbatches(batch: jax.Array, count: int) -> jax.Array:
    """[B, ...] as [count, B / count, ...]. Each device divides its own rows, so that none moves."""

    def split(rows: jax.Array) -> jax.Array:
        return rows.reshape(count, -1, *rows.shape[1:])

    return on_shards(split, batch, out_spec=PartitionSpec(None, AXES))
