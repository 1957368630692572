"""Quantization by loops over blocks, in NumPy and ml_dtypes, as the table of core's `quantization/quantize.py` says.

Products and quotients are made in float64 and rounded to the 24 bits of float32 by `round24`, which knows no subnormal
numbers; ml_dtypes rounds to 8 and 4 bits.
"""

import dataclasses

import ml_dtypes
import numpy as np

from expertmesh.core import TensorFormat

FLOAT32 = ml_dtypes.finfo(np.float32)


@dataclasses.dataclass
class Quantized:
    """Data and scales as float64, NaN included, and the codes of both as bytes."""

    data: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None = None

    def codes(self, format: TensorFormat):
        """(data, scale, tensor_scale) as unsigned integers."""
        data = self.data.astype(format.dtype)
        data = data.view(np.uint8)
        nan = 0 if format.dtype == "float4_e2m1fn" else 0x7F
        data = np.where(np.isnan(self.data), np.uint8(nan), data)
        if format.scale in ("float32", "power_of_2"):
            scale = self.scale.astype(np.float32).view(np.uint32)
        else:
            scale = self.scale.astype(format.scale).view(np.uint8)
            nan = 0xFF if format.scale == "float8_e8m0fnu" else 0x7F
            scale = np.where(np.isnan(self.scale), np.uint8(nan), scale)
        tensor_scale = self.tensor_scale
        return data, scale, tensor_scale and tensor_scale.astype(np.float32).view(np.uint32)


def round24(x: float) -> float:
    """To 24 bits, ties to even; the largest float32 where that is exceeded."""
    if x == 0 or not np.isfinite(x):
        return x
    mantissa, exponent = np.frexp(x)
    rounded = np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
    return float(np.clip(rounded, -float(FLOAT32.max), float(FLOAT32.max)))


def multiplier(most: float, amax: float, limit: float = float(FLOAT32.max)) -> float:
    if amax == 0 or not np.isfinite(amax):
        return 1.0
    return min(round24(most / amax), limit)


def ceil_power_of_2(x: float) -> float:
    mantissa, exponent = np.frexp(x)
    return float(np.ldexp(1.0, exponent - (mantissa == 0.5)))


def floor_power_of_2(x: float) -> float:
    return float(np.ldexp(1.0, np.frexp(x)[1] - 1))


def to_data(x, factor: float, dtype: str) -> np.ndarray:
    """float64 of the rounded numbers."""
    most = float(ml_dtypes.finfo(dtype).max)
    product = (np.asarray(x, np.float64) * factor).astype(np.float32)
    data = np.clip(product, -most, most).astype(dtype).astype(np.float64)
    return np.where(np.isnan(product), np.nan, data)


def block_multiplier(amax: float, format: TensorFormat, dtype, g: float):
    """(multiplier, scale) of a block."""
    most = float(ml_dtypes.finfo(format.dtype).max)
    if format.scale == "float8_e8m0fnu":
        if np.isnan(amax):
            return np.nan, np.nan
        least, greatest = 2.0**-127, 2.0**127
        scale = least if amax == 0 else np.clip(ceil_power_of_2(amax / most), least, greatest)
        scale = greatest if np.isinf(amax) else scale
        return 1 / scale, scale
    if format.scale == "float8_e4m3fn":
        if np.isnan(amax):
            return np.nan, np.nan
        wide = min(round24(round24(amax / most) * g), 448.0) if np.isfinite(amax) else 448.0
        scale = float(np.float32(wide).astype(ml_dtypes.float8_e4m3fn))
        return (round24(g / scale) if scale else 0.0), scale
    amax = max(amax, format.amax_epsilon) if not np.isnan(amax) else amax
    if format.scale == "power_of_2":
        factor = floor_power_of_2(multiplier(most, amax))
    else:
        factor = multiplier(most, amax, float(ml_dtypes.finfo(dtype).max))
    return factor, float(np.float32(1 / factor))


def quantize(x: np.ndarray, format: TensorFormat, block: tuple[int, ...] = ()) -> Quantized:
    """One tensor; `block` as a QuantizedArray has it."""
    wide = x.astype(np.float64)
    amax = np.max(np.abs(wide), initial=0)
    if format.block is None:
        factor = multiplier(float(ml_dtypes.finfo(format.dtype).max), amax)
        return Quantized(to_data(wide, factor, format.dtype), np.float64(np.float32(1 / factor)))
    g = multiplier(6.0 * 448.0, amax)
    counts = [-(-n // b) for n, b in zip(x.shape, block, strict=True)]
    data, scale = np.zeros(x.shape), np.zeros(counts)
    for index in np.ndindex(*counts):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, block, strict=True))
        factor, scale[index] = block_multiplier(np.max(np.abs(wide[where])), format, x.dtype, g)
        data[where] = to_data(wide[where], factor, format.dtype)
    two_level = format.scale == "float8_e4m3fn"
    return Quantized(data, scale, np.asarray(np.float32(1 / g)) if two_level else None)


def dequantize(q: Quantized, block: tuple[int, ...]) -> np.ndarray:
    """float64, before the rounding to the dtype of what was quantized."""
    scale = np.asarray(q.scale)
    for dim, b in enumerate(block):
        scale = np.repeat(scale, b, axis=dim)
    scale = scale[tuple(map(slice, q.data.shape))] if block else scale
    return q.data * scale * (1 if q.tensor_scale is None else q.tensor_scale.astype(np.float64))


def rotation() -> np.ndarray:
    """The orthogonal matrix [16, 16] of rotated formats."""
    hadamard = np.array([[1.0]])
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    return np.diag(signs) @ hadamard / 4


def wild_numbers(rng: np.random.Generator, shape, dtype, special: str = "all") -> np.ndarray:
    """Normal numbers times 2^-20 .. 2^20 by rows of 8; with "all", zeros, subnormals, an Inf and a NaN among them."""
    groups = (*shape[:-1], -(-shape[-1] // 8))
    scale = np.repeat(2.0 ** rng.integers(-20, 21, size=groups), 8, axis=-1)[..., : shape[-1]]
    x = (rng.normal(size=shape) * scale).astype(dtype)
    flat = x.reshape(-1)
    flat[rng.random(flat.size) < 0.1] = 0
    if special == "all" and flat.size:
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        places = rng.integers(0, flat.size, size=4)
        flat[places[:2]] = np.array([3 * tiny, -tiny]).astype(dtype)
        flat[places[2]] = -np.inf
        flat[places[3]] = np.nan
    return x
