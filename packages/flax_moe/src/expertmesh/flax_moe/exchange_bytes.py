"""How many bytes the block's exchanges send, from shapes alone.

    bytes of a leg = tokens that leave a device, counted once for each device they go to, x bytes of a token on the way

Dimension key: T tokens per device, K choices, R ranks of the EP group, D width of what experts see.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.operands import check_counts
from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.core.quantization.recipe import TensorFormat, current_recipe
from expertmesh.core.support import platform_of
from expertmesh.ep.transports import choose_auto
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.transports.names import parse
from expertmesh.ep.wire import sum_dtype
from expertmesh.flax_moe.config import MoEConfig, dispatches_quantized

__all__ = ["exchange_bytes"]


def exchange_bytes(
    config: MoEConfig, *, model_dim: int, num_tokens: int, ep_size: int
) -> dict[str, int]:
    """Bytes that one device sends to the others of its EP group in a call of the block, forward and backward.

    The number depends on shapes and the transport, not on what the router chooses. Over "nvlink" and "ragged" a token
    goes once to each rank that has experts of it: the number is the most that it can be, T min(K, R - 1) tokens.

    Args:
      config: see MoEConfig.
      model_dim: D of x.
      num_tokens: T of one device, in one call (of all its `num_chunks`).
      ep_size: R.

    Returns:
      `dispatch` and `combine` of the forward, `backward_dispatch` (of the gradients of y) and `backward_combine` (of
      those of x). Choices and routing weights, 8 K bytes a token and way, are not counted; nor are copies of weights
      under `num_spare_experts`. All are 0 if R is 1.

    Raises:
      ValueError: a size below 1, or `transport="two_level"` and R > 1: its bytes depend on the hosts.
    """
    MoEConfig.check("exchange_bytes", config=config)
    check_counts("exchange_bytes", model_dim=model_dim, num_tokens=num_tokens, ep_size=ep_size)
    if ep_size > 1 and parse(config.transport).is_two_level:
        raise ValueError(
            "exchange_bytes: transport must be of one level; "
            f"got transport={config.transport!r}; name the transport inside a host"
        )
    config = config.under(current_recipe())
    D = model_dim if config.latent_dim is None else config.latent_dim
    plain, sums = _row_bytes(config.dtype, D), _row_bytes(_sum_dtype(config), D)
    legs: dict[str, tuple[int, DTypeLike]] = {
        "dispatch": (plain, config.dtype),
        "combine": (sums, config.dtype),
        "backward_dispatch": (plain, config.dtype),
        "backward_combine": (sums, config.dtype),
    }
    if dispatches_quantized(config.recipe):
        formats = config.recipe.formats()
        legs["dispatch"] = (_row_bytes(formats.x, D), jnp.uint8)
        if not parse(config.transport).adds_on_the_way:
            back = formats.grad_dgrad if config.quantize_backward_combine else config.dtype
            legs["backward_combine"] = (_row_bytes(back, D), config.dtype)
    return {
        leg: _tokens_sent(config, num_tokens, ep_size, dtype) * size
        for leg, (size, dtype) in legs.items()
    }


def _sum_dtype(config: MoEConfig) -> DTypeLike:
    """In which what the experts of a rank make of a token travels back; "ring" adds on the way."""
    if parse(config.transport).adds_on_the_way:
        return accumulator_dtype(config.dtype)
    return sum_dtype(config.dtype, config.top_k)


def _tokens_sent(config: MoEConfig, num_tokens: int, ep_size: int, dtype: DTypeLike) -> int:
    name = parse(config.transport).base
    if name == "auto":
        name = choose_auto(
            Exchange(
                num_tokens=num_tokens,
                top_k=config.top_k,
                capacity=ep_size * num_tokens,
                ep_size=ep_size,
                dtype=dtype,
                platform=platform_of(),
            )
        )
    if name in ("nvlink", "ragged"):
        return num_tokens * min(config.top_k, ep_size - 1)
    # A block has room for all tokens, and so has a capacity of the balanced load or more.
    return num_tokens * (ep_size - 1)


def _row_bytes(format: TensorFormat | DTypeLike, width: int) -> int:
    """Of one token."""
    if not isinstance(format, TensorFormat):
        return width * jnp.dtype(format).itemsize
    assert format.block is not None
    scale = 1 if format.scale == "float8_e8m0fnu" else 4
    return width + -(-width // format.block[1]) * scale
