"""A dense layer per group of rows: the three grouped GEMMs of experts in the formats of a recipe.

    y[p, r]  = x[p, r] @ w[e] + bias[e]              x and w quantized along K; e = expert of the row's group
    dx[p, r] = dy[p, r] @ w[e]^T                     dy and w quantized along N
    dw[e]    = sum of x[p, r]^T dy[p, r] over its rows      x and dy quantized along the rows
    dbias[e] = sum of dy[p, r] over its rows         not quantized

Groups, participants and experts as in grouped_gemm. Dimension key: P participants, C rows per participant, K
contraction, N output dimensions (any number), E experts, G groups per participant.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.adapted import Adapted, check_weights
from expertmesh.core.linear.grouped_gemm import apply_grouped, check_operands
from expertmesh.core.linear.layer import DenseState, NonDiffOperands, num_contracted
from expertmesh.core.linear.quantize_weight import QuantizedWeight
from expertmesh.core.operands import FLOATS, check_arrays
from expertmesh.core.quantization.quantize_rows import check_starts
from expertmesh.core.quantization.recipe import (
    Recipe,
    as_recipe,
    current_recipe,
    required_alignment,
)

__all__ = ["grouped_dense"]


def grouped_dense(
    x: jax.Array,
    weight: jax.Array | Adapted,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (1,)),
    recipe: Recipe | str | None = None,
    state: DenseState | None = None,
    key: jax.Array | None = None,
    weight_quantized: QuantizedWeight | None = None,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
    clear_padding: bool = True,
    debug: bool = False,
) -> Any:
    """Multiplies each group of rows with the weight of its expert, in the formats of a recipe.

    Args:
      x: float[P, C, K], or [C, K] with one-dimensional `group_sizes` (P = 1).
      weight: float[E, K, *N], or an `Adapted`, whose weight is frozen.
      group_sizes: int32[P, G], rows of each group (see `grouped_gemm`). The groups' first rows must be multiples of
        `required_alignment(recipe)`, as those of `plan_permute(..., alignment=)` are.
      bias: float[E, *N] or None; added to the rows of the groups only.
      contracting_dims: the last dimension of `x` and the one after E of `weight`; may be negative.
      recipe: None: the one in context (`autocast`). Without any, this is `grouped_gemm`.
      state: under DelayedScaling: `init_dense_state(recipe, num_experts=E)`; one scale for all rows, one per expert.
      key: uint32[2] or typed PRNG key, for a recipe with stochastic rounding; a new one for each step and layer.
      weight_quantized: `quantize_weight(weight, recipe, batch_dims=1)`; else `weight` is quantized here. The gradient
        is that of `weight` either way.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `x`.
      reduce_dtype: the dtype of the reduction of `weight`'s gradient over devices: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `x` and `weight` are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep),
        P(ep, fsdp).
      out_spec: where the result is wanted.
      clear_padding: False if nobody reads padding rows (see `grouped_gemm`).
      debug: under `jax.experimental.checkify.checkify`, bad group sizes are errors (see `grouped_gemm`), and groups
        that do not start at multiples of `required_alignment(recipe)`.

    Returns:
      [P, C, *N] (or [C, *N]), accumulated in float32 and rounded once; padding rows are zeros, whatever `x` holds
      there. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: as `grouped_gemm` and `dense`.
      TypeError: as `grouped_gemm`.

    Differentiable in `x`, `weight` (of an `Adapted` in `a` and `b` alone) and `bias`; empty groups have gradients of
    exact zeros, padding rows too.
    Kept for the backward as by `dense`.

    Under sharding as `grouped_gemm`; each device quantizes its shard of the weight, and data and scales are gathered,
    anew in the backward. Scales of a whole tensor (one per expert, one per group) are reduced first, over the axes that
    shard it.
    """
    recipe = as_recipe(recipe) or current_recipe()
    extra = NonDiffOperands(state, key, weight_quantized)
    check_arrays("grouped_dense", FLOATS, x=x)
    check_weights("grouped_dense", weight=weight)
    if num_contracted("grouped_dense", x, weight, contracting_dims, 1) > 1:
        raise ValueError(
            f"grouped_dense: one dimension must be contracted; got contracting_dims={contracting_dims}; reshape x and "
            "weight"
        )
    check_operands("grouped_dense", x, weight, group_sizes, bias, debug=debug)
    if debug and recipe is not None:
        check_starts("grouped_dense", jnp.atleast_2d(group_sizes), required_alignment(recipe))
    return apply_grouped(
        "grouped_dense",
        x,
        weight,
        group_sizes,
        bias,
        extra,
        recipe,
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
        specs=(x_spec, w_spec, out_spec),
        clear_padding=clear_padding,
    )
