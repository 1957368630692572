"""Multiplies each row that holds a token with its routing weight; all other rows become zeros.

    out[p, r] = weights[p, r] * y[p, r]   if row r of p holds a token, else 0

A weight of 0 is legal and has a gradient; what is not selected may be NaN.

Dimension key: P participants, C rows per participant, D model width.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.op import Op
from expertmesh.core.ops.row_map import holds_token
from expertmesh.core.vjp import differentiable

__all__ = ["weight_rows"]


def weight_rows(
    y: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    *,
    y_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`jnp.where(holds_token(source)[..., None], weights[..., None] * y, 0)`.

    Args:
      y: float[P, C, D].
      weights: float32[P, C].
      source: int32[P, C] of the handle.
      y_spec: where `y` and the result are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep).

    Returns:
      float[P, C, D] in y's dtype, multiplied in float32. Differentiable in `y` and `weights`; the weights' gradient
      is summed in float32. No communication if P is sharded; a sharded D costs the backward an all-reduce [P, C].
    """
    return _weight_rows(y, weights, source, y_spec=y_spec)


def _scale(y: jax.Array, weights: jax.Array, source: jax.Array) -> jax.Array:
    scaled = y.astype(jnp.float32) * weights[..., None]
    return jnp.where(holds_token(source)[..., None], scaled, jnp.float32(0)).astype(y.dtype)


def _weights_grad(y: jax.Array, d_out: jax.Array, source: jax.Array) -> jax.Array:
    product = y.astype(jnp.float32) * d_out.astype(jnp.float32)
    return jnp.where(holds_token(source), jnp.sum(product, axis=-1), jnp.float32(0))


_scale_op = Op("weight_rows", _scale, "p c d, p c, p c -> p c d")
_weights_grad_op = Op("weight_rows_grad", _weights_grad, "p c d, p c d, p c -> p c", summed=("d",))


def _scale_at(
    y_spec: PartitionSpec | None, y: jax.Array, weights: jax.Array, source: jax.Array
) -> jax.Array:
    specs = (y_spec, None, None)
    scaled: jax.Array = _scale_op(y, weights, source, operand_specs=specs, result_specs=(y_spec,))
    return scaled


def _weight_rows_fwd(
    y: jax.Array, weights: jax.Array, source: jax.Array, *, y_spec: PartitionSpec | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _scale_at(y_spec, y, weights, source), (y, weights, source)


def _weight_rows_bwd(
    residuals: tuple[jax.Array, ...], d_out: jax.Array, *, y_spec: PartitionSpec | None
) -> tuple[jax.Array, jax.Array, None]:
    y, weights, source = residuals
    d_weights = _weights_grad_op(y, d_out, source, operand_specs=(y_spec, y_spec, None))
    return _scale_at(y_spec, d_out, weights, source), d_weights, None


_weight_rows = differentiable(_weight_rows_fwd, _weight_rows_bwd)
