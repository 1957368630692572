"""Computes scales, and the multipliers that quantize, from the largest magnitudes of blocks and tensors.

The table of quantize.py says what is computed. Magnitudes are those of numerics.py: float32's bits as integers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.recipe import TensorFormat


@partial(jax.jit, static_argnames="block")
def block_amax(magnitudes: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """The largest magnitude of each block, [ceil(shape / block)]; a partial last block has its own."""
    counts = [-(-n // b) for n, b in zip(magnitudes.shape, block, strict=True)]
    padding = [(0, m * b - n) for n, m, b in zip(magnitudes.shape, counts, block, strict=True)]
    split = [size for pair in zip(counts, block, strict=True) for size in pair]
    inner = tuple(range(1, 2 * len(block), 2))
    return jnp.max(jnp.pad(magnitudes, padding).reshape(split), axis=inner)


@partial(jax.jit, static_argnames=("shape", "block"))
def repeat_blocks(values: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """One value per block, repeated over the elements of its block."""
    # Else the compiler computes the value of a block for each of its elements.
    values = jax.lax.optimization_barrier(values)
    for dim, (size, b) in enumerate(zip(shape, block, strict=True)):
        if b > 1:
            values = jax.lax.slice_in_dim(jnp.repeat(values, b, axis=dim), 0, size, axis=dim)
    return values


def amax_multiplier(magnitudes: jax.Array, largest: float, limit: float) -> jax.Array:
    """largest / amax, at most `limit`; 1 where amax is 0, Inf or NaN."""
    is_regular = numerics.is_regular(magnitudes)
    is_normal = is_regular & (magnitudes > 0x007FFFFF)
    amax = numerics.from_magnitude(jnp.where(is_normal, magnitudes, 0x3F800000))
    quotient = jnp.minimum(numerics.divide(jnp.float32(largest), amax), jnp.float32(limit))
    # A subnormal amax is too small for any format.
    quotient = jnp.where(is_normal, quotient, jnp.float32(limit))
    return jnp.where(is_regular, quotient, jnp.float32(1))


def reciprocal(multiplier: jax.Array) -> jax.Array:
    out: jax.Array = numerics.divide(jnp.float32(1), multiplier)
    return out


@partial(jax.jit, static_argnames="format")
def tensor_scales(magnitudes: jax.Array, format: TensorFormat) -> tuple[jax.Array, jax.Array]:
    """(multiplier, scale) of tensors with these amax; for two-level formats g and tensor_scale."""
    most = 6.0 * 448.0 if format.scale == "float8_e4m3fn" else numerics.largest(format.dtype)
    multiplier = amax_multiplier(magnitudes, most, numerics.largest(jnp.float32))
    return multiplier, reciprocal(multiplier)


@partial(jax.jit, static_argnames=("format", "dtype"))
def block_scales(
    magnitudes: jax.Array,
    format: TensorFormat,
    dtype: DTypeLike,
    tensor_multiplier: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(multiplier, scale as stored) of blocks with these amax.

    Args:
      magnitudes: int32, of each block.
      dtype: of what is quantized.
      tensor_multiplier: g, to be broadcast with `magnitudes`; of two-level formats.
    """
    most = numerics.largest(format.dtype)
    if format.scale == "float8_e8m0fnu":
        return _exponent_scales(magnitudes, most)
    if format.scale == "float8_e4m3fn":
        return _two_level_scales(magnitudes, most, tensor_multiplier)
    floor = numerics.magnitude(jnp.float32(format.amax_epsilon))
    magnitudes = jnp.maximum(magnitudes, floor)
    if format.scale == "float32":
        multiplier = amax_multiplier(magnitudes, most, numerics.largest(dtype))
        return multiplier, reciprocal(multiplier)
    return _power_of_2_scales(magnitudes, most)


def _power_of_2_scales(magnitudes: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    biased = jnp.minimum(254 - numerics.excess(magnitudes, most), 254)
    biased = jnp.where(numerics.is_regular(magnitudes), biased, 127)
    return numerics.power_of_2(biased), numerics.power_of_2(254 - biased)


def _exponent_scales(magnitudes: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """Powers of two, of which the exponent is stored."""
    byte = jnp.clip(numerics.excess(magnitudes, most), 0, 254)
    byte = jnp.where(magnitudes == numerics.INF, 254, byte)
    byte = jnp.where(magnitudes > numerics.INF, 255, byte)
    scale = jax.lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return numerics.power_of_2(jnp.where(byte == 255, 255, 254 - byte)), scale


def _two_level_scales(
    magnitudes: jax.Array, most: float, tensor_multiplier: Any
) -> tuple[jax.Array, jax.Array]:
    """The scale is rounded before the multiplier is made of it."""
    is_finite = magnitudes < numerics.INF
    unit = jnp.where(magnitudes < 0x10000000, jnp.float32(2.0**64), jnp.float32(1))
    amax = numerics.multiply(numerics.from_magnitude(magnitudes), unit)
    is_normal = is_finite & (amax > 0)
    share = numerics.divide(jnp.where(is_normal, amax, 1), jnp.float32(most))
    # Never subnormal, never too large: g is at most 2688 / amax, but for tensors of tiny numbers only.
    scale = jnp.where(is_normal, share * tensor_multiplier * (1 / unit), jnp.float32(0))
    scale = numerics.round_nearest(numerics.saturate(scale, jnp.float8_e4m3fn), jnp.float8_e4m3fn)
    exists = is_finite & (scale > 0)
    multiplier = numerics.divide(tensor_multiplier, jnp.where(exists, scale, 1))
    multiplier = jnp.where(exists, multiplier, jnp.float32(0))
    is_inf = magnitudes == numerics.INF
    multiplier = jnp.where(is_inf, numerics.divide(tensor_multiplier, jnp.float32(448)), multiplier)
    scale = jnp.where(is_inf, jnp.float32(448), scale)
    is_nan = magnitudes > numerics.INF
    scale = numerics.cast(jnp.where(is_nan, jnp.float32(jnp.nan), scale), jnp.float8_e4m3fn)
    return jnp.where(is_nan, jnp.float32(jnp.nan), multiplier), scale
