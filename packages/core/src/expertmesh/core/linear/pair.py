"""Two quantized operands of a GEMM: which fit each other, and which the kernels take."""

import dataclasses
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core import _jax
from expertmesh.core.op import Op
from expertmesh.core.quantization.quantize import dequantize_values
from expertmesh.core.quantization.quantize_rows import tokens_of
from expertmesh.core.quantization.quantized import (
    QuantizedArray,
    blocked_weight_unsupported,
    check_quantized,
    is_quantized,
    widths_unsupported,
)
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.support import eight_bits_unsupported
from expertmesh.core.vjp import not_differentiable


def dequantized(x: Any) -> jax.Array:
    """float32, of a QuantizedArray; an array as it is."""
    if isinstance(x, QuantizedArray):
        x = dequantize_values(x.data, x.scale, x.tensor_scale, block=x.block)
    values: jax.Array = x
    return values


def precision_of(*operands: Any) -> jax.lax.Precision | None:
    """Exact products of what was 8 bits wide: TensorFloat-32 would lose digits of the scales."""
    return jax.lax.Precision.HIGHEST if is_quantized(*operands) else None


def rows_unsupported(
    rows: QuantizedArray, w: QuantizedArray, weight_shape: tuple[int, ...], out_dtype: DTypeLike
) -> str | None:
    """What keeps rows times a weight [K, *N], contracted along K or N, from the kernels, or None."""
    K, *N = weight_shape
    if 128 in rows.block and (reason := blocked_weight_unsupported(prod(N[:-1]), N[-1])):
        return reason
    return unsupported(rows, w, (K, prod(N)), (1, 2), out_dtype)


def unsupported(
    a: QuantizedArray,
    b: QuantizedArray,
    widths: tuple[int, int],
    block_dims: tuple[int, int],
    out_dtype: DTypeLike,
) -> str | None:
    """What keeps operands of these types from the kernels, or None.

    Args:
      widths: K and the size of N.
      block_dims: along how many dimensions of either operand blocks of 128 lie.
    """
    if _has_4_bits(a) and _has_4_bits(b):
        capability = _jax.target_capability()
        if capability < 10.0:
            return f"tensor cores multiply 4 bits from compute capability 10.0 on; this GPU has {capability}"
        if reason := _packing_unsupported(a, b):
            return reason
    elif reason := _blocks_unsupported(a, b, block_dims):
        return reason
    if reason := eight_bits_unsupported():
        return reason
    if a.data.size == 0:
        return "there must be rows"
    if reason := widths_unsupported(*widths):
        return reason
    if out_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the result must be float32, bfloat16 or float16; it is {out_dtype}"
    return None


def _has_4_bits(q: QuantizedArray) -> bool:
    return q.data.dtype.name == "float4_e2m1fn"


def _packing_unsupported(*operands: QuantizedArray) -> str | None:
    """What keeps operands of 4 bits from the kernels, which read two blocks of 16 at a time, or None."""
    for q in operands:
        if q.tensor_scale is None or not q.block or max(q.block) != 16:
            return f"there is no kernel for 4 bits in blocks of {q.block}"
        if any(n % 32 for n, block in zip(q.shape, q.block, strict=True) if block > 1):
            return (
                f"dimensions with blocks must be multiples of 32; data {q.shape}, blocks {q.block}"
            )
    return None


def _blocks_unsupported(
    a: QuantizedArray, b: QuantizedArray, block_dims: tuple[int, int]
) -> str | None:
    if a.block and a.tensor_scale is not None:
        return "there is no kernel for blocks with two levels of scales"
    long = [[size for size in q.block if size > 1] for q in (a, b)]
    if long not in ([[], []], [[32], [32]], [[128] * dims for dims in block_dims]):
        return f"there is no kernel for blocks of {a.block} and {b.block}"
    return None


def multiply(
    op: Op,
    name: str,
    a: tuple[Any, int],
    b: tuple[Any, int],
    group_sizes: jax.Array | None = None,
    *,
    specs: tuple[PartitionSpec | None, ...],
    multiple: bool = True,
    more: tuple[tuple[jax.Array, PartitionSpec | None], ...] = (),
    **options: Any,
) -> jax.Array:
    """A GEMM of two operands, each with the dimension of it that is contracted.

    Args:
      a, b: a may be `Moved`.
      op: the GEMM; takes `group_sizes` after the operands unless they are None.
      name: of the GEMM, for the errors of `check_pair`.
      specs: of both operands over Auto axes, or None for each.
      multiple: see `check_pair`.
      more: operands of the op after these, each with its spec.
      options: of the op.
    """
    operands = [a[0], b[0]]
    read = [tokens_of(x) for x in operands]
    if all(map(is_quantized, read)):
        check_pair(name, (read[0], a[1]), (read[1], b[1]), group_sizes, multiple=multiple)
    # Groups have one size for both operands, which the op takes once.
    operands = [
        dataclasses.replace(x, group_sizes=None) if is_quantized(x) else x for x in operands
    ]
    if group_sizes is not None:
        operands, specs = [*operands, group_sizes], (*specs, None)
    for operand, spec in more:
        operands, specs = [*operands, operand], (*specs, spec)
    out: jax.Array = op(*operands, operand_specs=specs, **options)
    return out


def both_quantized(name: str, layer: str, a: Any, b: Any) -> tuple[QuantizedArray, QuantizedArray]:
    """Both operands of GEMM `name`, as constants: asking for a derivative is an error that names `layer`.

    Raises:
      ValueError: one of them is not quantized.
    """
    if not (isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray)):
        kinds = [
            type(x).__name__ if isinstance(x, QuantizedArray) else str(x.dtype) for x in (a, b)
        ]
        raise ValueError(
            f"{name}: both operands must be quantized or none; got {kinds[0]} and {kinds[1]}; quantize the other too, "
            "or dequantize this one"
        )

    def constant(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return not_differentiable(x, f"{name}: use {layer}") if is_float else x

    return jax.tree.map(constant, a), jax.tree.map(constant, b)


def check_pair(
    name: str,
    a: tuple[QuantizedArray, int],
    b: tuple[QuantizedArray, int],
    group_sizes: jax.Array | None = None,
    *,
    multiple: bool = True,
) -> None:
    """Raises ValueError for two operands (and the dimension of each that is contracted) that no GEMM takes.

    Both e5m2; scales of different kinds or blocks of different length; two operands with two-dimensional blocks; only
    one operand rotated; blocks across another dimension than the contracted one; scales that do not fit their data; a
    contraction that is no multiple of what the format needs (see `contraction_multiple`), with `multiple`; scales of
    tensors that are not [], or with `group_sizes` not [P, G] of rows and [E] of weights.
    """
    _check_formats(name, a[0].format, b[0].format)
    for q, dim in (a, b):
        check_quantized(name, q)
        _check_contraction(name, q, dim, multiple)
    _check_scales(name, a[0], group_sizes)
    _check_scales(name, b[0], group_sizes)


def _check_contraction(name: str, q: QuantizedArray, dim: int, multiple: bool) -> None:
    if q.block and q.block[dim] != (q.format.block or (1, 1))[1]:
        raise ValueError(
            f"{name}: the blocks of an operand must lie along the dimension that is contracted, {dim}; got "
            f"block={q.block} of {q.shape}; quantize it with axis={dim}"
        )
    size, needed = q.shape[dim], contraction_multiple(q.format)
    if multiple and size % needed:
        raise ValueError(
            f"{name}: the contraction must be a multiple of {needed} in {describe(q.format)}; got {size}, "
            f"dimension {dim} of {q.shape}; pad it with zeros or use another recipe"
        )


def contraction_multiple(format: TensorFormat) -> int:
    """What the contracted dimension must be a multiple of: what tensor cores take, and whole blocks of 32 and 16."""
    four_bits = format.dtype == "float4_e2m1fn"
    return 32 if four_bits or (format.block or (1, 1))[1] == 32 else 16


def describe(format: TensorFormat) -> str:
    blocks = "one scale" if format.block is None else f"blocks {format.block} of {format.scale}"
    return f"{format.dtype} with {blocks}"


def _check_formats(name: str, fa: TensorFormat, fb: TensorFormat) -> None:
    got = f"got {describe(fa)} and {describe(fb)}"
    if fa.dtype == fb.dtype == "float8_e5m2":
        raise ValueError(
            f"{name}: one operand must be float8_e4m3fn; {got}; use Format.HYBRID or Format.E4M3"
        )
    along = [format.block and format.block[1] for format in (fa, fb)]
    if along[0] != along[1] or fa.scale != fb.scale:
        raise ValueError(
            f"{name}: both operands must have scales of one kind; {got}; quantize both by one recipe"
        )
    if fa.block and fb.block and min(fa.block[0], fb.block[0]) > 1:
        raise ValueError(
            f"{name}: one operand at most may have two-dimensional blocks; {got}; give the tokens blocks of one row"
        )
    if fa.hadamard != fb.hadamard:
        raise ValueError(
            f"{name}: both operands must be rotated by the Hadamard transform or none; got hadamard={fa.hadamard} "
            f"and {fb.hadamard}; use the formats of one GEMM"
        )


def _check_scales(name: str, q: QuantizedArray, group_sizes: jax.Array | None) -> None:
    scale = q.tensor_scale if q.block else q.scale
    if scale is None:
        return
    if group_sizes is None:
        if scale.ndim:
            raise ValueError(
                f"{name}: an operand must have one tensor scale, []; got scale {scale.shape} of data {q.shape}; "
                "quantize it with batch_dims=0, or use grouped_gemm"
            )
        return
    weights = q.group_sizes is None
    want = q.shape[:1] if weights else group_sizes.shape
    if scale.shape != want:
        raise ValueError(
            f"{name}: there must be one scale per {'expert' if weights else 'group'}, {want}; got scale "
            f"{scale.shape} of data {q.shape}; make it with expertmesh.core."
            f"{'quantize(..., batch_dims=1)' if weights else 'grouped_quantize'}"
        )
