"""Rows quantized in blocks along the rows, as they are or of tokens at an index, for NVIDIA GPUs."""

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Rows, choose_requantize
from expertmesh.core.kernels.cuda import grouped_requantize as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import as_bytes, result_types, stored_scale
from expertmesh.core.kernels.triton import grouped_requantize as triton


def grouped_requantize(source, group_sizes, multiplier, key, *, format, **options):
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant."""
    del multiplier, key, options  # a block lies within a shard
    return along_rows(source.base, None, group_sizes, format)


def move_requantize(source, group_sizes, multiplier, key, *, format, **options):
    """The leaves of what the reference of `quantization/grouped_requantize.py` gives, for one participant."""
    del multiplier, key, options
    return along_rows(source.base, source.row_map.source_row, group_sizes, format)


@for_device
def along_rows(x, index, group_sizes, format, *, device):
    """(data, scale) in blocks along the rows of x, or of its rows at an index, int32[1, C]; x: an array of 16 bits on
    Hopper, or quantized.
    """
    (data, scale), dtype = as_bytes(x), jnp.dtype(x.dtype)
    (_, tokens, K), block = data.shape, format.block[1]
    C = tokens if index is None else index.shape[1]
    config = choose_requantize(Rows(C, K, dtype, block, device))
    shape = 1, C, K
    out_type = result_types((K, C) if config.transposed else shape, (1, -(-C // block), K), format)
    operands = data, scale, index, group_sizes[0].astype(jnp.int32)
    options = dict(config=config, format=format, dtype=dtype, out_type=out_type)
    room = cuda if config.kernel == "cuda" else triton
    out, out_scale = room.launch(*operands, **options)
    return out.T.reshape(shape) if config.transposed else out, stored_scale(out_scale, format)
