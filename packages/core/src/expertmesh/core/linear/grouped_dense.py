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

from expertmesh.core.linear.grouped_gemm import (
    bias_spec,
    check_operands,
    group_bias_grad_op,
    group_bias_op,
    grouped_gemm,
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
    with_participant,
)
from expertmesh.core.linear.layer import (
    DenseState,
    Extra,
    Layer,
    after,
    check_extra,
    gradient_keys,
    num_contracted,
    residuals,
    specs_in_use,
)
from expertmesh.core.linear.pair import multiply
from expertmesh.core.linear.quantize_kernel import (
    QuantizedKernel,
    dgrad_copy,
    forward_copy,
    serves_both,
)
from expertmesh.core.mesh import current_resource
from expertmesh.core.op import check_reduce_dtype
from expertmesh.core.operands import FLOATS, INTEGERS, check_arrays, check_out_dtype
from expertmesh.core.ops.delayed_scaling import grouped_quantize_delayed_both
from expertmesh.core.ops.grouped_quantize import (
    check_starts,
    grouped_quantize,
    grouped_quantize_both,
)
from expertmesh.core.recipe import Recipe, alignment_of, current_recipe, recipe_of
from expertmesh.core.specs import pad_spec
from expertmesh.core.support import warn_if_emulated
from expertmesh.core.vjp import at_rest, differentiable

__all__ = ["grouped_dense"]


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (1,)),
    recipe: Recipe | str | None = None,
    state: DenseState | None = None,
    key: jax.Array | None = None,
    kernel_quantized: QuantizedKernel | None = None,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
    zero_rest: bool = True,
    debug: bool = False,
) -> Any:
    """Multiplies each group of rows with the kernel of its expert, in the formats of a recipe.

    Args:
      x: float[P, C, K], or [C, K] with one-dimensional `group_sizes` (P = 1).
      kernel: float[E, K, *N].
      group_sizes: int32[P, G], rows of each group (see `grouped_gemm`). The groups' first rows must be multiples of
        `alignment_of(recipe)`, as those of `plan_permute(..., alignment=)` are.
      bias: float[E, *N] or None; added to the rows of the groups only.
      contracting_dims: the last dimension of `x` and the one after E of `kernel`; may be negative.
      recipe: None: the one in context (`autocast`). Without any, this is `grouped_gemm`.
      state: under DelayedScaling: `init_dense_state(recipe, num_experts=E)`; one scale for all rows, one per expert.
      key: uint32[2] or typed PRNG key, where the recipe rounds gradients at random; a new one for each step and layer.
      kernel_quantized: `quantize_kernel(kernel, recipe, batch_dims=1)`; else `kernel` is quantized here. The gradient
        is that of `kernel` either way.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `x`.
      reduce_dtype: in which devices add their parts of the gradient of `kernel`: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `x` and `kernel` are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep),
        P(ep, fsdp).
      out_spec: where the result is wanted.
      zero_rest: False if nobody reads the rows after the last group (see `grouped_gemm`).
      debug: under `jax.experimental.checkify.checkify`, bad group sizes are errors (see `grouped_gemm`), and groups
        that do not start at multiples of `alignment_of(recipe)`.

    Returns:
      [P, C, *N] (or [C, *N]), accumulated in float32 and rounded once; rows after the last group are zeros, whatever
      `x` holds there. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: as `grouped_gemm` and `dense`.
      TypeError: as `grouped_gemm`.

    Differentiable in `x`, `kernel` and `bias`; empty groups have gradients of exact zeros, rows after the last group
    too. Kept for the backward as by `dense`.

    Under sharding as `grouped_gemm`; each device quantizes its shard of the kernel, and data and scales are gathered,
    anew in the backward. Scales of a whole tensor (one per expert, one per group) are reduced first, over the axes that
    shard it.
    """
    recipe = recipe_of(recipe) or current_recipe()
    extra = Extra(state, key, kernel_quantized)
    check_arrays("grouped_dense", FLOATS, x=x, kernel=kernel)
    check_arrays("grouped_dense", FLOATS, optional=True, bias=bias)
    check_arrays("grouped_dense", INTEGERS, group_sizes=group_sizes)
    if num_contracted("grouped_dense", x, kernel, contracting_dims, 1) > 1:
        raise ValueError(
            f"grouped_dense: one dimension must be contracted; got contracting_dims={contracting_dims}; reshape x and "
            "kernel"
        )
    check_extra("grouped_dense", kernel, extra, recipe)
    if recipe is None:
        return grouped_gemm(
            x,
            kernel,
            group_sizes,
            bias,
            out_dtype=out_dtype,
            reduce_dtype=reduce_dtype,
            lhs_spec=x_spec,
            rhs_spec=w_spec,
            out_spec=out_spec,
            zero_rest=zero_rest,
            debug=debug,
        )
    check_operands("grouped_dense", x, kernel, group_sizes, bias, debug=debug)
    warn_if_emulated(recipe, x, kernel)
    flat = x.ndim == 2
    if flat:
        x, group_sizes = x[None], group_sizes[None]
        x_spec, out_spec = with_participant(x_spec), with_participant(out_spec)
    if debug:
        check_starts("grouped_dense", group_sizes, alignment_of(recipe))
    given = x_spec, w_spec, out_spec
    layer = Layer(
        recipe=recipe,
        out_dtype=check_out_dtype("grouped_dense", out_dtype or x.dtype),
        reduce_dtype=check_reduce_dtype("grouped_dense", reduce_dtype),
        given=given,
        used=used_specs(kernel.ndim, *given),
        zero_rest=zero_rest,
    )
    out = _grouped_dense(x, kernel, group_sizes, bias, extra, layer=layer)
    if not flat:
        return out
    return (out[0][0], out[1]) if layer.delayed else out[0]


def used_specs(kernel_ndim, x_spec, w_spec, out_spec):
    """The layer's `used`."""
    resource = current_resource()
    if resource is None:
        return x_spec, w_spec, out_spec
    roles = map(resource.entry, ("experts", "fsdp"))
    w = pad_spec(tuple(roles) if w_spec is None else w_spec, kernel_ndim)
    return specs_in_use(pad_spec((resource.entry("participants"),), 2), w, 1, x_spec, out_spec)


def _x_copies(x, group_sizes, extra: Extra, layer: Layer, *, for_wgrad: bool):
    """(x along K, x along the rows if `for_wgrad`, the state of x after it or None)."""
    of, spec = (x, group_sizes), layer.used[0]
    if extra.state is not None and layer.delayed is not None:
        state = extra.state.x, layer.delayed
        return grouped_quantize_delayed_both(*of, *state, spec=spec, twice=for_wgrad)
    if not for_wgrad:
        q_x = grouped_quantize(*of, layer.formats.x, axis=2, spec=spec)
        return q_x, q_x, None
    both = layer.formats.x, layer.formats.x_wgrad
    return *grouped_quantize_both(*of, both, spec=spec), None


def _forward(q_x, x_state, kernel, group_sizes, bias, extra: Extra, layer: Layer):
    """(what the layer returns, the kernel quantized along K), of x quantized along K."""
    w_state = extra.state.kernel if extra.state is not None else None
    if extra.kernel_quantized is None:
        q_kernel, w_state = forward_copy(kernel, layer.recipe, 1, w_state, layer.used[1])
    else:
        q_kernel = extra.kernel_quantized.forward
    y = product(q_x, q_kernel, group_sizes, bias, layer)
    if x_state is None or w_state is None:
        return y, q_kernel
    return (y, DenseState(x_state, w_state)), q_kernel


def product(q_x, q_kernel, group_sizes, bias, layer: Layer):
    """The forward's product, and the bias."""
    x_spec, w_spec, out_spec = layer.used
    y = multiply(
        grouped_gemm_op,
        "grouped_gemm",
        (q_x, 2),
        (q_kernel, 1),
        group_sizes,
        specs=(x_spec, w_spec),
        out_dtype=layer.out_dtype,
        result_specs=(layer.given[2],),
        zero_rest=layer.zero_rest,
    )
    if bias is None:
        return y
    return group_bias_op(y, bias, group_sizes, operand_specs=(out_spec, bias_spec(w_spec), None))


def _value(x, kernel, group_sizes, bias, extra, *, layer):
    q_x, _, x_state = _x_copies(x, group_sizes, extra, layer, for_wgrad=False)
    return _forward(q_x, x_state, kernel, group_sizes, bias, extra, layer)[0]


def _fwd(x, kernel, group_sizes, bias, extra, *, layer: Layer):
    q_x, along_rows, x_state = _x_copies(x, group_sizes, extra, layer, for_wgrad=True)
    out, q_kernel = _forward(q_x, x_state, kernel, group_sizes, bias, extra, layer)
    q_kernel = kernel_for_dgrad(kernel, q_kernel, extra, layer)
    return out, (*residuals(along_rows, q_kernel), group_sizes, bias, extra.key)


def stateless_layer(
    name: str, x, kernel, extra: Extra, recipe, w_spec, reduce_dtype, zero_rest=True
) -> Layer:
    """The layer of a recipe without state that multiplies x by experts, after the errors in the name of `name`."""
    check_extra(name, kernel, extra, recipe)
    warn_if_emulated(recipe, x, kernel)
    given = None, w_spec, None
    return Layer(
        recipe=recipe,
        out_dtype=x.dtype,
        reduce_dtype=check_reduce_dtype(name, reduce_dtype),
        given=given,
        used=used_specs(kernel.ndim, *given),
        zero_rest=zero_rest,
    )


def kernel_for_fprop(kernel, extra: Extra, layer: Layer):
    """The copy that the forward of a recipe without state reads."""
    if extra.kernel_quantized is not None:
        return extra.kernel_quantized.forward
    return forward_copy(kernel, layer.recipe, 1, None, layer.used[1])[0]


def kernel_for_dgrad(kernel, forward, extra: Extra, layer: Layer):
    """The copy that the backward reads."""
    if extra.kernel_quantized is not None:
        return extra.kernel_quantized.for_dgrad()
    if serves_both(layer.formats):
        return forward
    return dgrad_copy(kernel, layer.recipe, 1, layer.used[1])


def grouped_dense_bwd(carried, cotangent, *, layer: Layer):
    """The cotangents of x, the kernel, the group sizes (None), the bias and the rest (None).

    Args:
      carried: x and the kernel as `residuals` names them, the group sizes, the bias, the key.
    """
    q_x, q_kernel, group_sizes, bias, key = carried
    w_spec, out_spec = layer.used[1:]
    dy = cotangent[0] if layer.delayed else cotangent
    copies = _dy_copies(dy, group_sizes, layer, key)
    dx, dw = product_grads(q_x, q_kernel, group_sizes, copies, layer)
    if bias is None:
        return dx, dw, None, None, None
    db = group_bias_grad_op(
        dy,
        group_sizes,
        num_experts=q_kernel.shape[0],
        out_dtype=bias.dtype,
        operand_specs=(out_spec, None),
        result_specs=(at_rest(bias, bias_spec(w_spec)),),
    )
    return dx, dw, None, db, None


def product_grads(q_x, q_kernel, group_sizes, dy_copies, layer: Layer):
    """The cotangents of x and the kernel.

    Args:
      dy_copies: dy quantized along the last of N and along the rows.
    """
    x_spec, w_spec, out_spec = layer.used
    dy_n, dy_t = dy_copies
    q_kernel, dy_n = after(q_kernel, dy_n)
    dx = multiply(
        grouped_gemm_dgrad_op,
        "grouped_gemm's input gradient",
        (dy_n, dy_n.ndim - 1),
        (q_kernel, q_kernel.ndim - 1),
        group_sizes,
        specs=(out_spec, w_spec),
        out_dtype=jnp.dtype(q_x.dtype),
        result_specs=(at_rest(q_x.data, layer.given[0]),),
        zero_rest=layer.zero_rest,
    )
    dw = multiply(
        grouped_gemm_wgrad_op,
        "grouped_gemm's weight gradient",
        (q_x, 1),
        (dy_t, 1),
        group_sizes,
        multiple=False,
        specs=(x_spec, out_spec),
        num_experts=q_kernel.shape[0],
        out_dtype=jnp.dtype(q_kernel.dtype),
        result_specs=(at_rest(q_kernel.data, layer.given[1]),),
        reduce_dtype=layer.reduce_dtype,
    )
    return dx, dw


def _dy_copies(dy, group_sizes, layer: Layer, key):
    """dy quantized along the last of N and along the rows."""
    formats, keys = layer.formats, gradient_keys("grouped_dense", layer, key)
    both = formats.grad_dgrad, formats.grad_wgrad
    return grouped_quantize_both(dy, group_sizes, both, keys=keys, spec=layer.used[2])


_grouped_dense = differentiable(_fwd, grouped_dense_bwd, _value)
