"""Rows in groups to 8 bits for NVIDIA GPUs: by Triton's kernels; of tokens along the rows alone, by one of Hopper's."""

from expertmesh.core.kernels import grouped_requantize
from expertmesh.core.kernels.choice.quantize import Rows, reads_along_rows
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.triton import grouped_quantize as triton
from expertmesh.core.quantization.quantize_rows import Moved


@for_device
def grouped_quantize(
    source, group_sizes, multiplier, key, *, format, directions, device, **options
):
    """As `triton/grouped_quantize.py`."""
    if isinstance(source, Moved) and format.block is not None and directions == (1,):
        _, C, K = source.shape
        if reads_along_rows(Rows(C, K, source.dtype, format.block[1], device)):
            index = source.row_map.source_row
            return grouped_requantize.along_rows(source.base, index, group_sizes, format)
    options |= dict(format=format, directions=directions)
    return triton.grouped_quantize(source, group_sizes, multiplier, key, **options)
