"""A dense layer per group of rows: the three grouped GEMMs of experts in the formats of a recipe.

    y[p, r]  = x[p, r] @ w[e] + bias[e]              x and w quantized along K; e = expert of the row's group
    dx[p, r] = dy[p, r] @ w[e]^T                     dy and w quantized along N
    dw[e]    = sum of x[p, r]^T dy[p, r] over its rows      x and dy quantized along the rows
    dbias[e] = sum of dy[p, r] over its rows         not quantized

Groups, participants and experts as in grouped_gemm. Dimension key: P participants, C rows per participant, K
contraction, N output dimensions (any number), E experts, G groups per participant.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.mesh import current_resource, filter_roles
from expertmesh.core.ops.delayed_scaling import grouped_quantize_delayed
from expertmesh.core.ops.dense import (
    DenseState,
    QuantizedKernel,
    after,
    at_rest,
    check_cache,
    check_state,
    contracted,
    gradient_keys,
    in_use,
    keep,
    kernel_copies,
    raw_key,
    serves_both_ways,
)
from expertmesh.core.ops.grouped_gemm import (
    check_operands,
    group_bias_grad_op,
    group_bias_op,
    grouped_gemm,
)
from expertmesh.core.ops.grouped_quantize import grouped_quantize
from expertmesh.core.ops.quantized_grouped_gemm import (
    quantized_grouped_gemm,
    quantized_grouped_gemm_dgrad,
    quantized_grouped_gemm_wgrad,
)
from expertmesh.core.recipe import DelayedScaling, Recipe, current_recipe, recipe_of
from expertmesh.core.specs import pad_spec
from expertmesh.core.support import warn_if_emulated
from expertmesh.core.vjp import differentiable

__all__ = ["grouped_dense"]


def grouped_dense(
    x,
    kernel,
    group_sizes,
    bias=None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (1,)),
    recipe: Recipe | None = None,
    state: DenseState | None = None,
    key=None,
    kernel_quantized: QuantizedKernel | None = None,
    out_dtype=None,
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
    debug: bool = False,
):
    """Multiplies each group of rows with the kernel of its expert, in the formats of a recipe.

    Args:
      x: float[P, C, K], or [C, K] with one-dimensional `group_sizes` (P = 1).
      kernel: float[E, K, *N].
      group_sizes: int32[P, G], rows of each group (see `grouped_gemm`). In block formats the groups' first rows must be
        multiples of the block: pad each group's size to one.
      bias: float[E, *N] or None; added to the rows of the groups only.
      contracting_dims: the last dimension of `x` and the one after E of `kernel`; may be negative.
      recipe: None: the one in context (`autocast`). Without any, this is `grouped_gemm`.
      state: under DelayedScaling: `init_dense_state(recipe, num_experts=E)`; one scale for all rows, one per expert.
      key: uint32[2] or typed PRNG key, where the recipe rounds gradients at random; a new one for each step and layer.
      kernel_quantized: `quantize_kernel(kernel, recipe, batch_dims=1)`; else `kernel` is quantized here. The gradient
        is that of `kernel` either way.
      out_dtype: dtype of the result; None: that of `x`.
      x_spec, w_spec: where `x` and `kernel` are, for Auto axes under a MeshResource; None: P over (dp, fsdp, ep),
        P(ep, fsdp).
      out_spec: where the result is wanted.
      debug: under `jax.experimental.checkify.checkify`, bad group sizes are errors (see `grouped_gemm`).

    Returns:
      [P, C, *N] (or [C, *N]), accumulated in float32 and rounded once; rows after the last group are zeros, whatever
      `x` holds there. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: as `grouped_gemm` and `dense`.
      TypeError: `group_sizes` are not integers.

    Differentiable in `x`, `kernel` and `bias`; empty groups have gradients of exact zeros, rows after the last group
    too. Kept for the backward as by `dense`.

    Under sharding as `grouped_gemm`; each device quantizes its shard of the kernel, and data and scales are gathered,
    anew in the backward. Scales of a whole tensor (one per expert, one per group) are reduced first, over the axes that
    shard it.
    """
    recipe = recipe_of(recipe) or current_recipe()
    check_state("grouped_dense", recipe, state)
    if contracted("grouped_dense", x, kernel, contracting_dims, 1) > 1:
        raise ValueError(
            f"grouped_dense: one dimension must be contracted; got contracting_dims={contracting_dims}; reshape x and "
            "kernel"
        )
    flat = x.ndim == 2
    if recipe is None:
        return grouped_gemm(
            x,
            kernel,
            group_sizes,
            bias,
            out_dtype=out_dtype,
            lhs_spec=x_spec,
            rhs_spec=w_spec,
            out_spec=out_spec,
            debug=debug,
        )
    check_operands("grouped_dense", x, kernel, group_sizes, bias, debug=debug)
    warn_if_emulated(recipe, x, kernel)
    check_cache("grouped_dense", kernel, kernel_quantized, recipe)
    if flat:
        x, group_sizes = x[None], group_sizes[None]
        x_spec, out_spec = (
            None if spec is None else PartitionSpec(None, *spec) for spec in (x_spec, out_spec)
        )
    out = _grouped_dense(
        x,
        kernel,
        group_sizes,
        bias,
        state,
        raw_key(key),
        kernel_quantized,
        recipe=recipe,
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        specs=specs_in_use(kernel.ndim, x_spec, w_spec, out_spec),
        x_spec=x_spec,
        w_spec=w_spec,
        out_spec=out_spec,
    )
    if not flat:
        return out
    return out[0] if state is None else (out[0][0], out[1])


def specs_in_use(kernel_ndim, x_spec, w_spec, out_spec):
    """Where x, the kernel and the result are in use over Auto axes under a MeshResource; else None for each."""
    resource = current_resource()
    if resource is None:
        return x_spec, w_spec, out_spec
    roles = map(resource.entry, ("experts", "fsdp"))
    w = pad_spec(tuple(roles) if w_spec is None else w_spec, kernel_ndim)
    return in_use(pad_spec((resource.entry("tokens"),), 2), w, 1, x_spec, out_spec)


def _grouped_dense_fwd(
    x, kernel, group_sizes, bias, state, key, cached, *, recipe, out_dtype, specs, **given
):
    q_x, q_x_wgrad, x_state = _x_copies(x, group_sizes, recipe, state, specs[0])
    kernel_state = state and state.kernel
    if cached is None:
        cached, kernel_state = kernel_copies(kernel, recipe, 1, kernel_state, specs[1])
    y, residuals = multiply_rows(
        (q_x, q_x_wgrad),
        cached,
        group_sizes,
        bias,
        key,
        out_dtype=out_dtype,
        specs=specs,
        out_spec=given["out_spec"],
    )
    return y if state is None else (y, DenseState(x_state, kernel_state)), residuals


def multiply_rows(
    x_copies, kernel, group_sizes, bias, key=None, *, out_dtype, specs, out_spec=None
):
    """The layer from quantized operands on, and the residuals of `multiply_rows_bwd`.

    Args:
      x_copies: x [P, C, K] quantized along K, and along the rows.
      kernel: QuantizedKernel.
      specs: of `specs_in_use`.
    """
    q_x, q_x_wgrad = x_copies
    y = quantized_grouped_gemm(
        q_x,
        kernel.forward,
        group_sizes,
        out_dtype=out_dtype,
        specs=specs[:2],
        out_spec=out_spec,
    )
    if bias is not None:
        bias_specs = (specs[2], _bias_spec(specs[1]), None)
        y = group_bias_op(y, bias, group_sizes, operand_specs=bias_specs)
    saved = keep(q_x_wgrad, "quantized_x"), keep(kernel.for_dgrad(), "quantized_kernel")
    return y, (*saved, group_sizes, bias, key)


def _x_copies(x, group_sizes, recipe, state, spec):
    """x quantized along K and along the rows, and the new state."""
    formats = recipe.formats()
    if state is not None:
        q, state = grouped_quantize_delayed(x, group_sizes, state.x, recipe, spec=spec)
        return q, q, state
    q = grouped_quantize(x, group_sizes, formats.x, axis=2, spec=spec)
    if formats.x == formats.x_wgrad and serves_both_ways(formats.x):
        return q, q, None
    return q, grouped_quantize(x, group_sizes, formats.x_wgrad, axis=1, spec=spec), None


def _grouped_dense_bwd(residuals, cotangent, *, recipe, out_dtype, specs, x_spec, w_spec, out_spec):
    del out_dtype, out_spec
    dy = cotangent[0] if isinstance(recipe, DelayedScaling) else cotangent
    dx, dw, db = multiply_rows_bwd(
        residuals, dy, recipe=recipe, specs=specs, x_spec=x_spec, w_spec=w_spec
    )
    return dx, dw, None, db, None, None, None


def multiply_rows_bwd(residuals, dy, *, recipe, specs, x_spec, w_spec):
    """Gradients of x, of the kernel and of the bias."""
    q_x, q_kernel, group_sizes, bias, key = residuals
    dy_dgrad, dy_wgrad = _dy_copies(dy, group_sizes, recipe, key, specs[2])
    q_kernel, dy_dgrad = after(q_kernel, dy_dgrad)
    dx = quantized_grouped_gemm_dgrad(
        dy_dgrad,
        q_kernel,
        group_sizes,
        out_dtype=q_x.dtype,
        specs=(specs[2], specs[1]),
        out_spec=at_rest(q_x, x_spec),
    )
    dw = quantized_grouped_gemm_wgrad(
        q_x,
        dy_wgrad,
        group_sizes,
        num_experts=q_kernel.shape[0],
        out_dtype=q_kernel.dtype,
        specs=(specs[0], specs[2]),
        out_spec=at_rest(q_kernel, w_spec),
    )
    db = None
    if bias is not None:
        bias_spec = _bias_spec(specs[1])
        db = group_bias_grad_op(
            dy,
            group_sizes,
            num_experts=q_kernel.shape[0],
            out_dtype=bias.dtype,
            operand_specs=(specs[2], None),
            result_specs=(_jax.explicit_spec(bias) if bias_spec is None else bias_spec,),
        )
    return dx, dw, db


def _dy_copies(dy, group_sizes, recipe, key, spec):
    """dy quantized along N and along the rows."""
    formats, keys = recipe.formats(), gradient_keys("grouped_dense", recipe, key)
    along_n = grouped_quantize(
        dy, group_sizes, formats.grad_dgrad, axis=dy.ndim - 1, key=keys[0], spec=spec
    )
    if formats.grad_dgrad == formats.grad_wgrad and serves_both_ways(formats.grad_dgrad):
        return along_n, along_n
    along_rows = grouped_quantize(
        dy, group_sizes, formats.grad_wgrad, axis=1, key=keys[1], spec=spec
    )
    return along_n, along_rows


def _bias_spec(w_spec):
    """Of a kernel's bias in use, whose dimensions are those of the kernel without K."""
    return None if w_spec is None else filter_roles((*w_spec[:1], *w_spec[2:]), "experts", "tp")


_grouped_dense = differentiable(_grouped_dense_fwd, _grouped_dense_bwd)
