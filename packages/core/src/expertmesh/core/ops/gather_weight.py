"""FSDP inside the user's own `shard_map`: the whole weight for use, its gradient scattered back to the shards.

Over Auto and Explicit axes the GEMMs do this themselves.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core import _jax
from expertmesh.core.operands import check_arrays
from expertmesh.core.specs import (
    axes_of_type,
    axis_size,
    entry_axes,
    filter_axes,
    pad_spec,
    spec_axes,
)
from expertmesh.core.vjp import differentiable

__all__ = ["gather_weight"]


def gather_weight(
    w: jax.Array, spec: PartitionSpec, *, dtype: DTypeLike | None = None
) -> jax.Array:
    """`jax.lax.all_gather(w, axes, axis=dim, tiled=True)` for each dimension that `spec` splits over Manual axes.

    Args:
      w: float[...], this device's shard of a weight.
      spec: the weight's layout at rest, for the axes that are to be gathered; any dimension, axes of a tuple major
        first. Axes that are not Manual here, as outside of a `shard_map`, are left to the GEMMs.
      dtype: what crosses devices; None: that of `w`.

    Returns:
      The weight, gathered, in the dtype of `w`; its values are rounded to `dtype`. A GEMM in `dtype` then casts it
      without further rounding.

    Raises:
      ValueError: an axis that is not in the mesh; more entries than dimensions; a dtype of integers for floats.

    Differentiable: the gradient is reduce-scattered over the axes, in the dtype of `w`. So the devices along the axes
    must hold different tokens.
    """
    check_arrays("gather_weight", w=w)
    dtype = jnp.dtype(dtype or w.dtype)
    if jnp.issubdtype(w.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"gather_weight: a weight of floats must be gathered in floats; got dtype={dtype.name}; pass for example "
            "'bfloat16'"
        )
    mesh = _jax.operand_mesh("gather_weight", (w,))
    if mesh.empty:
        return w
    axis_size(mesh.shape, spec_axes(spec))
    gathered = filter_axes(pad_spec(spec, w.ndim), axes_of_type(mesh, AxisType.Manual))
    if not spec_axes(gathered):
        return w
    return _gather(w, spec=gathered, dtype=dtype)


def _fwd(w: jax.Array, *, spec: PartitionSpec, dtype: DTypeLike) -> tuple[jax.Array, None]:
    whole = w.astype(dtype)
    for dim, entry in enumerate(spec):
        if entry is not None:
            whole = jax.lax.all_gather(whole, entry_axes(entry), axis=dim, tiled=True)
    return whole.astype(w.dtype), None


def _bwd(
    _: None, cotangent: jax.Array, *, spec: PartitionSpec, dtype: DTypeLike
) -> tuple[jax.Array]:
    del dtype
    for dim, entry in enumerate(spec):
        if entry is not None:
            cotangent = jax.lax.psum_scatter(
                cotangent, entry_axes(entry), scatter_dimension=dim, tiled=True
            )
    return (cotangent,)


_gather = differentiable(_fwd, _bwd)
