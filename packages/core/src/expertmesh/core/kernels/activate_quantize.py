"""A gated activation, or its gradient, quantized in both directions for NVIDIA GPUs, and not written itself.

Dimension key as in `quantization/activate_quantize.py`.
"""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Activated, choose_activation
from expertmesh.core.kernels.cuda import activate_quantize as cuda
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import activate_quantize as triton
from expertmesh.core.ops.row_map import holds_token


def activate_quantize(source, group_sizes, multiplier, key, *, format, **options):
    """[1, C, 2, F] -> (data [1, C, F], scale) along F, and along the rows; with [1, C, F] -> of [1, C, 2, F].

    With weights the gradient has theirs, float32[1, C], too.
    """
    del multiplier, key, options  # a block lies within a shard
    h, d_out, activation = source.base, getattr(source, "d_out", None), source.activation
    (_, C, _, F), block = h.shape, format.block[1]
    grad_dtype = None if d_out is None else d_out.dtype
    config = choose_activation(Activated(C, F, h.dtype, block, current_device(), grad_dtype))
    halves = () if d_out is None else (2,)
    shape = (1, C, *halves, F)
    counts = (1, C, *halves, -(-F // block)), (1, -(-C // block), *halves, F)
    first, second = (result_types(shape, count, format) for count in counts)
    if config.transposed:
        second = jax.ShapeDtypeStruct((prod(halves) * F, C), format.dtype), second[1]
    weights = () if source.weights is None else (source.weights, source.row_source)
    operands = h, d_out, weights, group_sizes[0].astype(jnp.int32)
    options = dict(config=config, activation=activation, format=format, out_type=(*first, *second))
    room = cuda if config.kernel == "cuda" else triton
    data, scale, data_rows, scale_rows, *sums = room.launch(*operands, **options)
    data_rows = data_rows.T.reshape(shape) if config.transposed else data_rows
    # What no program has written is of rows without a token.
    d_weights = [jnp.where(holds_token(source.row_source), x.sum(0), jnp.float32(0)) for x in sums]
    copies = data, stored_scale(scale, format), data_rows, stored_scale(scale_rows, format)
    return *copies, *d_weights
