"""GEMMs of quantized operands: y = dequantized(x) . dequantized(w), accumulated in float32.

The three GEMMs of a layer contract K (forward), N (input gradient) and the tokens (weight gradient); the blocks of both
operands lie along the contraction. Dimension key: t token dimensions (any number), K contraction, n output dimensions
(any number).
"""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core import _jax
from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import check_out_dtype
from expertmesh.core.quantization.quantize import dequantize_values
from expertmesh.core.quantization.quantized import QuantizedArray, check_quantized
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.vjp import not_differentiable

__all__ = ["quantized_gemm", "quantized_gemm_dgrad", "quantized_gemm_wgrad"]


def multiply(a, b, dims, out_dtype):
    """Exact products: of operands that were 8 bits wide, TensorFloat-32 would lose digits of the scales."""
    out = jax.lax.dot_general(
        a,
        b,
        (dims, ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)


def _fprop_reference(x, w, *, out_dtype):
    return multiply(_wide(x), _wide(w), ((x.ndim - 1,), (0,)), out_dtype)


def _dgrad_reference(dy, w, *, out_dtype):
    n = w.ndim - 1
    dims = tuple(range(dy.ndim - n, dy.ndim)), tuple(range(1, w.ndim))
    return multiply(_wide(dy), _wide(w), dims, out_dtype)


def _wgrad_reference(x, dy, *, out_dtype):
    tokens = tuple(range(x.ndim - 1))
    return multiply(_wide(x), _wide(dy), (tokens, tokens), out_dtype)


def _wide(q: QuantizedArray):
    return dequantize_values(q.data, q.scale, q.tensor_scale, block=q.block)


def rows_unsupported(rows, w, weight_shape, out_dtype) -> str | None:
    """What keeps rows times a weight [K, *N], contracted along K or N, from the kernels, or None."""
    K, *N = weight_shape
    if 128 in rows.block and len(N) > 1 and N[-1] % 128:
        return f"the last dimension of the weight must consist of blocks of 128; it is {N[-1]}"
    return unsupported(rows, w, (K, prod(N)), (1, 2), out_dtype)


def unsupported(a, b, widths, block_dims, out_dtype) -> str | None:
    """What keeps operands of these types from the kernels, or None.

    Args:
      widths: K and the size of N.
      block_dims: along how many dimensions of either operand blocks of 128 lie.
    """
    if a.block and a.tensor_scale is not None:
        return "there is no kernel for blocks with two levels of scales"
    long = [[size for size in q.block if size > 1] for q in (a, b)]
    if long not in ([[], []], [[32], [32]], [[128] * dims for dims in block_dims]):
        return f"there is no kernel for blocks of {a.block} and {b.block}"
    capability = _jax.compute_capability()
    if capability is not None and capability < 9.0:
        return f"the kernels are for compute capability 9.0 and later; this GPU has {capability}"
    if a.data.size == 0 or any(width == 0 or width % 16 for width in widths):
        return f"there must be rows, and widths that are multiples of 16; widths are {widths}"
    if out_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the result must be float32, bfloat16 or float16; it is {out_dtype}"
    return None


def _rows_supported(rows, w, *, out_dtype) -> str | None:
    """For the forward (x w) and the input gradient (dy w^T)."""
    return rows_unsupported(rows, w, w.shape, out_dtype)


def _weights_supported(x, dy, *, out_dtype) -> str | None:
    *tokens, K = x.shape
    along = max(x.block, default=1)
    if len(tokens) > 1 and tokens[-1] % along:
        return f"the last dimension of tokens must consist of blocks of {along}; it is {tokens[-1]}"
    return unsupported(x, dy, (K, prod(dy.shape[len(tokens) :])), (1, 1), out_dtype)


def _triton(function: str, supports) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.quantized_gemm", function, supports),)


_fprop_op = Op(
    "quantized_gemm",
    _fprop_reference,
    "t... k, k n... -> t... n...",
    summed=("k",),
    roles="tokens ., fsdp . -> tokens .",
    parameter=1,
    kernels=_triton("fprop", _rows_supported),
)
_dgrad_op = Op(
    "quantized_gemm_dgrad",
    _dgrad_reference,
    "t... n..., k n... -> t... k",
    summed=("n...",),
    roles="tokens ., fsdp . -> tokens .",
    parameter=1,
    kernels=_triton("dgrad", _rows_supported),
)
_wgrad_op = Op(
    "quantized_gemm_wgrad",
    _wgrad_reference,
    "t... k, t... n... -> k n...",
    summed=("t...",),
    roles="tokens ., tokens . -> fsdp .",
    parameter=2,
    kernels=_triton("wgrad", _weights_supported),
)


def quantized_gemm(x: QuantizedArray, w: QuantizedArray, *, out_dtype, specs, out_spec=None):
    """y[t, n] = sum_k x[t, k] * w[k, n].

    Args:
      x: [..., K], its blocks along K.
      w: [K, *N], its blocks along K.
      out_dtype: dtype of the result.
      specs: of `x` and `w` over Auto axes, or None for each.
      out_spec: where the result is wanted.

    Returns:
      [..., *N]; accumulated in float32, rounded once.

    Raises:
      ValueError: formats or blocks that no GEMM takes (see `check_pair`).

    Under sharding as `gemm`; what is gathered of the weight is its data and its scales.
    """
    check_pair("gemm", (x, x.ndim - 1), (w, 0))
    for q in (x, w):
        _check_one_tensor(q)
    return _call(_fprop_op, x, w, out_dtype, specs, out_spec)


def quantized_gemm_dgrad(dy: QuantizedArray, w: QuantizedArray, *, out_dtype, specs, out_spec=None):
    """dx[t, k] = sum_n dy[t, n] * w[k, n]; blocks along the last dimension of N. Otherwise as `quantized_gemm`."""
    check_pair("gemm's input gradient", (dy, dy.ndim - 1), (w, w.ndim - 1))
    return _call(_dgrad_op, dy, w, out_dtype, specs, out_spec)


def quantized_gemm_wgrad(
    x: QuantizedArray,
    dy: QuantizedArray,
    *,
    out_dtype,
    specs,
    out_spec=None,
    reduce_dtype="float32",
):
    """dw[k, n] = sum_t x[t, k] * dy[t, n]; blocks along the last token dimension.

    Devices add their parts in `reduce_dtype`. Otherwise as `quantized_gemm`.
    """
    tokens = x.ndim - 1
    check_pair("gemm's weight gradient", (x, tokens - 1), (dy, tokens - 1), multiple=False)
    return _call(_wgrad_op, x, dy, out_dtype, specs, out_spec, reduce_dtype=reduce_dtype)


def _call(op, a, b, out_dtype, specs, out_spec, **options):
    return op(
        a,
        b,
        out_dtype=check_out_dtype("gemm", out_dtype),
        operand_specs=tuple(specs),
        result_specs=(out_spec,),
        **options,
    )


def both_quantized(name: str, layer: str, a, b) -> tuple[QuantizedArray, QuantizedArray]:
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

    def constant(x):
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return not_differentiable(x, f"{name}: use {layer}") if is_float else x

    return jax.tree.map(constant, a), jax.tree.map(constant, b)


def _check_one_tensor(q: QuantizedArray) -> None:
    scale = q.tensor_scale if q.block else q.scale
    if scale is not None and scale.ndim:
        raise ValueError(
            f"gemm: an operand must have one tensor scale, []; got scale {scale.shape} of data {q.shape}; quantize it "
            "with batch_dims=0, or use grouped_gemm"
        )


def check_pair(
    name: str, a: tuple[QuantizedArray, int], b: tuple[QuantizedArray, int], *, multiple=True
) -> None:
    """Raises ValueError for two operands (and the dimension of each that is contracted) that no GEMM takes.

    Both e5m2; scales of different kinds or blocks of different length; two operands with two-dimensional blocks; only
    one operand rotated; blocks across another dimension than the contracted one; scales that do not fit their data; a
    contraction that is no multiple of what the format needs (see `contraction_multiple`), with `multiple`.
    """
    _check_formats(name, a[0].format, b[0].format)
    for q, dim in (a, b):
        check_quantized(name, q)
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
