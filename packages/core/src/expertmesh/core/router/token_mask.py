"""Token masks: which tokens take part. Shared by the router's ops.

Dimension key: `...` tokens.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import BOOLS, check_arrays

__all__: list[str] = []


def check_token_mask(function: str, token_mask: jax.Array | None, tokens: tuple[int, ...]) -> None:
    """Refuses a mask that is not bool[tokens].

    Raises:
      TypeError: not bool.
      ValueError: another shape.
    """
    check_arrays(function, BOOLS, optional=True, token_mask=token_mask)
    if token_mask is not None and token_mask.shape != tokens:
        raise ValueError(
            f"{function}: token_mask must have one value per token; got token_mask.shape={token_mask.shape}, "
            f"tokens {tokens}; pass the mask of these tokens"
        )


def _num_tokens(token_mask):
    return jnp.sum(token_mask, dtype=jnp.int32)


_num_tokens_op = Op("num_tokens", _num_tokens, "... -> ()", summed=("...",), roles="tokens -> ()")


def count_tokens(token_mask: jax.Array) -> jax.Array:
    """Number of tokens that take part, over all shards: int32[]. An all-reduce of one integer."""
    return _num_tokens_op(token_mask)
