"""A router's logits in float32, of tokens in any dtype: logits[t, e] = sum_d x[t, d] * weight[d, e] + bias[e].

Equivalent to `gemm(x.astype(float32), weight.astype(float32))`, without a float32 copy of the tokens: on NVIDIA GPUs a
float32 number is the sum of three bfloat16 numbers, and products of bfloat16 numbers are exact in float32, so bfloat16
tokens are multiplied as they are with the three parts of a float32 weight.

Dimension key: t token dimensions (any number), D model width, E experts.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.gemm import (
    add_bias_op,
    bias_grad_op,
    gemm_dgrad_op,
    gemm_op,
    gemm_wgrad_op,
)
from expertmesh.core.op import Kernel, Op
from expertmesh.core.vjp import at_rest, differentiable

__all__ = ["router_logits"]


_Gemm = Callable[..., jax.Array]


def router_logits(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    w_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`x.astype(float32) @ weight.astype(float32) + bias.astype(float32)`.

    Args:
      x: float[..., D].
      weight: float[D, E].
      bias: float[E] or None.
      w_spec: where `weight` is, for Auto axes under a MeshResource; None: over fsdp along D.

    Returns:
      float32[..., E], accumulated in float32. Of bfloat16 x on NVIDIA GPUs the operands are exact (three parts of a
      float32 weight, one of a bfloat16 one); else they are what JAX makes of float32 operands there, on NVIDIA GPUs
      TF32, 11 bits.

    Raises:
      ValueError: D of `x` and `weight` differ, or E of `weight` and `bias`.

    Differentiable in all three; gradients in the operands' dtypes, accumulated in float32. Of bfloat16 x on NVIDIA GPUs
    the logits' cotangent and a float32 weight are two parts there, 16 bits. Communication as of `gemm`.
    """
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            "router_logits: x must be [..., D] and weight [D, E]; "
            f"got x {x.shape}, weight {weight.shape}; transpose the weight"
        )
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(
            "router_logits: bias must be [E] of the weight; "
            f"got bias {bias.shape}, weight {weight.shape}; pass one value per expert"
        )
    return _router_logits(x, weight, bias, w_spec=w_spec)


PARTS = 3  # of 8 bits each make the 24 of a float32


def _parts(x: jax.Array, count: int) -> list[jax.Array]:
    """bfloat16 arrays whose sum is x, as nearly as `count` of them come; of a bfloat16 x itself alone."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        # By an operation that the compiler may not take for a pair of casts that cancel.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(part), x - part, 0)
    return parts


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int, dtype: DTypeLike) -> jax.Array:
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _sum_of_parts(wide: jax.Array, count: int, dtype: DTypeLike) -> jax.Array:
    """[R, count * E] to [R, E], the smallest part first."""
    first, *rest = jnp.split(wide, count, axis=1)
    small = sum(reversed(rest), jnp.zeros_like(first))
    return (first + small).astype(dtype)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _logits_of_parts(x: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike) -> jax.Array:
    """One GEMM with the parts side by side."""
    parts = _parts(weight, PARTS)
    wide = _dot(_flat(x), jnp.concatenate(parts, axis=1), 1, 0, jnp.float32)
    return _sum_of_parts(wide, len(parts), out_dtype).reshape(*x.shape[:-1], weight.shape[1])


def _dgrad_of_parts(dy: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike) -> jax.Array:
    """One GEMM whose contraction is over the pairs of parts but that of both second ones."""
    of_dy, of_weight = _parts(_flat(dy), 2), _parts(weight, 2)
    pairs = [(a, b) for i, a in enumerate(of_dy) for j, b in enumerate(of_weight) if i + j < 2]
    left, right = (jnp.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
    # Rounded by the GEMM itself: nothing float32 of the tokens' size is written.
    return _dot(left, right, 1, 1, out_dtype).reshape(*dy.shape[:-1], weight.shape[0])


def _wgrad_of_parts(x: jax.Array, dy: jax.Array, *, out_dtype: DTypeLike) -> jax.Array:
    parts = _parts(_flat(dy), 2)
    wide = _dot(_flat(x), jnp.concatenate(parts, axis=1), 0, 0, jnp.float32)
    return _sum_of_parts(wide, len(parts), out_dtype)


def _unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """What keeps these types from the GEMMs of parts, or None."""
    wide = {x.dtype, w.dtype} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    if wide:
        return f"operands must be bfloat16 or float32; they are {x.dtype} and {w.dtype}"
    return None if x.size and w.size else "there must be elements"


def _logits_unsupported(x: jax.Array, weight: jax.Array, **options: object) -> str | None:
    del options
    if x.dtype != jnp.bfloat16:
        return f"the tokens must be bfloat16; they are {x.dtype}"
    return _unsupported(x, weight)


def _dgrad_unsupported(dy: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike) -> str | None:
    if jnp.dtype(out_dtype) != jnp.bfloat16:
        return f"the tokens must be bfloat16; they are {out_dtype}"
    return _unsupported(dy, weight)


def _wgrad_unsupported(x: jax.Array, dy: jax.Array, **options: object) -> str | None:
    return _logits_unsupported(x, dy, **options)


def _op(
    base: Op, name: str, reference: _Gemm, launch: _Gemm, unsupported: Callable[..., str | None]
) -> Op:
    kernel = Kernel("parts", "cuda", launch, unsupported=unsupported)
    return dataclasses.replace(base, name=name, reference=reference, kernels=(kernel,))


def _wide(reference: _Gemm) -> _Gemm:
    def widened(a: jax.Array, b: jax.Array, *, out_dtype: DTypeLike) -> jax.Array:
        return reference(a.astype(jnp.float32), b.astype(jnp.float32), out_dtype=out_dtype)

    return widened


router_logits_op = _op(
    gemm_op, "router_logits", _wide(gemm_op.reference), _logits_of_parts, _logits_unsupported
)
router_logits_dgrad_op = _op(
    gemm_dgrad_op,
    "router_logits_dgrad",
    _wide(gemm_dgrad_op.reference),
    _dgrad_of_parts,
    _dgrad_unsupported,
)
router_logits_wgrad_op = _op(
    gemm_wgrad_op,
    "router_logits_wgrad",
    _wide(gemm_wgrad_op.reference),
    _wgrad_of_parts,
    _wgrad_unsupported,
)
# Of one value per expert, on whatever axes the experts of the weights are.
router_bias_op = dataclasses.replace(
    add_bias_op, name="router_bias", roles="tokens ., . -> tokens ."
)
router_bias_grad_op = dataclasses.replace(
    bias_grad_op, name="router_bias_grad", roles="tokens ., . -> ."
)

_Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def _fwd(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, w_spec: PartitionSpec | None
) -> tuple[jax.Array, _Residuals]:
    specs = (None, w_spec)
    logits = router_logits_op(x, weight, out_dtype=jnp.dtype(jnp.float32), operand_specs=specs)
    return logits if bias is None else router_bias_op(logits, bias), (x, weight, bias)


def _bwd(
    residuals: _Residuals, d_logits: jax.Array, *, w_spec: PartitionSpec | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, weight, bias = residuals
    dx = router_logits_dgrad_op(
        d_logits,
        weight,
        out_dtype=x.dtype,
        operand_specs=(None, w_spec),
        result_specs=(at_rest(x, None),),
    )
    d_weight = router_logits_wgrad_op(
        x, d_logits, out_dtype=weight.dtype, result_specs=(at_rest(weight, w_spec),)
    )
    return dx, d_weight, _d_bias(d_logits, bias)


def _d_bias(d_logits: jax.Array, bias: jax.Array | None) -> jax.Array | None:
    if bias is None:
        return None
    rest = at_rest(bias, None)
    d_bias: jax.Array = router_bias_grad_op(
        d_logits, bias, out_dtype=bias.dtype, result_specs=(rest,)
    )
    return d_bias


_router_logits = differentiable(_fwd, _bwd)
