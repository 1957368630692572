"""Routing maps: the chosen experts of each token as one flag per expert.

    bytemap: bool[..., E]
    bitmap:  uint8[..., ceil(E / 8)]; expert e is bit e % 8 (1 << e % 8) of byte e // 8; unused bits are 0

Dimension key: `...` tokens, K choices per token, E experts.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.operands import FLAGS, INTEGERS, check_arrays, wide_ids

__all__ = ["ROUTING_MAP_FORMATS", "from_routing_map", "to_routing_map"]

ROUTING_MAP_FORMATS = ("bytemap", "bitmap")


def to_routing_map(topk_idx: jax.Array, num_experts: int, format: str = "bytemap") -> jax.Array:
    """Flags of the chosen experts: map[..., e] = any_k(topk_idx[..., k] == e).

    Args:
      topk_idx: int[..., K]; values outside [0, E), such as -1 for "not routed", set no flag.
      num_experts: E.
      format: "bytemap" or "bitmap".

    Returns:
      bool[..., E] or uint8[..., ceil(E / 8)], in the module's formats.

    Raises:
      ValueError: an unknown format, or no dimension of choices.
      TypeError: `topk_idx` is not of integers.

    No communication, however tokens are sharded.
    """
    check_format("to_routing_map", format)
    check_arrays("to_routing_map", INTEGERS, topk_idx=topk_idx)
    if topk_idx.ndim < 1:
        raise ValueError(
            f"to_routing_map: topk_idx must be [..., K]; got topk_idx.shape={topk_idx.shape}; add topk_idx[None]"
        )
    out: jax.Array = _to_map_op(topk_idx, num_experts=num_experts, packed=format == "bitmap")
    return out


def from_routing_map(
    routing_map: jax.Array, num_experts: int, top_k: int, format: str = "bytemap"
) -> jax.Array:
    """Expert indices of a routing map; inverse of `to_routing_map` but for the order of the choices.

    Args:
      routing_map: bool[..., E] (or integers, where nonzero is chosen), or uint8[..., ceil(E / 8)].
      num_experts: E.
      top_k: K, at most E.
      format: "bytemap" or "bitmap".

    Returns:
      int32[..., K]: ascending, then -1 where a token has fewer than K experts. Of more than K the lowest K. Unused bits
      of a bitmap are not read.

    Raises:
      ValueError: an unknown format, a last dimension that does not fit, or top_k outside [1, E].
      TypeError: a bytemap of floats, or a bitmap that is not uint8.

    No communication, however tokens are sharded.
    """
    check_format("from_routing_map", format)
    check_arrays("from_routing_map", FLAGS, routing_map=routing_map)
    packed = format == "bitmap"
    width = -(-num_experts // 8) if packed else num_experts
    if packed and routing_map.dtype != jnp.uint8:
        raise TypeError(
            f"from_routing_map: a bitmap must be of uint8; got dtype={routing_map.dtype}; format must be one of "
            f"{', '.join(ROUTING_MAP_FORMATS)}"
        )
    if routing_map.shape[-1:] != (width,):
        raise ValueError(
            f"from_routing_map: the last dimension of a {format} of {num_experts} experts must be {width}; "
            f"got routing_map.shape={routing_map.shape}; pass the map's own num_experts"
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            "from_routing_map: top_k must be at least 1 and at most num_experts; "
            f"got top_k={top_k}, num_experts={num_experts}; change top_k"
        )
    out: jax.Array = _from_map_op(routing_map, num_experts=num_experts, top_k=top_k, packed=packed)
    return out


def check_format(function: str, value: str) -> None:
    """Raises ValueError unless it is one of ROUTING_MAP_FORMATS."""
    if value not in ROUTING_MAP_FORMATS:
        raise ValueError(
            f"{function}: format must be one of {', '.join(ROUTING_MAP_FORMATS)}; got format={value!r}; "
            "choose one of these"
        )


def _to_map(topk_idx: jax.Array, *, num_experts: int, packed: bool) -> jax.Array:
    topk_idx = wide_ids(topk_idx)
    expert_E = jnp.arange(num_experts, dtype=topk_idx.dtype)
    chosen = jnp.any(topk_idx[..., None] == expert_E, axis=-2)
    return jnp.packbits(chosen, axis=-1, bitorder="little") if packed else chosen


def _from_map(routing_map: jax.Array, *, num_experts: int, top_k: int, packed: bool) -> jax.Array:
    if packed:
        routing_map = jnp.unpackbits(routing_map, axis=-1, count=num_experts, bitorder="little")
    # The lower the expert, the greater the key; 0 for none.
    key = jnp.where(routing_map != 0, num_experts - jnp.arange(num_experts, dtype=jnp.int32), 0)
    top_key = jax.lax.top_k(key, top_k)[0]
    return jnp.where(top_key > 0, num_experts - top_key, -1)


# The last dimension of a bitmap is bytes, not experts.
_to_map_op = Op(
    "to_routing_map", _to_map, "... k -> ... b", whole=("k", "b"), roles="tokens . -> tokens ."
)
_from_map_op = Op(
    "from_routing_map", _from_map, "... b -> ... k", whole=("k", "b"), roles="tokens . -> tokens ."
)
