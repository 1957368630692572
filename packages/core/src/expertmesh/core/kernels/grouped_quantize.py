"""Rows in groups to 8 bits, as they are or at an index, for NVIDIA GPUs.

Group sizes are read on the device; padding rows are not read, and their data are zeros, of `Moved` rows undefined.
"""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import grouped_requantize
from expertmesh.core.kernels.choice.quantize import Rows, choose_both, reads_along_rows
from expertmesh.core.kernels.cuda import quantize_both as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import quantize as triton
from expertmesh.core.kernels.triton.grouped_quantize import by_group_of
from expertmesh.core.quantization.quantize_rows import Moved


@for_device
def grouped_quantize(
    source, group_sizes, multiplier, key, *, format, blocks, directions, device, amax_axes=(), origin=()
):  # fmt: skip
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant.

    Blocks in both directions take one pass unless the last dimension ends in a block.
    """
    del key, origin
    x, sizes = source.base, group_sizes[0].astype(jnp.int32)
    index = source.row_map.source_row if isinstance(source, Moved) else None
    if format.block is None:
        options = dict(format=format, twice=len(directions) == 2, amax_axes=amax_axes)
        return by_group_of(x, index, sizes, multiplier, **options)
    _, C, *rest = source.shape
    rows = Rows(C, prod(rest), x.dtype, format.block[1], device)
    if index is not None and directions == (1,):
        if reads_along_rows(rows):
            return grouped_requantize.along_rows(x, index, group_sizes, format)
        return _both(x, index, sizes, rows, source.shape, format)[2:]
    if len(directions) == 2 and (x.ndim == 3 or rest[-1] % rows.block == 0):
        return _both(x, index, sizes, rows, source.shape, format)
    return tuple(y for i in directions for y in triton.blocks(x, sizes, format, blocks[i]))


def _both(x, index, sizes, rows: Rows, shape, format):
    """(data, scale) of blocks along the last dimension, and of blocks along the rows."""
    (_, C, *rest), length, config = shape, rows.block, choose_both(rows)
    shapes = (1, C, *rest[:-1], -(-rest[-1] // length)), (1, -(-C // length), *rest)
    first, second = (result_types(shape, of_scale, format) for of_scale in shapes)
    if index is not None:
        first = first[0], first[1].update(shape=(prod(shapes[0][2:]), C))
    if config.transposed:
        second = jax.ShapeDtypeStruct((rows.columns, C), format.dtype), second[1]
    launch = cuda.launch if config.kernel == "cuda" else triton.launch_both
    data, scale, data_rows, scale_rows = launch(
        x, index, sizes, config=config, format=format, out_type=(*first, *second)
    )
    scale = scale if index is None else scale.T.reshape(shapes[0])
    data_rows = data_rows.T.reshape(shape) if config.transposed else data_rows
    return data, stored_scale(scale, format), data_rows, stored_scale(scale_rows, format)
