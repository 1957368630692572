"""Expert ids: what every op that takes choices does to them first."""

import jax
import jax.numpy as jnp

__all__: list[str] = []


def wide_ids(topk_idx: jax.Array) -> jax.Array:
    """A narrow integer could not hold every expert id that it is compared with or replaced by."""
    return topk_idx if topk_idx.dtype.itemsize >= 4 else topk_idx.astype(jnp.int32)
