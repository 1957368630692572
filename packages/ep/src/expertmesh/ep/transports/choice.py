"""Which transport "auto" stands for, as a function of values: tested without a GPU.

Dimension key as in route.py.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.ep.transports.blocks import block_rows
from expertmesh.ep.wire import sum_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a transport is asked to move.

    Attributes:
      num_tokens, top_k, capacity, ep_size: T, K, C, R.
      dtype: of tokens and rows.
      platform: JAX's lowering platform.
      wire: the format or dtype of sums on their way back; None: as they are.
      levels: 2 where the handle says which rows are on which host.
    """

    num_tokens: int = 1
    top_k: int = 1
    capacity: int = 1
    ep_size: int = 1
    dtype: DTypeLike = jnp.float32
    platform: str
    wire: TensorFormat | str | None = None
    levels: int = 1

    @property
    def moves(self) -> bool:
        """Whether anything goes from one rank to another."""
        return self.ep_size > 1 and self.num_tokens * self.top_k > 0


@dataclasses.dataclass(frozen=True)
class Unlinked:
    """What "auto" takes in place of "nvlink"; equal for the same transport and reason, whatever the sizes are.

    Attributes:
      name: the transport.
      reason: why "nvlink" is not known to run.
      received: of `received`.
    """

    name: str
    reason: str
    received: Mapping[str, int] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        costs = ", ".join(f"{name!r} {size}" for name, size in self.received.items())
        return (
            f"expertmesh.ep: transport 'auto' takes {self.name!r}, by the bytes that a rank receives for each feature "
            f"in a dispatch and a combine: {costs}; not 'nvlink', the fastest between GPUs of one host: {self.reason}"
        )


def received(exchange: Exchange) -> dict[str, int]:
    """Bytes that a rank receives for each feature in one dispatch and one combine, by the transport.

    ring: (R - 1) * T * (itemsize + wide); all_to_all: (R - 1) * B * (itemsize + back) with B = min(T, C), wide = 4
    (8 of float64) and back = itemsize if K is 1, else wide.
    """
    dtype, others = jnp.dtype(exchange.dtype), exchange.ep_size - 1
    wide, back = accumulator_dtype(dtype), sum_dtype(dtype, exchange.top_k)
    block = block_rows(exchange.num_tokens, exchange.capacity)
    return {
        "ring": others * exchange.num_tokens * (dtype.itemsize + wide.itemsize),
        "all_to_all": others * block * (dtype.itemsize + back.itemsize),
    }


def choose(exchange: Exchange, *, linked: bool) -> str:
    """The transport that receives the fewest bytes; "ring" at equal cost.

    "ragged" is never chosen: measured on 4 H200 (jax 0.11.2), it moves 8 GB/s where all_to_all moves 220 to 300.

    Args:
      linked: whether "nvlink" is known to run; it is the fastest.
    """
    if exchange.ep_size == 1:
        return "local"
    if linked:
        return "nvlink"
    costs = received(exchange)
    return min(costs, key=lambda name: costs[name])
