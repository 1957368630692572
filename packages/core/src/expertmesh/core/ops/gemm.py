"""Dense GEMM: y[t, n] = sum_k x[t, k] * w[k, n] + bias[n].

Dimension key: t token dimensions (any number), K contraction, n output dimensions (any number).
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.op import Op
from expertmesh.core.vjp import differentiable


def _dot(a, b, dims, out_dtype):
    out = jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _gemm_reference(x, w, *, out_dtype):
    return _dot(x, w, ((x.ndim - 1,), (0,)), out_dtype)


def _dgrad_reference(dy, w, *, out_dtype):
    n = w.ndim - 1
    return _dot(dy, w, (tuple(range(dy.ndim - n, dy.ndim)), tuple(range(1, w.ndim))), out_dtype)


def _wgrad_reference(x, dy, *, out_dtype):
    tokens = tuple(range(x.ndim - 1))
    return _dot(x, dy, (tokens, tokens), out_dtype)


def _add_bias_reference(y, bias):
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def _bias_grad_reference(dy, bias, *, out_dtype):
    tokens = tuple(range(dy.ndim - bias.ndim))
    return jnp.sum(dy.astype(jnp.float32), axis=tokens).astype(out_dtype)


gemm_op = Op(
    "gemm",
    _gemm_reference,
    "t... k, k n... -> t... n...",
    summed=("k",),
    roles="tokens ., fsdp . -> tokens .",
)
gemm_dgrad_op = Op(
    "gemm_dgrad",
    _dgrad_reference,
    "t... n..., k n... -> t... k",
    summed=("n...",),
    roles="tokens ., fsdp . -> tokens .",
)
gemm_wgrad_op = Op(
    "gemm_wgrad",
    _wgrad_reference,
    "t... k, t... n... -> k n...",
    summed=("t...",),
    roles="tokens ., tokens . -> fsdp .",
)
add_bias_op = Op("add_bias", _add_bias_reference, "t... n..., n... -> t... n...")
bias_grad_op = Op("bias_grad", _bias_grad_reference, "t... n..., n... -> n...", summed=("t...",))


def gemm(x, w, bias=None, *, out_dtype=None, w_spec: PartitionSpec | None = None):
    """Multiplies the last dimension of `x` with the first of `w`: `jnp.tensordot(x, w, 1) + bias`.

    Args:
      x: float[..., K].
      w: float[K, *N]; cast to the dtype of `x`, its gradient is accumulated and returned in its own.
      bias: float[*N] or None.
      out_dtype: dtype of the result; None: that of `x`.
      w_spec: where `w` is, for Auto axes under a MeshResource; None: sharded over fsdp along K.

    Returns:
      [..., *N], accumulated in float32 and rounded once. Where K = 0, the bias or 0.

    Raises:
      ValueError: K of `x` and `w` or the shapes of `w` and `bias` differ.

    Differentiable in `x`, `w` and `bias`. Under sharding the weight is gathered over every axis that shards the tokens,
    the tokens never; a contraction over an axis of `x` ends in an all-reduce of the result; the weight's gradient is
    reduce-scattered into the weight's own spec.
    """
    if x.ndim < 1 or w.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"gemm: the last dimension of x must equal the first of w; got x {x.shape}, w {w.shape}; transpose w"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(
            f"gemm: bias must have the shape of w without its first dimension, {w.shape[1:]}; got bias {bias.shape}; "
            "reshape it"
        )
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    return _gemm(x, w, bias, out_dtype=out_dtype, w_dtype=w.dtype, w_spec=w_spec)


def _specs(w_spec, w):
    """Hints for the three GEMMs: operand specs of the first two, result specs of the third."""
    spec = _jax.explicit_spec(w) if w_spec is None else w_spec
    return (None if w_spec is None else (None, w_spec)), (None if spec is None else (spec,))


def _gemm_fwd(x, w, bias, *, out_dtype, w_dtype, w_spec):
    del w_dtype
    w = w.astype(x.dtype)  # before the op, so that the narrow copy is what is gathered and saved
    operands, _ = _specs(w_spec, w)
    y = gemm_op(x, w, out_dtype=out_dtype, operand_specs=operands)
    return (y if bias is None else add_bias_op(y, bias)), (x, w, bias)


def _gemm_bwd(residuals, dy, *, out_dtype, w_dtype, w_spec):
    del out_dtype
    x, w, bias = residuals
    operands, results = _specs(w_spec, w)
    dx = gemm_dgrad_op(dy, w, out_dtype=x.dtype, operand_specs=operands)
    dw = gemm_wgrad_op(x, dy, out_dtype=w_dtype, result_specs=results)
    db = None if bias is None else bias_grad_op(dy, bias, out_dtype=bias.dtype)
    return dx, dw, db


_gemm = differentiable(_gemm_fwd, _gemm_bwd)
