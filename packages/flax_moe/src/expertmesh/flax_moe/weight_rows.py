"""Multiplies each row that holds a token with its routing weight; all other rows become zeros.

    out[p, r] = weights[p, r] * y[p, r]   if row r of p holds a token, else 0

Row r holds a token by its position: group g owns the `group_sizes[p, g]` rows after those of the groups before it, and
its first `tokens_per_expert[p, g]` rows are tokens, the others padding. Neither the weight's value (0 is a legal weight
with a gradient) nor the row's decides, and what is not selected may be NaN.

Dimension key: P participants, C rows per participant, D model width, G groups per participant.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.op import Op
from expertmesh.core.vjp import differentiable

__all__ = ["weight_rows"]


def weight_rows(
    y: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    tokens_per_expert: jax.Array,
    *,
    y_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`jnp.where(holds_token, weights[..., None] * y, 0)`.

    Args:
      y: float[P, C, D].
      weights: float32[P, C].
      group_sizes: int32[P, G], rows of each group, padding included.
      tokens_per_expert: int32[P, G], tokens of each group; more than `group_sizes` counts as `group_sizes`.
      y_spec: where `y` and the result are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep).

    Returns:
      float[P, C, D] in y's dtype, multiplied in float32. Differentiable in `y` and `weights`; the weights' gradient
      is summed in float32. No communication if P is sharded; a sharded D costs the backward an all-reduce [P, C].
    """
    return _weight_rows(y, weights, group_sizes, tokens_per_expert, y_spec=y_spec)


def _holds_token(
    num_rows: int, group_sizes_PG: jax.Array, tokens_per_expert_PG: jax.Array
) -> jax.Array:
    """bool[P, C]."""
    first_PG = jnp.cumsum(group_sizes_PG, axis=1) - group_sizes_PG
    last_PG = first_PG + jnp.minimum(tokens_per_expert_PG, group_sizes_PG)
    row_C = jnp.arange(num_rows)
    return jnp.any((first_PG[:, None] <= row_C[:, None]) & (row_C[:, None] < last_PG[:, None]), -1)


def _scale(
    y: jax.Array, weights: jax.Array, group_sizes: jax.Array, tokens_per_expert: jax.Array
) -> jax.Array:
    live_PC = _holds_token(y.shape[1], group_sizes, tokens_per_expert)
    scaled = y.astype(jnp.float32) * weights[..., None]
    return jnp.where(live_PC[..., None], scaled, jnp.float32(0)).astype(y.dtype)


def _weights_grad(
    y: jax.Array, d_out: jax.Array, group_sizes: jax.Array, tokens_per_expert: jax.Array
) -> jax.Array:
    live_PC = _holds_token(y.shape[1], group_sizes, tokens_per_expert)
    product = y.astype(jnp.float32) * d_out.astype(jnp.float32)
    return jnp.where(live_PC, jnp.sum(product, axis=-1), jnp.float32(0))


# The groups of a participant are named g: they are its own, not a split of the experts.
_scale_op = Op("weight_rows", _scale, "p c d, p c, p g, p g -> p c d", whole=("c", "g"))
_weights_grad_op = Op(
    "weight_rows_grad",
    _weights_grad,
    "p c d, p c d, p g, p g -> p c",
    summed=("d",),
    whole=("c", "g"),
)


def _scale_at(
    y_spec: PartitionSpec | None,
    y: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    tokens_per_expert: jax.Array,
) -> jax.Array:
    operands = (y, weights, group_sizes, tokens_per_expert)
    specs = (y_spec, None, None, None)
    scaled: jax.Array = _scale_op(*operands, operand_specs=specs, result_specs=(y_spec,))
    return scaled


def _weight_rows_fwd(
    y: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    tokens_per_expert: jax.Array,
    *,
    y_spec: PartitionSpec | None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    operands = (y, weights, group_sizes, tokens_per_expert)
    return _scale_at(y_spec, *operands), operands


def _weight_rows_bwd(
    residuals: tuple[jax.Array, ...], d_out: jax.Array, *, y_spec: PartitionSpec | None
) -> tuple[jax.Array, jax.Array, None, None]:
    y, weights, *counts = residuals
    specs = (y_spec, y_spec, None, None)
    d_weights = _weights_grad_op(y, d_out, *counts, operand_specs=specs)
    return _scale_at(y_spec, d_out, weights, *counts), d_weights, None, None


_weight_rows = differentiable(_weight_rows_fwd, _weight_rows_bwd)
