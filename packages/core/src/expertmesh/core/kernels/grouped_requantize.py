"""Rows quantized along their features, quantized again along the rows, for NVIDIA GPUs."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Rows, choose_requantize
from expertmesh.core.kernels.cuda import grouped_requantize as cuda
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import grouped_requantize as triton


def grouped_requantize(source, group_sizes, multiplier, key, *, format, **options):
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant."""
    del multiplier, key, options  # a block lies within a shard
    data, scale, dtype = source.base.data, source.base.scale, jnp.dtype(source.base.dtype)
    (_, C, K), block = data.shape, format.block[1]
    config = choose_requantize(Rows(C, K, dtype, block, current_device()))
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    data_bytes = jax.lax.bitcast_convert_type(data, jnp.uint8)
    out_type = result_types(
        (K, C) if config.transposed else data.shape, (1, -(-C // block), K), format
    )
    operands = data_bytes, scale, group_sizes[0].astype(jnp.int32)
    options = dict(config=config, format=format, dtype=dtype, out_type=out_type)
    room = cuda if config.kernel == "cuda" else triton
    out, out_scale = room.launch(*operands, **options)
    out = out.T.reshape(data.shape) if config.transposed else out
    return out, stored_scale(out_scale, format)
