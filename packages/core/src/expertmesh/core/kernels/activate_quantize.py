"""A gated activation, or its gradient, quantized for NVIDIA GPUs.

In blocks it is quantized in both directions, and not written itself. With a scale per group it is written, with the
amax of each row, and read once more. Dimension key as in `quantization/activate_quantize.py`.
"""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Activated, choose_activation
from expertmesh.core.kernels.cuda import activate_quantize as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import as_bytes, result_types, stored_scale
from expertmesh.core.kernels.triton import activate_quantize as triton
from expertmesh.core.kernels.triton import activate_rows
from expertmesh.core.kernels.triton.grouped_quantize import by_group
from expertmesh.core.ops.row_map import holds_token


def activate_quantize(source, group_sizes, multiplier, key, *, format, **options):
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant."""
    del key
    if format.block is None:
        return _by_group(source, group_sizes, multiplier, format=format, **options)
    return _in_blocks(source, group_sizes, format)  # a block lies within a shard


def _by_group(
    source, group_sizes, multiplier, *, format, blocks, directions, amax_axes=(), origin=()
):
    del blocks, origin
    h, d_out, sizes = source.base, getattr(source, "d_out", None), group_sizes.astype(jnp.int32)
    routed, of = (source.weights, source.row_source, sizes), dict(activation=source.activation)
    if d_out is None:
        x, amax = activate_rows.value_and_amax(h, *routed, **of)
        d_weights = []
    else:
        x, *d_weights, amax = activate_rows.grad_and_amax(h, d_out, *routed, **of)
    options = dict(format=format, twice=len(directions) == 2, amax_axes=amax_axes)
    copies = by_group(x, sizes[0], multiplier, parts=amax[:, None], clear_padding=False, **options)
    return *copies, *d_weights


@for_device
def _in_blocks(source, group_sizes, format, *, device):
    """[1, C, 2, F] -> (data [1, C, F], scale) along F, and along the rows; with [1, C, F] -> of [1, C, 2, F].

    With weights the gradient has theirs, float32[1, C], too.
    """
    h, d_out, activation = source.base, getattr(source, "d_out", None), source.activation
    (_, C, _, F), block, dtype = h.shape, format.block[1], jnp.dtype(h.dtype)
    grad_dtype = None if d_out is None else d_out.dtype
    config = choose_activation(Activated(C, F, dtype, block, device, grad_dtype))
    shape = (1, C, *(() if d_out is None else (2,)), F)
    weights = () if source.weights is None else (source.weights, source.row_source)
    (numbers, scale), transposed = as_bytes(h), config.transposed
    operands = numbers, scale, d_out, weights, group_sizes[0].astype(jnp.int32)
    out_type = copy_types(shape, format, transposed)
    options = dict(config=config, activation=activation, format=format, out_type=out_type)
    options |= dict(dtype=dtype, kept=None if scale is None else h.format)
    room = cuda if config.kernel == "cuda" else triton
    made = room.launch(*operands, **options)
    copies, sums = copies_of(made[:4], shape, format, transposed), made[4:]
    # What no program has written is of rows without a token.
    d_weights = [jnp.where(holds_token(source.row_source), x.sum(0), jnp.float32(0)) for x in sums]
    return *copies, *d_weights


def copy_types(shape, format, transposed: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of data and scales as kernels write them, along the features and along the rows.

    `shape`: [1, C, *halves, F]; if `transposed`, the data along the rows is [halves x F, C].
    """
    (_, C, *halves, F), block = shape, format.block[1]
    counts = (1, C, *halves, -(-F // block)), (1, -(-C // block), *halves, F)
    first, (data_rows, scale_rows) = (result_types(shape, count, format) for count in counts)
    if transposed:
        data_rows = jax.ShapeDtypeStruct((prod(halves) * F, C), format.dtype)
    return *first, data_rows, scale_rows


def copies_of(made, shape, format, transposed: bool) -> tuple[jax.Array, ...]:
    """What kernels wrote, of `copy_types`, as data and scales of both directions."""
    data, scale, data_rows, scale_rows = made
    data_rows = data_rows.T.reshape(shape) if transposed else data_rows
    return data, stored_scale(scale, format), data_rows, stored_scale(scale_rows, format)
