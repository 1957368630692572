"""A dense layer: its three GEMMs in the formats of a recipe.

    y[t, n]  = sum_k x[t, k] w[k, n] + bias[n]      x and w quantized along k
    dx[t, k] = sum_n dy[t, n] w[k, n]               dy and w quantized along n
    dw[k, n] = sum_t x[t, k] dy[t, n]               x and dy quantized along t
    dbias[n] = sum_t dy[t, n]                       not quantized

Dimension key: t token dimensions (any number), k contraction, n output dimensions (any number).
"""

import dataclasses
from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.mesh import current_resource, filter_roles
from expertmesh.core.ops.delayed_scaling import DelayedState, init_delayed, quantize_delayed
from expertmesh.core.ops.gemm import add_bias_op, bias_grad_op, gemm
from expertmesh.core.ops.quantize import quantize
from expertmesh.core.ops.quantized_gemm import (
    quantized_gemm,
    quantized_gemm_dgrad,
    quantized_gemm_wgrad,
)
from expertmesh.core.quantized import QuantizedArray
from expertmesh.core.recipe import DelayedScaling, Recipe, TensorFormat, current_recipe, recipe_of
from expertmesh.core.specs import pad_spec, spec_axes, strip_axes
from expertmesh.core.support import warn_if_emulated
from expertmesh.core.vjp import differentiable

__all__ = ["DenseState", "QuantizedKernel", "dense", "init_dense_state", "quantize_kernel"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """What the forward and the input gradient read of a weight.

    Attributes:
      forward: quantized along K.
      dgrad: quantized along N; None where `forward` serves both: one scale per tensor, or square blocks.
    """

    forward: QuantizedArray
    dgrad: QuantizedArray | None = None

    def for_dgrad(self) -> QuantizedArray:
        return self.forward if self.dgrad is None else self.dgrad


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of a layer under DelayedScaling: a value, carried from step to step.

    Attributes:
      x, kernel: DelayedState of each.
    """

    x: DelayedState
    kernel: DelayedState


def init_dense_state(recipe: DelayedScaling, *, num_experts: int | None = None) -> DenseState:
    """The state of a layer that has seen nothing: multipliers of 1.

    Args:
      recipe: says how long the histories are.
      num_experts: E, of a `grouped_dense`, whose kernel has one scale per expert; None for `dense`.
    """
    experts = () if num_experts is None else (num_experts,)
    return DenseState(init_delayed(recipe), init_delayed(recipe, experts))


def quantize_kernel(
    kernel,
    recipe: Recipe | None = None,
    *,
    batch_dims: int = 0,
    state: DelayedState | None = None,
    spec: PartitionSpec | None = None,
):
    """Quantizes a weight once for all calls of a layer in which it does not change, such as a step's microbatches.

    Args:
      kernel: float[K, *N] of `dense`, or float[E, K, *N] with `batch_dims=1` of `grouped_dense`.
      recipe: of the layer; None: the one in context.
      batch_dims: leading dimensions whose elements have scales of their own.
      state: of the kernel, under DelayedScaling; with E entries where `batch_dims=1`.
      spec: where `kernel` is over Auto axes under a MeshResource; None: fsdp along K, ep along E.

    Returns:
      QuantizedKernel, for `kernel_quantized=` of the layer. Under DelayedScaling `(QuantizedKernel, new_state)`.

    Raises:
      ValueError: no recipe; a state where the recipe has none, or the reverse; blocks that a shard would straddle.

    Not differentiable: the layer gives the gradient to its `kernel`. Each device quantizes its shard; scales of a whole
    tensor are reduced over the axes that shard it, nothing else crosses devices.
    """
    recipe = recipe_of(recipe) or current_recipe()
    if recipe is None:
        raise ValueError(
            "quantize_kernel: there must be a recipe; got recipe=None, and none in context; pass recipe= or call it "
            "under autocast(recipe)"
        )
    check_state("quantize_kernel", recipe, state)
    kernel = jax.lax.stop_gradient(kernel)
    resource = current_resource()
    if spec is None and resource is not None:
        spec = PartitionSpec(*map(resource.entry, ("experts", "fsdp")[1 - batch_dims :]))
    quantized, new_state = kernel_copies(kernel, recipe, batch_dims, state, spec)
    return quantized if state is None else (quantized, new_state)


def kernel_copies(kernel, recipe, batch_dims, state, spec):
    """QuantizedKernel and new state."""
    formats, k, n = recipe.formats(), batch_dims, kernel.ndim - 1
    if state is not None:
        forward, state = quantize_delayed(kernel, state, recipe, spec=spec)
        return QuantizedKernel(forward), state

    def along(format, axis, across):
        return quantize(kernel, format, axis=axis, across=across, batch_dims=batch_dims, spec=spec)

    forward = along(formats.kernel, k, n)
    same = formats.kernel == formats.kernel_dgrad and serves_both_ways(formats.kernel)
    return QuantizedKernel(forward, None if same else along(formats.kernel_dgrad, n, k)), None


def serves_both_ways(format: TensorFormat) -> bool:
    """Whether quantizing along one dimension is quantizing along the other."""
    return format.block is None or format.block[0] == format.block[1]


def check_state(name: str, recipe: Recipe | None, state) -> None:
    """Raises ValueError unless there is state exactly where the recipe needs it."""
    delayed = isinstance(recipe, DelayedScaling)
    if delayed != (state is not None):
        raise ValueError(
            f"{name}: state must be given with DelayedScaling, and with nothing else; got recipe={recipe}, "
            f"state={'None' if state is None else 'a state'}; "
            f"{'start with init_dense_state(recipe)' if delayed else 'leave it out'}"
        )


def dense(
    x,
    kernel,
    bias=None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    recipe: Recipe | None = None,
    state: DenseState | None = None,
    key=None,
    kernel_quantized: QuantizedKernel | None = None,
    out_dtype=None,
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
):
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
      out_dtype: dtype of the result; None: that of `x`.
      x_spec, w_spec: where `x` and `kernel` are, for Auto axes under a MeshResource; None: tokens over (dp, fsdp, ep),
        `kernel` over fsdp along K.
      out_spec: where the result is wanted.

    Returns:
      [..., *N], accumulated in float32 and rounded once. Under DelayedScaling `(y, new_state)`.

    Raises:
      ValueError: other contracting dimensions, shapes that do not fit; state or key missing, or a history of another
        length; operands that the recipe's GEMMs do not take, such as a contraction that is no multiple of 16 (32 in
        blocks of 32, or in four bits); blocks that a shard would straddle.

    Differentiable in `x`, `kernel` and `bias`. Kept for the backward: `x` quantized along the tokens, and `kernel`
    quantized along N, each where it was, under the checkpoint names "quantized_x" and "quantized_kernel". Gradients are
    accumulated in float32 and have the dtype and the layout of their primals.

    Under sharding as `gemm`; each device quantizes its shard of the weight, and data and scales are gathered, anew in
    the backward. Scales of a whole tensor are reduced first, over the axes that shard it.
    """
    recipe = recipe_of(recipe) or current_recipe()
    check_state("dense", recipe, state)
    count = contracted("dense", x, kernel, contracting_dims, 0)
    if count > 1:
        x, kernel = (
            x.reshape(*x.shape[:-count], prod(x.shape[-count:])),
            kernel.reshape(prod(kernel.shape[:count]), *kernel.shape[count:]),
        )
        x_spec = _merged_spec("x_spec", x_spec, x.ndim - 1, count)
        w_spec = _merged_spec("w_spec", w_spec, 0, count)
    if recipe is None:
        return gemm(
            x, kernel, bias, out_dtype=out_dtype, x_spec=x_spec, w_spec=w_spec, out_spec=out_spec
        )
    warn_if_emulated(recipe, x, kernel)
    check_cache("dense", kernel, kernel_quantized, recipe)
    _check_bias("dense", bias, kernel.shape[1:])
    flat = x.ndim == 1
    out = _dense(
        x[None] if flat else x,
        kernel,
        bias,
        state,
        raw_key(key),
        kernel_quantized,
        recipe=recipe,
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        specs=_specs(x.ndim, kernel.ndim, x_spec, w_spec, out_spec),
        x_spec=x_spec,
        w_spec=w_spec,
        out_spec=out_spec,
    )
    if not flat:
        return out
    return out[0] if state is None else (out[0][0], out[1])


def contracted(name: str, x, kernel, contracting_dims, batch_dims: int) -> int:
    """How many dimensions are contracted."""
    of_x, of_kernel = (
        tuple(dim + a.ndim if dim < 0 else dim for dim in dims)
        for a, dims in zip((x, kernel), contracting_dims, strict=True)
    )
    count = len(of_x)
    last = tuple(range(x.ndim - count, x.ndim))
    first = tuple(range(batch_dims, batch_dims + count))
    if not count or of_x != last or of_kernel != first:
        raise ValueError(
            f"{name}: contracted must be the last dimensions of x and as many of kernel, in order, from dimension "
            f"{batch_dims} on; got contracting_dims={contracting_dims} of {x.shape} and {kernel.shape}; transpose them"
        )
    if x.shape[x.ndim - count :] != kernel.shape[batch_dims : batch_dims + count]:
        raise ValueError(
            f"{name}: the contracted dimensions must be equal; got x {x.shape}, kernel {kernel.shape}, "
            f"contracting_dims={contracting_dims}; transpose the kernel"
        )
    return count


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


def _check_bias(name: str, bias, shape) -> None:
    if bias is not None and bias.shape != shape:
        raise ValueError(f"{name}: bias must be {shape}; got bias {bias.shape}; reshape it")


def check_cache(name: str, kernel, cached: QuantizedKernel | None, recipe: Recipe) -> None:
    """Raises ValueError unless `cached` can be what the recipe makes of the kernel."""
    if cached is None:
        return
    formats = recipe.formats()
    got = cached.forward.format, cached.for_dgrad().format
    if got != (formats.kernel, formats.kernel_dgrad) or cached.forward.shape != kernel.shape:
        raise ValueError(
            f"{name}: kernel_quantized must be of the kernel and of the recipe; got {cached.forward.shape} in {got[0]} "
            f"for kernel {kernel.shape} and recipe={recipe}; make it with quantize_kernel(kernel, recipe)"
        )


def raw_key(key):
    """uint32[2], or None."""
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.key_data(key)


def gradient_keys(name: str, recipe: Recipe, key):
    """One key for each copy of the cotangent, or None for each."""
    formats = recipe.formats()
    if not (formats.grad_dgrad.stochastic or formats.grad_wgrad.stochastic):
        return None, None
    if key is None:
        raise ValueError(
            f"{name}: a key must be given where the recipe rounds gradients at random; got key=None, recipe={recipe}; "
            "pass key=jax.random.key(...), another one in each step and layer, or disable_stochastic_rounding"
        )
    return tuple(jax.random.split(key))


def _specs(x_ndim, kernel_ndim, x_spec, w_spec, out_spec):
    """Where x, the kernel and the result are in use over Auto axes under a MeshResource; else None for each."""
    resource = current_resource()
    if resource is None:
        return x_spec, w_spec, out_spec
    w = pad_spec((resource.entry("fsdp"),) if w_spec is None else w_spec, kernel_ndim)
    roles = [resource.entry(role) for role in ("tokens", "sequence")]
    return in_use(pad_spec(roles[: x_ndim - 1], x_ndim - 1), w, 0, x_spec, out_spec)


def in_use(tokens, w, batch_dims: int, x_spec, out_spec):
    """The specs that are not given: tokens as the roles say, K and N as the kernel's tensor parallelism does."""
    columns = filter_roles(w[batch_dims + 1 :], "tp")
    if x_spec is None:
        x_spec = (*tokens, *filter_roles(w[batch_dims : batch_dims + 1], "tp"))
    x = pad_spec(x_spec, len(tokens) + 1)
    if out_spec is None:
        out_spec = (*strip_axes(x[:-1], spec_axes(columns)), *columns)
    return x, w, PartitionSpec(*out_spec)


def keep(q: QuantizedArray | None, name: str):
    """Names the arrays for checkpoint policies."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), q)


def after(kernel: QuantizedArray, dy: QuantizedArray):
    """Both, the kernel not before `dy` is known.

    Else the compiler takes the forward's gathered weight for the backward's, and keeps it alive in between.
    """
    return jax.lax.optimization_barrier((kernel, dy))


def _dense_fwd(x, kernel, bias, state, key, cached, *, recipe, out_dtype, specs, **given):
    q_x, q_x_wgrad, x_state = _x_copies(x, recipe, state, specs[0])
    kernel_state = state and state.kernel
    if cached is None:
        cached, kernel_state = kernel_copies(kernel, recipe, 0, kernel_state, specs[1])
    y = quantized_gemm(
        q_x, cached.forward, out_dtype=out_dtype, specs=specs[:2], out_spec=given["out_spec"]
    )
    if bias is not None:
        y = add_bias_op(y, bias, operand_specs=(specs[2], _bias_spec(specs[1])))
    saved = keep(q_x_wgrad, "quantized_x"), keep(cached.for_dgrad(), "quantized_kernel")
    out = y if state is None else (y, DenseState(x_state, kernel_state))
    return out, (*saved, bias, key)


def _x_copies(x, recipe, state, spec):
    """x quantized along K and along the last token dimension, and the new state."""
    formats, k, t = recipe.formats(), x.ndim - 1, x.ndim - 2
    if state is not None:
        q, state = quantize_delayed(x, state.x, recipe, spec=spec)
        return q, q, state
    q = quantize(x, formats.x, axis=k, spec=spec)
    same = formats.x == formats.x_wgrad and serves_both_ways(formats.x)
    return q, q if same else quantize(x, formats.x_wgrad, axis=t, spec=spec), None


def _dense_bwd(residuals, cotangent, *, recipe, out_dtype, specs, x_spec, w_spec, out_spec):
    del out_dtype, out_spec
    q_x, q_kernel, bias, key = residuals
    dy = cotangent[0] if isinstance(recipe, DelayedScaling) else cotangent
    dy_dgrad, dy_wgrad = _dy_copies(dy, q_x.ndim - 2, recipe, key, specs[2])
    q_kernel, dy_dgrad = after(q_kernel, dy_dgrad)
    dx = quantized_gemm_dgrad(
        dy_dgrad,
        q_kernel,
        out_dtype=q_x.dtype,
        specs=(specs[2], specs[1]),
        out_spec=at_rest(q_x, x_spec),
    )
    dw = quantized_gemm_wgrad(
        q_x,
        dy_wgrad,
        out_dtype=q_kernel.dtype,
        specs=(specs[0], specs[2]),
        out_spec=at_rest(q_kernel, w_spec),
    )
    db = None
    if bias is not None:
        bias_spec = _bias_spec(specs[1])
        db = bias_grad_op(
            dy,
            bias,
            out_dtype=bias.dtype,
            operand_specs=(specs[2], bias_spec),
            result_specs=(_jax.explicit_spec(bias) if bias_spec is None else bias_spec,),
        )
    return dx, dw, db, None, None, None


def _dy_copies(dy, tokens, recipe, key, spec):
    """dy quantized along the last of N and along the last token dimension, `tokens`."""
    formats, keys = recipe.formats(), gradient_keys("dense", recipe, key)
    along_n = quantize(dy, formats.grad_dgrad, axis=dy.ndim - 1, key=keys[0], spec=spec)
    if formats.grad_dgrad == formats.grad_wgrad and serves_both_ways(formats.grad_dgrad):
        return along_n, along_n
    return along_n, quantize(dy, formats.grad_wgrad, axis=tokens, key=keys[1], spec=spec)


def at_rest(q: QuantizedArray, spec):
    """Where the gradient of what was quantized is wanted: where that was."""
    return _jax.explicit_spec(q.data) if spec is None else spec


def _bias_spec(w_spec):
    """Of a kernel's bias in use, whose dimensions are those of the kernel without K."""
    return None if w_spec is None else filter_roles(w_spec[1:], "tp")


_dense = differentiable(_dense_fwd, _dense_bwd)
