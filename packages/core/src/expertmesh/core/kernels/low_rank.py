"""Terms of low rank in grouped GEMMs of rows: out += u b, b being each group's.

Dimension key as in `linear/grouped_gemm.py`; R the rank, W the width of the result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

STEP = 8  # of the rank, that TMA takes, in 16 bits


class LowRank(NamedTuple):
    """A term of one participant's rows.

    Attributes:
      u: [C, R].
      b: [G, R, W], or [G, W, R] where the weight is transposed, in the dtype of u.
    """

    u: jax.Array
    b: jax.Array

    @property
    def rank(self) -> int:
        """R."""
        return self.u.shape[1]

    def astype(self, dtype) -> "LowRank":
        """In another dtype."""
        return LowRank(*(x.astype(dtype) for x in self))

    def transposed(self) -> "LowRank":
        """For a weight that lies the other way; b is small beside the rows."""
        return LowRank(self.u, jnp.swapaxes(self.b, 1, 2))


def of_operands(operands, *, transposed: bool) -> LowRank | None:
    """Of an op's operands: none, or u [1, C, R] and b [G, R, *N], or [G, K, R] if `transposed`; R in whole steps."""
    if not operands:
        return None
    u, b = operands
    b = b if transposed else b.reshape(*b.shape[:2], -1)
    more = 0, -u.shape[-1] % STEP
    if not more[1]:
        return LowRank(u[0], b)
    none = 0, 0
    of_b = (none, none, more) if transposed else (none, more, none)
    return LowRank(jnp.pad(u[0], (none, more)), jnp.pad(b, of_b))
