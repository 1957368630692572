"""Expert ids: what every op that takes choices does to them first."""

import jax
import jax.numpy as jnp
from jax.experimental import checkify

__all__: list[str] = []


def wide_ids(topk_idx: jax.Array) -> jax.Array:
    """A narrow integer could not hold every expert id that it is compared with or replaced by."""
    return topk_idx if topk_idx.dtype.itemsize >= 4 else topk_idx.astype(jnp.int32)


def debug_check_ids(function: str, topk_idx: jax.Array, num_experts: int) -> None:
    """Under `jax.experimental.checkify.checkify` an id >= num_experts is an error."""
    checkify.debug_check(
        jnp.all(wide_ids(topk_idx) < num_experts),
        f"{function}: expert ids must be below num_experts={num_experts}; got {{most}}",
        most=jnp.max(topk_idx, initial=0),
    )
