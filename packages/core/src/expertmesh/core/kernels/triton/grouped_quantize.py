"""Quantization of rows in groups to 8 bits for NVIDIA GPUs, by the kernels of `kernels/quantize.py`.

Group sizes are read on the device; padding rows are not read, and their data are zeros, of `Moved` rows undefined.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.triton import quantize
from expertmesh.core.quantization.quantize_rows import Moved


def grouped_quantize(
    source, group_sizes, multiplier, key, *, format, blocks, directions, amax_axes=(), origin=()
):
    """The leaves of what the reference of `quantization/quantize_rows.py` gives, for one participant.

    Blocks in both directions take one pass unless the last dimension ends in a block.
    """
    del key, origin
    x, sizes, both = source.base, group_sizes[0].astype(jnp.int32), len(directions) == 2
    index = source.row_map.source_row if isinstance(source, Moved) else None
    if format.block is not None:
        if index is not None and directions == (1,):
            return quantize.both(x, sizes, format, index)[2:]
        if both and (x.ndim == 3 or x.shape[-1] % format.block[1] == 0):
            return quantize.both(x, sizes, format, index)
        return tuple(y for i in directions for y in quantize.blocks(x, sizes, format, blocks[i]))
    options = dict(format=format, twice=both, amax_axes=amax_axes, clear_padding=index is None)
    return by_group(x, sizes, multiplier, index=index, **options)


def by_group(
    x, sizes, multiplier, *, format, twice, amax_axes, index=None, parts=None, clear_padding=True
):
    """The leaves for a scale per group, of the rows of `x` [1, rows, ...], or of those at the index, int32[1, C].

    Args:
      sizes: int32[G].
      multiplier: float32[1, G], or None: of the amax.
      twice: whether a copy for the weight gradient is wanted.
      amax_axes: over which the amax is maximised.
      parts, clear_padding: as of `quantize.by_tensor`.
    """
    C, ends = (x if index is None else index).shape[1], jnp.cumsum(sizes, dtype=jnp.int32)

    def found(parts, index):
        """The amax of each group, int32[1, G]."""
        amax = quantize.group_amax(parts[0], index, ends, C)[None]
        return jax.lax.pmax(amax, amax_axes) if amax_axes else amax

    shape = (1, C, x.size // x.shape[1])
    options = dict(ends=ends, index=index, twice=twice, clear_padding=clear_padding)
    data, scale, *more = quantize.by_tensor(
        x, multiplier, shape, found, format, parts=parts, **options
    )
    again = (more.pop(), scale) if twice else ()
    return data, scale, *again, *more
