"""Float32 arithmetic that gives the same bits on every platform, compiled or not.

Compilers and devices do not: XLA:CPU takes subnormal numbers as zero, XLA:GPU divides with an error of 2 ulp, a cast to
8 bits may round twice, and a pair of casts there and back may be dropped. So magnitudes are compared as integers,
quotients are corrected by their remainder, and numbers are rounded in float32 before a cast, which is then exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

INF = 0x7F800000  # of float32, as integers
_LARGEST = 0x7F7FFFFF
_MANTISSA = 0x007FFFFF
NAN_CODE = 0x7F  # of both 8-bit formats, as NVIDIA's conversions write it


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.jit
def widen(x: jax.Array) -> jax.Array:
    """x as float32, subnormal numbers too."""
    if x.dtype == jnp.bfloat16:
        wide = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(wide, jnp.float32)
    return x.astype(jnp.float32)


@jax.jit
def magnitude(x: jax.Array) -> jax.Array:
    """The bits of |x| as int32, ordered as the magnitudes are: 0, subnormal, normal, Inf, NaN."""
    return _bits(widen(x)) & 0x7FFFFFFF


def is_regular(magnitudes: jax.Array) -> jax.Array:
    """Whether a magnitude is neither 0 nor Inf nor NaN."""
    return (magnitudes > 0) & (magnitudes < INF)


def from_magnitude(magnitudes: jax.Array) -> jax.Array:
    """The float32 of these bits."""
    return _float(magnitudes)


def _normal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y, unit) with x = y * unit and neither of them subnormal."""
    bits = _bits(x)
    tiny = (bits & INF) == 0
    mantissa = (bits & _MANTISSA).astype(jnp.float32) * jnp.float32(2.0**-23)
    signed = jnp.where(bits < 0, -mantissa, mantissa)
    return jnp.where(tiny, signed, x), jnp.where(tiny, jnp.float32(2.0**-126), jnp.float32(1))


@jax.jit
def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32 x * y, rounded once, where x or y is subnormal too; a subnormal product is zero."""
    (x, x_unit), (y, y_unit) = _normal(x), _normal(y)
    product = x * y * (x_unit * y_unit)
    return flush(product)


def flush(x: jax.Array) -> jax.Array:
    """float32 x with zeros for subnormal numbers."""
    return jnp.where(jnp.abs(x) < jnp.float32(2.0**-126), x * 0, x)


@jax.jit
def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y of positive normal float32, rounded to nearest, ties to even; at most the largest finite number."""
    x_bits, y_bits = jnp.broadcast_arrays(_bits(x), _bits(y))
    exponent = (x_bits >> 23) - (y_bits >> 23)
    over, under = ((bits & _MANTISSA) | (_MANTISSA + 1) for bits in (x_bits, y_bits))
    small = (over < under).astype(jnp.int32)
    exponent -= small
    ratio = over.astype(jnp.float32) / under.astype(jnp.float32)
    quotient = (ratio * jnp.where(small > 0, 2.0**24, 2.0**23).astype(jnp.float32)).astype(
        jnp.int32
    )
    quotient, rest = corrected(quotient, over, under, 23 + small)
    lost_bits = jnp.clip(-126 - exponent, 0, 25)  # by which a subnormal result is shorter
    lost = quotient & ((1 << lost_bits) - 1)
    kept = quotient >> lost_bits
    # Twice what is lost, against the unit of what is kept: the remainder counts as a fraction of a unit of `quotient`.
    whole = lost_bits == 0
    half = (1 << lost_bits) >> 1
    above = jnp.where(whole, 2 * rest > under, (lost > half) | ((lost == half) & (rest > 0)))
    # A normal quotient of 24-bit numbers is never a tie, and never rounded up to a power of two.
    tie = ~whole & (lost == half) & (rest == 0)
    kept += (above | (tie & ((kept & 1) > 0))).astype(jnp.int32)
    bits = kept + (jnp.maximum(exponent, -126) + 126 << 23)
    return _float(jnp.where(exponent > 127, _LARGEST, bits))


def corrected(
    quotient: jax.Array, over: jax.Array, under: jax.Array, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(quotient, rest) of int32 `over << shift` by `under`, of a quotient that is wrong by at most 3."""
    # Both products exceed 32 bits; their difference does not.
    rest = (over << shift) - quotient * under
    for _ in range(3):
        step = (rest >= under).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
        quotient, rest = quotient + step, rest - step * under
    return quotient, rest


def power_of_2(biased: jax.Array) -> jax.Array:
    """2^(biased - 127) for int32 0 .. 254, NaN for 255."""
    bits = jnp.where(biased == 0, 0x00400000, jnp.left_shift(biased, 23))
    return _float(jnp.where(biased == 255, 0x7FC00000, bits))


def scale_values(scale: jax.Array) -> jax.Array:
    """A stored scale as float32."""
    if scale.dtype == jnp.float8_e8m0fnu:
        return power_of_2(jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32))
    return scale.astype(jnp.float32)


def excess(magnitudes: jax.Array, largest: float) -> jax.Array:
    """The biased exponent of the least power of two that is at least magnitude / largest, unclamped."""
    bits = _number_bits(largest)
    return (
        (magnitudes >> 23)
        - (bits >> 23)
        + 127
        + ((magnitudes & _MANTISSA) > (bits & _MANTISSA)).astype(jnp.int32)
    )


def _number_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def largest(dtype: DTypeLike) -> float:
    """The largest finite number of a format."""
    return float(jnp.finfo(dtype).max)


@partial(jax.jit, static_argnames="dtype")
def saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 x clipped to the finite numbers of `dtype`; NaN stays."""
    bound = jnp.float32(largest(dtype))
    return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))


@partial(jax.jit, static_argnames="dtype")
def round_nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 x rounded to the numbers of `dtype`, ties to even, within its range; still float32."""
    info = jnp.finfo(dtype)
    # Below its normal numbers a format has those of their first binade's spacing.
    step = 2.0 ** (int(info.minexp) - int(info.nmant))
    fine = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=int(info.nmant))
    coarse = jax.lax.round(x * jnp.float32(1 / step), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    is_normal = jnp.abs(x) >= jnp.float32(2.0 ** int(info.minexp))
    return jnp.where(is_normal, fine, coarse * jnp.float32(step))


@partial(jax.jit, static_argnames="dtype")
def round_stochastically(x: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """float32 x rounded to one of its neighbours in `dtype`, to the farther one as often as it is near; still float32.

    Args:
      x: within the range of `dtype`, for whose steps 24 random bits are enough.
      bits: uint32, one per number.
    """
    info = jnp.finfo(dtype)
    magnitudes = _bits(x) & 0x7FFFFFFF
    exponent = jnp.maximum((magnitudes >> 23) - 127, int(info.minexp))
    # Exact: powers of two.
    units = jnp.abs(x) * power_of_2(127 + int(info.nmant) - exponent)
    below = jnp.floor(units)
    chance = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    rounded = below + (chance < units - below).astype(jnp.float32)
    out: jax.Array = jnp.where(_bits(x) < 0, -1.0, 1.0).astype(jnp.float32) * (
        rounded * power_of_2(127 - int(info.nmant) + exponent)
    )
    return out


@partial(jax.jit, static_argnames="dtype")
def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 x, already one of the numbers of `dtype`, in `dtype`; NaN is `NAN_CODE`, or 0 where there is none."""
    is_nan = jnp.isnan(x)
    if jnp.dtype(dtype) == jnp.float4_e2m1fn:
        return _four_bits(jnp.where(is_nan, jnp.float32(0), x))
    codes = jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.where(is_nan, jnp.uint8(NAN_CODE), codes), dtype)


def _four_bits(x: jax.Array) -> jax.Array:
    """The same bits as `astype`, which XLA:CPU takes twice as long for."""
    bits = _bits(x)
    magnitudes = bits & 0x7FFFFFFF
    # From 1 on, two bits of exponent and one of mantissa; below, 0 and 1/2.
    codes = jnp.where(
        magnitudes >= 0x3F800000, (magnitudes >> 22) - 252, (magnitudes > 0).astype(jnp.int32)
    )
    codes |= (bits >> 28) & 8
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
