"""Grouped GEMMs of 8-bit operands for NVIDIA GPUs from compute capability 8.9, of 4-bit ones from 10.0, group sizes
read on the device.

Every byte of the outputs is written, but for padding rows without `clear_padding`. Dimension key as in
`linear/grouped_gemm.py`.
"""

from functools import partial
from math import prod

import jax.numpy as jnp

from expertmesh.core.kernels import grouped_gemm as plain
from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
from expertmesh.core.kernels.cuda import grouped_gemm as tensor_scaled
from expertmesh.core.kernels.cuda import quantized_grouped_gemm as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.low_rank import LowRank, of_operands
from expertmesh.core.kernels.triton import packed_grouped_gemm as packed
from expertmesh.core.kernels.triton import quantize
from expertmesh.core.kernels.triton import quantized_grouped_gemm as triton
from expertmesh.core.kernels.triton.grouped_quantize import along_rows
from expertmesh.core.ops.row_map import move_rows
from expertmesh.core.quantization.quantize_rows import Moved, is_moved, tokens_of, with_rows


def rows(lhs, rhs, group_sizes, *low_rank, **options):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]; `low_rank`: as of `grouped_gemm.py`, in 16 bits.

    Rows may be `Moved`: one kernel of Hopper's reads them where their tokens are, for others they are written first.

    Options: `out_dtype`, `clear_padding`.
    """
    term = of_operands(low_rank, transposed=False)
    out = _rows(lhs, rhs, group_sizes, term, transposed=False, **options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *low_rank, **options):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]; otherwise as `rows`."""
    term = of_operands(low_rank, transposed=True)
    return _rows(dy, rhs, group_sizes, term, transposed=True, **options)[None]


@for_device
def weights(lhs, dy, group_sizes, *, num_experts, out_dtype, device):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N].

    Rows with a scale per group may be `Moved`: one kernel of Hopper's reads those of one operand where their tokens
    are; else, and of both those of lhs, they are written first.
    """
    (_, C, K), N = lhs.shape, dy.shape[2:]
    along = _along(tokens_of(lhs))
    gemm = choice.Weights(C, (K, prod(N)), num_experts, out_dtype, device, along)
    config = choice.choose_weights(gemm)
    crosswise = isinstance(dy, Moved)
    if is_moved(lhs, dy):
        if choice.gathers_weights(gemm, config, crosswise=crosswise):
            moved, other = (dy, lhs) if crosswise else (lhs, dy)
            options = dict(config=config, crosswise=crosswise, out_dtype=out_dtype)
            return _gathered(moved, other, group_sizes, **options).reshape(-1, K, *N)
        lhs, dy = (along_rows(x, group_sizes) for x in (lhs, dy))
    if config.kernel == "bfloat16":
        wide, options = (_wide(lhs), _wide(dy)), dict(num_experts=num_experts, out_dtype=out_dtype)
        return plain.weights(*wide, group_sizes, **options)
    if config.kernel == "packed":
        # Rows last: they are contracted.
        parts = lhs.data, lhs.scale, flat(dy.data), flat(dy.scale)
        x, x_scale, y, y_scale = (part[0].T for part in parts)
        total, options = _total(lhs, dy), dict(config=config, out_dtype=out_dtype)
        out = packed.launch_weights(x, x_scale, y, y_scale, total, group_sizes[0], **options)
        return out.reshape(-1, K, *N)
    operands = lhs.data, lhs.scale, flat(dy.data), flat(dy.scale), group_sizes
    options = dict(config=config, along=along, out_dtype=out_dtype)
    if config.kernel == "triton":
        options |= dict(splits=choice.adds_products(gemm))
    room = triton if config.kernel == "triton" else cuda
    out = room.launch_weights(*(x[0] for x in operands), **options)
    return out.reshape(-1, K, *N)


@for_device
def _rows(
    lhs, rhs, group_sizes, low_rank: LowRank | None, *,
    transposed: bool, out_dtype, clear_padding=False, device,
):  # fmt: skip
    """[1, C, *D] x [G, D, *W], or [G, W, *D] if `transposed`, -> [C, W]; to which `low_rank` is added."""
    sizes, weight, weight_scale = group_sizes[0], flat(rhs.data), flat(rhs.scale)
    (_, C, *D), W, G = lhs.shape, weight.shape[1 if transposed else 2], sizes.shape[0]
    q = tokens_of(lhs)
    splits = transposed or q.format.use_split_accumulator
    gemm = choice.Rows(C, prod(D), W, G, q.data.dtype, out_dtype, device, _along(q), splits)
    config, options = (
        choice.choose_rows(gemm),
        dict(out_dtype=out_dtype, clear_padding=clear_padding),
    )
    lhs, index = _read_from(lhs, choice.gathers(gemm, config) and low_rank is None)
    data, scale = flat(lhs.data)[0], flat(lhs.scale)[0]
    if config.kernel == "bfloat16":
        wide = flat(_wide(lhs))[0], flat(_wide(rhs))
        # Of float16 this rounds what stands beside numbers of at most 4 significant bits.
        options |= dict(low_rank=low_rank and low_rank.astype(jnp.bfloat16))
        return plain.multiply_rows(*wide, sizes, transposed=transposed, **options)
    options |= dict(config=config, low_rank=low_rank)
    if config.kernel == "packed":
        if not transposed:
            weight, weight_scale = (jnp.swapaxes(x, 1, 2) for x in (weight, weight_scale))
        options |= dict(across=rhs.block[1 if transposed else -1], transposed=transposed)
        total = _total(lhs, rhs)
        return packed.launch_rows(data, scale, weight, weight_scale, total, sizes, **options)
    if config.kernel == "triton":
        operands = data, scale, weight, weight_scale, sizes
        options |= dict(block=rhs.block and (rhs.block[1], rhs.block[-1]), transposed=transposed)
        options |= dict(splits=choice.adds_products(gemm))
        return triton.launch_rows(*operands, **options)
    if not transposed:
        # A bitcast where the compiler is free to choose how the weight lies.
        weight, weight_scale = (
            x if x.ndim == 1 else jnp.swapaxes(x, 1, 2) for x in (weight, weight_scale)
        )
        options |= dict(low_rank=low_rank and low_rank.transposed())
    if config.kernel == "tensor_scaled":
        scales = scale, weight_scale
        return tensor_scaled.launch_rows(data, weight, sizes, scales, transposed=True, **options)
    return cuda.launch_rows(data, scale, weight, weight_scale, sizes, index=index, **options)


def _gathered(moved, other, group_sizes, **options):
    """The weight gradient of `Moved` rows and others."""
    tokens, other = moved.base, along_rows(other, group_sizes)
    operands = tokens.data, moved.index, tokens.scale, flat(other.data), other.scale, group_sizes
    return cuda.launch_gathered_weights(*(x[0] for x in operands), **options)


def _read_from(rows, gathers: bool):
    """What a kernel reads of rows, and at which index: of those of tokens, which it `gathers` or which are written."""
    if not isinstance(rows, Moved):
        return rows, None
    if gathers:
        return rows.base, rows.row_map.source_row[0]
    return with_rows(rows.base, partial(move_rows, row_map=rows.row_map)), None


def _wide(q):
    """Exact in bfloat16: an 8-bit number has at most 4 significant bits, and its scale is a power of two."""
    return quantize.dequantize(q.data, q.scale, block=q.block, dtype=jnp.bfloat16)


def _total(a, b):
    """[G]: the scale of a group's products beside those of blocks; finite if both are, so that a sum of 0 stays 0."""
    product = a.tensor_scale.reshape(-1) * b.tensor_scale.reshape(-1)
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)


def _along(q) -> int:
    """The length of an operand's blocks along the contraction; 0 where it has none."""
    return max(q.block, default=0)


def flat(x):
    """Data and scales of blocks [_, _, *N] with one dimension N; scales of tensors as they are."""
    return x if x.ndim < 3 else x.reshape(*x.shape[:2], prod(x.shape[2:]))
