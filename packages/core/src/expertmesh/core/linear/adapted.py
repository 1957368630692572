"""A frozen weight with an adapter of low rank beside it: LoRA (arXiv:2106.09685).

    y = x W + (x A) B            dA = x^T (dy B^T)      dB = (x A)^T dy      dx = dy W^T + (dy B^T) A^T

It is one operand of a layer, a pytree in the place of the weight. So every function that takes a weight takes it, in
each mesh mode, without a new argument. The type says that W is frozen, so the backward rule has no GEMM for its
gradient, also where no compiler would remove one that is not read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.operands import FLOATS, Kind, check_arrays
from expertmesh.core.specs import pad_spec

__all__ = ["Adapted", "low_rank_spec"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen weight W with an adapter A B of low rank: W gets no gradient, A and B do.

    Attributes:
      weight: float[*E, K, *N], E being a grouped layer's experts, or a QuantizedArray. A GEMM uses a QuantizedArray as
        it is if its format is the recipe's; otherwise each GEMM dequantizes it.
      a, b: float[*E, K, R] and float[*E, R, *N]; their gradients have their dtypes. One of them includes the factor
        alpha / rank. Both None: the weight is frozen, and nothing is added.

    A, B and what is multiplied by them compute in the dtype of x under any recipe. `dense` and `grouped_dense` multiply
    x and dy as they are given; the experts of a block as they are quantized.
    """

    weight: Any
    a: jax.Array | None = None
    b: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return tuple(self.weight.shape)

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return len(self.weight.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight; what dequantizing gives where it is quantized."""
        dtype: jnp.dtype = jnp.dtype(self.weight.dtype)
        return dtype

    @property
    def is_low_rank(self) -> bool:
        """Whether there are A and B."""
        return self.a is not None


def is_low_rank(w: Any) -> bool:
    """Whether w is an Adapted with A and B."""
    return isinstance(w, Adapted) and w.is_low_rank


def base_of(w: Any) -> Any:
    """The weight itself."""
    return w.weight if isinstance(w, Adapted) else w


def check_weights(name: str, kind: Kind = FLOATS, /, **weights: Any) -> None:
    """Raises an error that names `name` unless each is an array of floats, or an Adapted of one, quantized or not."""
    for operand, weight in weights.items():
        given = {operand: base_of(weight)}
        check_arrays(name, kind, quantized=isinstance(weight, Adapted), **given)


def without_base(w: Any) -> Adapted | None:
    """A and B of an Adapted, for a backward rule; None of a weight that is trained."""
    return dataclasses.replace(w, weight=None) if isinstance(w, Adapted) else None


def low_rank_spec(
    spec: PartitionSpec | None, ndim: int, batch_dims: int
) -> tuple[PartitionSpec | None, PartitionSpec | None]:
    """Where A and B are, by the weight's spec: the rank is never split.

    Args:
      spec: of the weight [*E, K, *N]; None: not known, nor are theirs.
      ndim: of the weight.
      batch_dims: dimensions of E.
    """
    if spec is None:
        return None, None
    entries = tuple(pad_spec(spec, ndim))
    leading, K, N = entries[:batch_dims], entries[batch_dims], entries[batch_dims + 1 :]
    return PartitionSpec(*leading, K, None), PartitionSpec(*leading, None, *N)
