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
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.gemm import (
    add_bias_op,
    bias_grad_op,
    bias_spec,
    gemm,
    gemm_dgrad_op,
    gemm_op,
    gemm_wgrad_op,
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
from expertmesh.core.operands import FLOATS, check_arrays, check_out_dtype
from expertmesh.core.ops.delayed_scaling import quantize_delayed
from expertmesh.core.ops.quantize import quantize
from expertmesh.core.recipe import Recipe, current_recipe, recipe_of
from expertmesh.core.specs import pad_spec, spec_axes
from expertmesh.core.support import warn_if_emulated
from expertmesh.core.vjp import at_rest, differentiable

__all__ = ["dense"]


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    recipe: Recipe | str | None = None,
    state: DenseState | None = None,
    key: jax.Array | None = None,
    kernel_quantized: QuantizedKernel | None = None,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
) -> Any:  # an array; with a state (array, state)
    """`jax.lax.dot_general(x, kernel, (contracting_dims, ((), ()))) + bias`, in the formats of a recipe.

    Args:
      x: float[..., *K].
      kernel: float[*K, *N].
      bias: float[*N] or None.
      contracting_dims: the last dimensions of `x` and as many first ones of `kernel`, in order; may be negative.
        Several count as one, merged.
      recipe: None: the one in context (`autocast`). Without any, this is `gemm`.
      state: under DelayedScaling: the scales of `x` and `kernel`, and their amax histories.
      key: uint32[2] or typed PRNG key, where the recipe rounds gradients at random; a new one for each step and layer.
      kernel_quantized: `quantize_kernel(kernel, recipe)`; else `kernel` is quantized here. The gradient is that of
        `kernel` either way.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `x`.
      reduce_dtype: in which devices add their parts of the gradient of `kernel`: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `x` and `kernel` are, for Auto axes under a MeshResource; None: tokens over (dp, fsdp, ep),
        `kernel` over fsdp along K.
      out_spec: where the result is wanted.

    Returns:
      [..., *N], accumulated in float32 and rounded once. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: other contracting dimensions, shapes that do not fit; state or key missing, or a history of another
        length; operands that the recipe's GEMMs do not take, such as a contraction that is no multiple of 16 (32 in
        blocks of 32, or in four bits); blocks that a shard would straddle.
      TypeError: an operand is no array of floats.

    Differentiable in `x`, `kernel` and `bias`. Kept for the backward: `x` quantized along the tokens, and `kernel`
    quantized along N, each where it was, under the checkpoint names "quantized_x" and "quantized_kernel". Gradients are
    accumulated in float32 and have the dtype and the layout of their primals.

    Under sharding as `gemm`; each device quantizes its shard of the weight, and data and scales are gathered, anew in
    the backward. Scales of a whole tensor are reduced first, over the axes that shard it.
    """
    recipe = recipe_of(recipe) or current_recipe()
    extra = Extra(state, key, kernel_quantized)
    check_arrays("dense", FLOATS, x=x, kernel=kernel)
    check_arrays("dense", FLOATS, optional=True, bias=bias)
    count = num_contracted("dense", x, kernel, contracting_dims, 0)
    if count > 1:
        x, kernel = (
            x.reshape(*x.shape[:-count], prod(x.shape[-count:])),
            kernel.reshape(prod(kernel.shape[:count]), *kernel.shape[count:]),
        )
        x_spec = _merged_spec("x_spec", x_spec, x.ndim - 1, count)
        w_spec = _merged_spec("w_spec", w_spec, 0, count)
    check_extra("dense", kernel, extra, recipe)
    if recipe is None:
        return gemm(
            x,
            kernel,
            bias,
            out_dtype=out_dtype,
            reduce_dtype=reduce_dtype,
            x_spec=x_spec,
            w_spec=w_spec,
            out_spec=out_spec,
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"dense: bias must be {kernel.shape[1:]}; got bias {bias.shape}; reshape it"
        )
    warn_if_emulated(recipe, x, kernel)
    flat = x.ndim == 1
    if flat:
        x = x[None]
        x_spec, out_spec = (
            None if spec is None else PartitionSpec(None, *spec) for spec in (x_spec, out_spec)
        )
    given = x_spec, w_spec, out_spec
    layer = Layer(
        recipe=recipe,
        out_dtype=check_out_dtype("dense", out_dtype or x.dtype),
        reduce_dtype=check_reduce_dtype("dense", reduce_dtype),
        given=given,
        used=_used(x.ndim, kernel.ndim, *given),
    )
    out = _dense(x, kernel, bias, extra, layer=layer)
    if not flat:
        return out
    return (out[0][0], out[1]) if layer.delayed else out[0]


def _merged_spec(name: str, spec, first: int, count: int):
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


def _used(x_ndim, kernel_ndim, x_spec, w_spec, out_spec):
    resource = current_resource()
    if resource is None:
        return x_spec, w_spec, out_spec
    w = pad_spec((resource.entry("fsdp"),) if w_spec is None else w_spec, kernel_ndim)
    roles = [resource.entry(role) for role in ("tokens", "sequence")]
    tokens = pad_spec(roles[: x_ndim - 1], x_ndim - 1)
    return specs_in_use(tokens, w, 0, x_spec, out_spec)


def _forward(x, kernel, bias, extra: Extra, layer: Layer):
    """(what the layer returns, x and the kernel quantized along K)."""
    x_spec, w_spec, out_spec = layer.used
    state, w_state = extra.state, extra.state.kernel if extra.state is not None else None
    if state is None or layer.delayed is None:
        q_x, x_state = quantize(x, layer.formats.x, axis=x.ndim - 1, spec=x_spec), None
    else:
        q_x, x_state = quantize_delayed(x, state.x, layer.delayed, spec=x_spec)
    if extra.kernel_quantized is None:
        q_kernel, w_state = forward_copy(kernel, layer.recipe, 0, w_state, w_spec)
    else:
        q_kernel = extra.kernel_quantized.forward
    y = multiply(
        gemm_op,
        "gemm",
        (q_x, q_x.ndim - 1),
        (q_kernel, 0),
        specs=(x_spec, w_spec),
        out_dtype=layer.out_dtype,
        result_specs=(layer.given[2],),
    )
    if bias is not None:
        y = add_bias_op(y, bias, operand_specs=(out_spec, bias_spec(w_spec)))
    if x_state is None or w_state is None:
        return y, q_x, q_kernel
    return (y, DenseState(x_state, w_state)), q_x, q_kernel


def _value(x, kernel, bias, extra, *, layer):
    return _forward(x, kernel, bias, extra, layer)[0]


def _fwd(x, kernel, bias, extra, *, layer: Layer):
    out, q_x, q_kernel = _forward(x, kernel, bias, extra, layer)
    if not layer.x_is_quantized_once:
        q_x = quantize(x, layer.formats.x_wgrad, axis=x.ndim - 2, spec=layer.used[0])
    if extra.kernel_quantized is not None:
        q_kernel = extra.kernel_quantized.for_dgrad()
    elif not serves_both(layer.formats):
        q_kernel = dgrad_copy(kernel, layer.recipe, 0, layer.used[1])
    return out, (*residuals(q_x, q_kernel), bias, extra.key)


def _bwd(carried, cotangent, *, layer: Layer):
    q_x, q_kernel, bias, key = carried
    x_spec, w_spec, out_spec = layer.used
    dy = cotangent[0] if layer.delayed else cotangent
    dy_n, dy_t = _dy_copies(dy, q_x.ndim - 2, layer, key)
    q_kernel, dy_n = after(q_kernel, dy_n)
    dx = multiply(
        gemm_dgrad_op,
        "gemm's input gradient",
        (dy_n, dy_n.ndim - 1),
        (q_kernel, q_kernel.ndim - 1),
        specs=(out_spec, w_spec),
        out_dtype=jnp.dtype(q_x.dtype),
        result_specs=(at_rest(q_x.data, layer.given[0]),),
    )
    dw = multiply(
        gemm_wgrad_op,
        "gemm's weight gradient",
        (q_x, q_x.ndim - 2),
        (dy_t, q_x.ndim - 2),
        multiple=False,
        specs=(x_spec, out_spec),
        out_dtype=jnp.dtype(q_kernel.dtype),
        result_specs=(at_rest(q_kernel.data, layer.given[1]),),
        reduce_dtype=layer.reduce_dtype,
    )
    if bias is None:
        return dx, dw, None, None
    db = bias_grad_op(
        dy,
        bias,
        out_dtype=bias.dtype,
        operand_specs=(out_spec, bias_spec(w_spec)),
        result_specs=(at_rest(bias, bias_spec(w_spec)),),
    )
    return dx, dw, db, None


def _dy_copies(dy, tokens: int, layer: Layer, key):
    """dy quantized along the last of N and along the last token dimension, `tokens`."""
    formats, keys, spec = layer.formats, gradient_keys("dense", layer, key), layer.used[2]
    along_n = quantize(dy, formats.grad_dgrad, axis=dy.ndim - 1, key=keys[0], spec=spec)
    if layer.dy_is_quantized_once:
        return along_n, along_n
    return along_n, quantize(dy, formats.grad_wgrad, axis=tokens, key=keys[1], spec=spec)


_dense = differentiable(_fwd, _bwd, _value)
