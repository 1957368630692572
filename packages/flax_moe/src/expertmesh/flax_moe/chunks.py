"""Tokens in n parts of equal size, so that every part has as many tokens of each shard, and nothing moves.

    part[j][..., i, ...] = x[..., i * n + j, ...]     along one of the leading dimensions

Split and merged are reshapes: the shards of a dimension are made of whole runs of n tokens.

Dimension key: `...` tokens, n parts.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core.mesh import current_resource
from expertmesh.core.specs import Entry, axes_of_type, entry_axes, mesh_of, pad_spec

__all__ = ["merge_chunks", "split_chunks"]


def split_chunks(
    function: str, operands: tuple[jax.Array, ...], num_chunks: int
) -> tuple[tuple[jax.Array, ...], int]:
    """Parts of arrays that agree in all dimensions but the last.

    Args:
      function: who asks, for messages.
      operands: [..., X] each, with any X; sharded like the first.
      num_chunks: n.

    Returns:
      The parts of each, stacked [n, ...], and the dimension that was split, for `merge_chunks`. It is the first that
      n divides on every shard, by Explicit types or by the roles of a MeshResource; over Auto axes without one, as if
      all of them sharded it.

    Raises:
      ValueError: n divides no dimension of tokens.
    """
    sizes = operands[0].shape[:-1]
    shards = _shards(operands[0])
    dims = [i for i, size in enumerate(sizes) if size % (num_chunks * shards[i]) == 0]
    if not dims:
        raise ValueError(
            f"{function}: num_chunks must divide a dimension of tokens on each shard; got num_chunks={num_chunks}, "
            f"tokens {sizes} over {shards} shards; pad the batch or change num_chunks"
        )
    return tuple(_split(x, dims[0], num_chunks) for x in operands), dims[0]


def merge_chunks(parts: jax.Array, dim: int) -> jax.Array:
    """The inverse of `split_chunks` for one array of parts [n, ...]."""
    x = jnp.moveaxis(parts, 0, dim + 1)
    shape = (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return _reshaped(x, shape, lambda spec: (*spec[: dim + 1], *spec[dim + 2 :]))


def _split(x: jax.Array, dim: int, num_chunks: int) -> jax.Array:
    shape = (*x.shape[:dim], x.shape[dim] // num_chunks, num_chunks, *x.shape[dim + 1 :])
    x = _reshaped(x, shape, lambda spec: (*spec[: dim + 1], None, *spec[dim + 1 :]))
    return jnp.moveaxis(x, dim + 1, 0)


def _reshaped(
    x: jax.Array, shape: tuple[int, ...], move: Callable[[tuple[Entry, ...]], tuple[Entry, ...]]
) -> jax.Array:
    """`x.reshape(shape)` with the entries `move(spec)` of its type's: JAX may take an axis of size 1 elsewhere."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x.reshape(shape)
    spec = PartitionSpec(*move(tuple(sharding.spec)))
    return jnp.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _shards(x: jax.Array) -> list[int]:
    """Into how many shards each dimension of tokens is split; where that can't be known, into how many at most."""
    sharding, resource = jax.typeof(x).sharding, current_resource()
    mesh = mesh_of(x)
    manual = axes_of_type(mesh, AxisType.Manual)
    sizes = {axis: size for axis, size in mesh.shape.items() if axis not in manual}
    if AxisType.Explicit in mesh.axis_types:
        spec = sharding.spec
    elif resource is not None:
        spec = (resource.entry("tokens"), resource.entry("sequence"))[: x.ndim - 1]
    else:
        return [prod(sizes.values())] * (x.ndim - 1)
    return [
        prod(sizes.get(axis, 1) for axis in entry_axes(entry))
        for entry in pad_spec(spec, x.ndim)[:-1]
    ]
