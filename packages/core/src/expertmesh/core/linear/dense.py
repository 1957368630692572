"""A dense layer: its three GEMMs in the formats of a recipe.

    y[t, n]  = sum_k x[t, k] w[k, n] + bias[n]      x and w quantized along k
    dx[t, k] = sum_n dy[t, n] w[k, n]               dy and w quantized along n
    dw[k, n] = sum_t x[t, k] dy[t, n]               x and dy quantized along t
    dbias[n] = sum_t dy[t, n]                       not quantized

Dimension key: t token dimensions (any number), k contraction, n output dimensions (any number).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.adapted import Adapted, check_weights
from expertmesh.core.linear.apply import apply_linear, layer_of
from expertmesh.core.linear.gemm import DENSE, check_operands
from expertmesh.core.linear.layer import DenseState, NonDiffOperands, num_contracted
from expertmesh.core.linear.quantize_weight import QuantizedWeight
from expertmesh.core.operands import FLOATS, check_arrays
from expertmesh.core.quantization.recipe import Recipe, as_recipe, current_recipe
from expertmesh.core.specs import spec_axes

__all__ = ["dense"]


def dense(
    x: jax.Array,
    weight: jax.Array | Adapted,
    bias: jax.Array | None = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    recipe: Recipe | str | None = None,
    state: DenseState | None = None,
    key: jax.Array | None = None,
    weight_quantized: QuantizedWeight | None = None,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
) -> Any:  # an array; with a state (array, state)
    """`jax.lax.dot_general(x, weight, (contracting_dims, ((), ()))) + bias`, in the formats of a recipe.

    Args:
      x: float[..., *K].
      weight: float[*K, *N]; or an `Adapted`, whose weight is frozen and then has one dimension of K.
      bias: float[*N] or None.
      contracting_dims: the last dimensions of `x` and as many first ones of `weight`, in order; may be negative.
        Several count as one, merged.
      recipe: None: the one in context (`autocast`). Without any, this is `gemm`.
      state: under DelayedScaling: the scales of `x` and `weight`, and their amax histories.
      key: uint32[2] or typed PRNG key, for a recipe with stochastic rounding; a new one for each step and layer.
      weight_quantized: `quantize_weight(weight, recipe)`, of a weight whose contracted dimensions are merged, [K, *N];
        else `weight` is quantized here. The gradient is that of `weight` either way.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `x`.
      reduce_dtype: the dtype of the reduction of `weight`'s gradient over devices: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `x` and `weight` are, for Auto axes under a MeshResource; None: tokens over (dp, fsdp, ep),
        `weight` over fsdp along K.
      out_spec: where the result is wanted.

    Returns:
      [..., *N], accumulated in float32 and rounded once. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: other contracting dimensions, shapes that do not fit; state or key missing, or a history of another
        length; operands that the recipe's GEMMs do not take, such as a contraction that is no multiple of 16 (32 in
        blocks of 32, or in four bits); blocks that a shard would straddle.
      TypeError: an operand is no array of floats.

    Differentiable in `x`, `weight` (of an `Adapted` in `a` and `b` alone) and `bias`. Kept for the backward: `x`
    quantized along the tokens, and `weight` quantized along N, each where it was, under the checkpoint names
    "quantized_x" and "quantized_weight". Gradients are accumulated in float32 and have the dtype and the layout of
    their primals.

    Under sharding as `gemm`; each device quantizes its shard of the weight, and data and scales are gathered, anew in
    the backward. Scales of a whole tensor are reduced first, over the axes that shard it.
    """
    recipe = as_recipe(recipe) or current_recipe()
    extra = NonDiffOperands(state, key, weight_quantized)
    check_arrays("dense", FLOATS, x=x)
    check_weights("dense", weight=weight)
    count = num_contracted("dense", x, weight, contracting_dims, 0)
    if count > 1:
        if isinstance(weight, Adapted):
            raise ValueError(
                f"dense: an Adapted must have one dimension of K; got {count} contracted ones of {weight.shape}; "
                "reshape its weight and a"
            )
        x, weight = (
            x.reshape(*x.shape[:-count], prod(x.shape[-count:])),
            weight.reshape(prod(weight.shape[:count]), *weight.shape[count:]),
        )
        x_spec = _merged_spec("x_spec", x_spec, x.ndim - 1, count)
        w_spec = _merged_spec("w_spec", w_spec, 0, count)
    check_operands("dense", x, weight, bias)
    flat = recipe is not None and x.ndim == 1
    if flat:
        x = x[None]
        x_spec, out_spec = (
            None if spec is None else PartitionSpec(None, *spec) for spec in (x_spec, out_spec)
        )
    layer = layer_of(
        "dense",
        DENSE,
        x,
        weight,
        extra,
        recipe,
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
        specs=(x_spec, w_spec, out_spec),
    )
    return apply_linear(layer, x, weight, None, bias, extra, flat=flat)


def _merged_spec(
    name: str, spec: PartitionSpec | None, first: int, count: int
) -> PartitionSpec | None:
    """The spec of an array whose dimensions from `first` on have become one."""
    if spec is None:
        return None
    entries = [*spec, *[None] * (first + count - len(spec))]
    if spec_axes(entries[first + 1 : first + count]):
        raise ValueError(
            f"dense: of several contracted dimensions only the first may be sharded; got {name}={spec}; "
            "shard the first"
        )
    return PartitionSpec(*entries[: first + 1], *entries[first + count :])
