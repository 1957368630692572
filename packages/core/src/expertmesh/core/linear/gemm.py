"""Dense GEMM: y[t, n] = sum_k x[t, k] * w[k, n] + bias[n].

Dimension key: t token dimensions (any number), K contraction, n output dimensions (any number).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.apply import apply_linear, layer_of
from expertmesh.core.linear.layer import Layer, Linear, NonDiffOperands, Term, Terms
from expertmesh.core.linear.pair import dequantized, precision_of, rows_unsupported, unsupported
from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import ANY_FLOATS, FLOATS, check_arrays
from expertmesh.core.quantization.delayed_scaling import DelayedState, quantize_delayed
from expertmesh.core.quantization.quantize import quantize
from expertmesh.core.quantization.quantize_rows import Copies
from expertmesh.core.quantization.quantized import QuantizedArray, is_quantized
from expertmesh.core.quantization.recipe import quantized_once


def _dot(
    a: Any, b: Any, dims: tuple[tuple[int, ...], tuple[int, ...]], out_dtype: DTypeLike
) -> jax.Array:
    out = jax.lax.dot_general(
        dequantized(a),
        dequantized(b),
        (dims, ((), ())),
        precision=precision_of(a),
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)


def _gemm_reference(x: Any, w: Any, *, out_dtype: DTypeLike) -> jax.Array:
    return _dot(x, w, ((x.ndim - 1,), (0,)), out_dtype)


def _dgrad_reference(dy: Any, w: Any, *, out_dtype: DTypeLike) -> jax.Array:
    n = w.ndim - 1
    return _dot(dy, w, (tuple(range(dy.ndim - n, dy.ndim)), tuple(range(1, w.ndim))), out_dtype)


def _wgrad_reference(x: Any, dy: Any, *, out_dtype: DTypeLike) -> jax.Array:
    tokens = tuple(range(x.ndim - 1))
    return _dot(x, dy, (tokens, tokens), out_dtype)


def _add_bias_reference(y: jax.Array, bias: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def _bias_grad_reference(dy: jax.Array, bias: jax.Array, *, out_dtype: DTypeLike) -> jax.Array:
    tokens = tuple(range(dy.ndim - bias.ndim))
    return jnp.sum(dy.astype(jnp.float32), axis=tokens).astype(out_dtype)


def _rows_unsupported(
    rows: QuantizedArray, w: QuantizedArray, *, out_dtype: DTypeLike
) -> str | None:
    """For the forward (x w) and the input gradient (dy w^T)."""
    return rows_unsupported(rows, w, w.shape, out_dtype)


def _weights_unsupported(
    x: QuantizedArray, dy: QuantizedArray, *, out_dtype: DTypeLike
) -> str | None:
    *tokens, K = x.shape
    along = max(x.block, default=1)
    if len(tokens) > 1 and tokens[-1] % along:
        return f"the last dimension of tokens must consist of blocks of {along}; it is {tokens[-1]}"
    return unsupported(x, dy, (K, prod(dy.shape[len(tokens) :])), (1, 1), out_dtype)


def _kernels(function: str, unsupported: Callable[..., str | None]) -> tuple[Kernel, ...]:
    """Of quantized operands; plain ones have no kernel of ours."""
    module = "expertmesh.core.kernels.quantized_gemm"
    return (Kernel.triton(module, function, unsupported, takes=is_quantized),)


_TERMS = Terms(
    x=Term("t... k", "tokens ."), w=Term("k n...", "fsdp ."), y=Term("t... n...", "tokens .")
)
gemm_op = _TERMS.gemm("gemm", "xw y", _gemm_reference, _kernels("fprop", _rows_unsupported))
gemm_dgrad_op = _TERMS.gemm(
    "gemm_dgrad", "yw x", _dgrad_reference, _kernels("dgrad", _rows_unsupported)
)
gemm_wgrad_op = _TERMS.gemm(
    "gemm_wgrad", "xy w", _wgrad_reference, _kernels("wgrad", _weights_unsupported)
)
add_bias_op = Op("add_bias", _add_bias_reference, "t... n..., n... -> t... n...")
bias_grad_op = Op("bias_grad", _bias_grad_reference, "t... n..., n... -> n...", summed=("t...",))


def _x_copies(
    x: jax.Array, group_sizes: None, state: DelayedState | None, layer: Layer, *, for_wgrad: bool
) -> tuple[QuantizedArray, QuantizedArray, DelayedState | None]:
    del group_sizes
    formats, spec = layer.formats, layer.resolved[0]
    if state is None or layer.delayed is None:
        q_x, state = quantize(x, formats.x, axis=x.ndim - 1, spec=spec), None
    else:
        q_x, state = quantize_delayed(x, state, layer.delayed, spec=spec)
    if not for_wgrad or quantized_once(formats.x, formats.x_wgrad):
        return q_x, q_x, state
    return q_x, quantize(x, formats.x_wgrad, axis=x.ndim - 2, spec=spec), state


def _dy_copies(
    dy: jax.Array,
    group_sizes: None,
    keys: tuple[jax.Array | None, jax.Array | None],
    layer: Layer,
    *,
    tokens: int | None,
) -> Copies:
    del group_sizes
    formats, spec = layer.formats, layer.resolved[2]
    along_n = quantize(dy, formats.grad_dgrad, axis=dy.ndim - 1, key=keys[0], spec=spec)
    if tokens is None:
        return Copies(along_n, None, None)
    if quantized_once(formats.grad_dgrad, formats.grad_wgrad):
        return Copies(along_n, along_n, None)
    along_tokens = quantize(dy, formats.grad_wgrad, axis=tokens, key=keys[1], spec=spec)
    return Copies(along_n, along_tokens, None)


DENSE = Linear(
    name="dense",
    terms=_TERMS,
    fprop=gemm_op,
    dgrad=gemm_dgrad_op,
    wgrad=gemm_wgrad_op,
    add_bias=add_bias_op,
    bias_grad=bias_grad_op,
    row_roles=("tokens", "sequence"),
    quantize_x=_x_copies,
    quantize_dy=_dy_copies,
)


def gemm(
    x: jax.Array | QuantizedArray,
    w: jax.Array | QuantizedArray,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
    x_spec: PartitionSpec | None = None,
    w_spec: PartitionSpec | None = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies the last dimension of `x` with the first of `w`: `jnp.tensordot(x, w, 1) + bias`.

    Args:
      x: float[..., K], or `quantize(..., axis=-1)`.
      w: float[K, *N]; cast to the dtype of `x`, its gradient is accumulated and returned in its own. With a quantized
        `x`, `quantize(..., axis=0)`.
      bias: float[*N] or None.
      out_dtype: dtype of the result, floats of 16 bits or more; None: that of `x` (of what it was quantized from).
      reduce_dtype: the dtype of the reduction of `w`'s gradient over devices: "float32", "bfloat16" or "float16".
      x_spec, w_spec: where `x` and `w` are, for Auto axes under a MeshResource; None: tokens over (dp, fsdp, ep), `w`
        over fsdp along K.
      out_spec: where the result is wanted; None: tokens where those of `x` are, N where that of `w` is in use.

    Returns:
      [..., *N], accumulated in float32 and rounded once. Where K = 0, the bias or 0.

    Raises:
      ValueError: K of `x` and `w` or the shapes of `w` and `bias` differ; a spec with an axis twice or not in the mesh;
        one quantized operand, or two that do not fit: both float8_e5m2, scales of different kinds, blocks that do not
        lie along K, scales of other shapes, K no multiple of 16 (32 in blocks of 32 or in four bits).
      TypeError: an operand is no array of floats.
      NotImplementedError: quantized operands are differentiated.

    Differentiable in `x`, `w` and `bias`, unless they are quantized (see `dense`). Under sharding the weight is
    gathered over every axis that shards the tokens, in the dtype of `x`; the tokens are not. Over axes of the
    resource's role tp the weight is used as it is:

    | weight | forward | input gradient | weight gradient |
    |---|---|---|---|
    | [K, N / tp], columns | no communication | summed over tp | no communication |
    | [K / tp, N], rows | summed over tp | no communication | no communication |

    and tokens that lie on these axes (sequence parallelism) are gathered over them. Explicit axes without a resource
    behave so too, unless they shard the tokens. A sum is float32 on the way; it is a reduce-scatter where the result is
    wanted sharded over the axis (`out_spec`, the layout of `x` for its gradient), else an all-reduce. The weight's
    gradient is reduce-scattered into the weight's own spec, and alone is added in `reduce_dtype`: in bfloat16 half the
    bytes travel, each of n devices' parts is rounded, and each of the n - 1 sums, by at most 2^-9 of it.
    """
    check_operands("gemm", x, w, bias)
    layer = layer_of(
        "gemm",
        DENSE,
        x,
        w,
        NonDiffOperands(),
        None,
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
        specs=(x_spec, w_spec, out_spec),
    )
    out: jax.Array = apply_linear(layer, x, w, None, bias)
    return out


def check_operands(name: str, x: Any, w: Any, bias: jax.Array | None) -> None:
    """Raises where the operands of GEMM `name` do not fit."""
    check_arrays(name, ANY_FLOATS, quantized=True, x=x, w=w)
    check_arrays(name, FLOATS, optional=True, bias=bias)
    if x.ndim < 1 or w.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{name}: the last dimension of x must equal the first of w; got x {x.shape}, w {w.shape}; transpose w"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(
            f"{name}: bias must have the shape of w without its first dimension, {w.shape[1:]}; got bias {bias.shape}; "
            "reshape it"
        )
