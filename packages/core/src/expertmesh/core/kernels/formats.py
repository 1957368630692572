"""What kernels of all languages know of a format, and how they write its scales."""

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core.quantization import numerics
from expertmesh.core.quantization.quantized import QuantizedArray, bits_of


def result_types(shape, counts, format):
    """Types of data and scale as the kernels write them: bytes for the scales that Triton has no type of."""
    scale = jnp.uint8 if format.scale == "float8_e8m0fnu" else jnp.float32
    return jax.ShapeDtypeStruct(shape, format.dtype), jax.ShapeDtypeStruct(counts, scale)


def as_bytes(x) -> tuple[jax.Array, jax.Array | None]:
    """An array and None, or of what is quantized in blocks the data as bytes and `scale_bytes`."""
    if not isinstance(x, QuantizedArray):
        return x, None
    return bits_of(x.data), scale_bytes(x.scale)


def scale_bytes(scale):
    """Scales as kernels read them: bytes of those that Triton has no type of."""
    return bits_of(scale) if scale.dtype == jnp.float8_e8m0fnu else scale


def stored_scale(scale, format):
    """What a kernel wrote, in the format's type."""
    if format.scale != "float8_e8m0fnu":
        return scale
    return jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)


def scaling(dtype, format) -> dict:
    """What a kernel that quantizes numbers of `dtype` is told of the format; a tensor's scale is any of float32."""
    return {
        "SCALE": format.scale,
        "LARGEST": largest_bits(format.dtype),
        "LIMIT": numerics.largest(dtype if format.block else "float32"),
        "FLOOR": _bits(format.amax_epsilon if format.block else 0),
    }


def largest_bits(dtype) -> int:
    """Of the largest number of a type, as float32; 0 of None."""
    return 0 if dtype is None else _bits(numerics.largest(dtype))


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
