"""GEMMs of rows of 8 bits with an activation, or its gradient, behind them, and their quantization, for NVIDIA GPUs.

Dimension key as in `linear/quantized_activation.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import quantized_grouped_gemm as gemm
from expertmesh.core.kernels.activate_quantize import activate_quantize, copies_of, copy_types
from expertmesh.core.kernels.choice import gathered_activation as by_groups
from expertmesh.core.kernels.choice import quantized_activation as choice
from expertmesh.core.kernels.cuda import block_scaled_activation as cuda
from expertmesh.core.kernels.cuda import gathered_activation as tensor_scaled
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import quantize
from expertmesh.core.kernels.triton.grouped_quantize import by_group
from expertmesh.core.ops.groups import selected
from expertmesh.core.ops.row_map import holds_token
from expertmesh.core.quantization.activate_quantize import Activated, ActivatedGrad
from expertmesh.core.quantization.quantize_rows import Moved, index_of, tokens_of

# Both copies, of a scale per group.
_BOTH: dict[str, Any] = dict(blocks=((), ()), directions=(0, 1))


def quantized_activation(
    lhs, rhs, group_sizes, weights, source, *, format, narrow, amax_axes=(), **options
):
    """[1, C, K], or [1, T, K] `Moved` there, x [G, K, 2, F], times [1, C] -> [1, C, 2, F], and data and scales of
    [1, C, F], twice; if it is `narrow`, data and scales of h, and once those of [1, C, F]."""
    operands, options = (lhs, rhs, group_sizes, weights, source), options | dict(format=format)
    if format.block is None:
        return _by_group(*operands, **options, amax_axes=amax_axes)
    return _in_blocks(*operands, **options, narrow=narrow)


@for_device
def _by_group(lhs, rhs, group_sizes, weights, source, *, activation, format, amax_axes, device):
    (_, C, K), (G, _, _, F), sizes = lhs.shape, rhs.shape, group_sizes[0].astype(jnp.int32)
    dtype = jnp.dtype(lhs.dtype)
    rows, gathers = tokens_of(lhs), isinstance(lhs, Moved)
    splits = rows.format.use_split_accumulator
    projection = _projection((C, rows.shape[1]), K, F, G, activation, device, splits=splits)
    config = by_groups.choose_quantized(projection, dtype)
    if config is None:
        h = gemm.rows(lhs, rhs, group_sizes, out_dtype=dtype)
        activated, options = Activated(h, weights, source, activation), dict(format=format, **_BOTH)
        made = activate_quantize(activated, group_sizes, None, None, **options, amax_axes=amax_axes)
        return h, *made
    weight = jnp.swapaxes(gemm.flat(rhs.data), 1, 2)
    operands = (
        rows.data[0],
        index_of(lhs, source)[0],
        weight,
        weights[0],
        sizes,
        (rows.scale[0], rhs.scale),
    )
    options = dict(config=config, activation=activation, dtype=dtype, gathers=gathers)
    h, a, amax = tensor_scaled.launch_quantized(*operands, **options)
    return h[None], *_copies(a, amax, sizes, format, amax_axes)


@for_device
def quantized_activation_grad(
    dy, rhs, h, weights, source, group_sizes, *, activation, format, amax_axes=(), device
):  # fmt: skip
    """[1, C, D], or [1, T, D] `Moved` there, x [G, F, D]; [1, C, 2, F], [1, C] -> data and scales of [1, C, 2, F],
    twice, and [1, C]."""
    (_, C, D), (G, F, _), sizes = dy.shape, rhs.shape, group_sizes[0].astype(jnp.int32)
    rows, gathers = tokens_of(dy), isinstance(dy, Moved)
    projection = _projection((C, rows.shape[1]), D, F, G, activation, device, splits=True)
    config = by_groups.choose_quantized_grad(projection, h.dtype)
    if config is None:
        d_out = gemm.rows_dgrad(dy, rhs, group_sizes, out_dtype=h.dtype)
        gradient = ActivatedGrad(h, weights, source, activation, d_out)
        options = dict(format=format, amax_axes=amax_axes, **_BOTH)
        return activate_quantize(gradient, group_sizes, None, None, **options)
    index, scales = index_of(dy, source), (rows.scale[0], rhs.scale)
    operands = rows.data[0], index[0], rhs.data, h[0], weights[0], sizes, scales
    options = dict(config=config, activation=activation, gathers=gathers)
    d_h, amax, dots = tensor_scaled.launch_grad(*operands, **options)
    d_weights = selected(holds_token(source), dots.sum(0)[None])
    return *_copies(d_h, amax, sizes, format, amax_axes), d_weights


def _projection(
    rows, contraction, width, groups, activation, device, *, splits: bool
) -> by_groups.Projection:
    """`rows`: how many there are, and of how many tokens."""
    return by_groups.Projection(
        rows=rows[0], tokens=rows[1], contraction=contraction, width=width, groups=groups, dtype=jnp.float8_e4m3fn,
        function=activation.function, device=device, splits=splits,
    )  # fmt: skip


def _copies(x, amax, sizes, format, amax_axes):
    """Data and scales of both copies of [C, ...], of which each tile's amax [_, C] is known."""
    options = dict(
        format=format, twice=True, amax_axes=amax_axes, parts=amax[None], clear_padding=False
    )
    return by_group(x[None], sizes, None, **options)


@for_device
def _in_blocks(
    lhs, rhs, group_sizes, weights, source, *, activation, format, narrow, device
):  # fmt: skip
    rows, dtype, gathers = tokens_of(lhs), jnp.dtype(lhs.dtype), isinstance(lhs, Moved)
    (_, C, K), (G, _, _, F) = lhs.shape, rhs.shape
    projection = choice.Projection(
        rows=C, contraction=K, width=F, groups=G, dtype=dtype,
        blocks=(max(rows.block), format.block[1]), function=activation.function, device=device,
    )  # fmt: skip
    config = choice.choose(projection)
    if config is None:
        h = gemm.rows(lhs, rhs, group_sizes, out_dtype=dtype)
        activated = Activated(h, weights, source, activation)
        made = activate_quantize(activated, group_sizes, None, None, format=format)
        if not narrow:
            return h, *made
        kept = quantize.blocks(
            h, group_sizes[0].astype(jnp.int32), format, (1, 1, 1, format.block[1])
        )
        return *kept, *made[:2]
    weight, weight_scale = (jnp.swapaxes(gemm.flat(x), 1, 2) for x in (rhs.data, rhs.scale))
    shape, index = (1, C, F), index_of(lhs, source)
    types, of_h = copy_types(shape, format, transposed=True), (1, C, 2, F)
    if narrow:
        types = *result_types(of_h, (*of_h[:-1], F // format.block[1]), format), *types[:2]
    else:
        types = jax.ShapeDtypeStruct(of_h, dtype), *types
    h, *made = cuda.launch(
        rows.data[0], rows.scale[0], weight, weight_scale, weights[0], group_sizes[0],
        index=index[0], gathers=gathers, config=config, activation=activation, format=format, dtype=dtype,
        narrow=narrow, out_type=types,
    )  # fmt: skip
    if narrow:
        h_scale, data, scale = made
        return h, stored_scale(h_scale, format), data, stored_scale(scale, format)
    return h, *copies_of(made, shape, format, transposed=True)
