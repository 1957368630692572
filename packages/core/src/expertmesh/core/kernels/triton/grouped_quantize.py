"""Quantization of rows in groups to 8 bits for NVIDIA GPUs, by the kernels of `kernels/quantize.py`.

Group sizes are read on the device; rows after the last group are not read, and their data are written as zeros.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.triton import quantize


def grouped_quantize(
    x, group_sizes, *rest, format, block, has_multiplier, twice=False, amax_axes=(), origin=()
):
    """As the reference of `ops/grouped_quantize.py`, for one participant."""
    del origin
    sizes = group_sizes[0].astype(jnp.int32)
    if block:
        return quantize.blocks(x, sizes, format, block)
    C = x.shape[1]

    def found(parts):
        """The amax of each group, int32[1, G]."""
        ends = jnp.cumsum(sizes)[:, None]
        rows = jnp.arange(C)
        mine = (rows >= ends - sizes[:, None]) & (rows < ends)
        amax = jnp.max(jnp.where(mine, jnp.max(parts[0], axis=1), 0), axis=1, initial=0)[None]
        return jax.lax.pmax(amax, amax_axes) if amax_axes else amax

    multiplier = rest[0] if has_multiplier else None
    return quantize.by_tensor(x, multiplier, sizes, (1, C, x.size // C), found, format, twice)


def grouped_quantize_both(x, group_sizes, *, format, blocks, amax_axes=(), origin=()):
    """(data, scale) along the last dimension, and along the rows: one pass unless the last one ends in a block."""
    del amax_axes, origin
    sizes = group_sizes[0].astype(jnp.int32)
    if x.ndim == 3 or x.shape[-1] % format.block[1] == 0:
        return quantize.both(x, sizes, format)
    return tuple(part for block in blocks for part in quantize.blocks(x, sizes, format, block))
