"""Grouped GEMMs of 8-bit rows and a thin plain operand, for NVIDIA GPUs from compute capability 8.9.

Of formats that the kernels do not read the rows are widened first. Dimension key as in `linear/grouped_gemm.py`.
"""

from expertmesh.core.kernels import grouped_gemm as plain
from expertmesh.core.kernels.choice import thin_gemm as choice
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.quantized_grouped_gemm import flat
from expertmesh.core.kernels.triton import mixed_grouped_gemm as triton
from expertmesh.core.kernels.triton import quantize
from expertmesh.core.quantization.quantized import QuantizedArray


def rows(lhs, rhs, group_sizes, **options):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]; options: `out_dtype`, `clear_padding`."""
    if (along := _along(lhs)) is None:
        return plain.rows(_wide(lhs, rhs.dtype), rhs, group_sizes, **options)
    out = _rows(lhs, flat(rhs), group_sizes, along=along, transposed=False, **options)
    return out.reshape(1, -1, *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, **options):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]; options: `out_dtype`, `clear_padding`."""
    if (along := _along(dy)) is None:
        return plain.rows_dgrad(_wide(dy, rhs.dtype), rhs, group_sizes, **options)
    return _rows(dy, flat(rhs), group_sizes, along=along, transposed=True, **options)[None]


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N], one of both quantized."""
    thin_first = isinstance(dy, QuantizedArray)
    q, thin = (dy, lhs) if thin_first else (lhs, dy)
    if (along := _along(q)) is None:
        wide = _wide(q, thin.dtype)
        operands = (thin, wide) if thin_first else (wide, thin)
        return plain.weights(*operands, group_sizes, num_experts=num_experts, out_dtype=out_dtype)
    thin = flat(thin)[0]
    tiles = choice.choose_weights(thin.shape[1], current_device())
    options = dict(tiles=tiles, along=along, out_dtype=out_dtype, thin_first=thin_first)
    data, scale = _parts(q)
    out = triton.launch_weights(data, scale, thin, group_sizes[0], **options)
    return out.reshape(num_experts, lhs.shape[2], *dy.shape[2:])


def _rows(q, w, group_sizes, *, along, transposed: bool, out_dtype, clear_padding=False):
    """[C, T]"""
    tiles = choice.choose_rows(w.shape[1 if transposed else 2])
    options = dict(out_dtype=out_dtype, transposed=transposed, clear_padding=clear_padding)
    options |= dict(tiles=tiles, along=along)
    data, scale = _parts(q)
    return triton.launch_rows(data, scale, w, group_sizes[0], **options)


def _along(q) -> int | None:
    """The length of blocks along the features, 0 of groups with one scale; None where the kernels do not read them."""
    if not q.block:
        return 0
    *across, along = q.block
    whole = along == 128 and max(across) == 1 and q.shape[-1] % 128 == 0
    return 128 if whole and q.scale.dtype == "float32" else None


def _parts(q):
    """Data [C, D] and scales."""
    return flat(q.data)[0], flat(q.scale)[0]


def _wide(q, dtype):
    return quantize.dequantize(q.data, q.scale, block=q.block, dtype=dtype)
