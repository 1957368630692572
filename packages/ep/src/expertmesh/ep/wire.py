"""Quantized rows as bytes of one array, so that data and scales travel together, in one collective.

    bytes[n] = bytes of data[n], then bytes of scale[n]

Dimension key: D features, B scales per row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.ops.gather_rows import accumulator_dtype
from expertmesh.core.quantization.quantize import dequantize, quantize
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import TensorFormat


def travels(format: TensorFormat) -> bool:
    """Whether rows of this format can be moved one by one: whole bytes, and scales that are a row's own."""
    return (
        format.block is not None
        and format.block[0] == 1
        and format.scale != "float8_e4m3fn"
        and format.dtype.startswith("float8")
    )


def scale_of_zeros(format: TensorFormat) -> jax.Array:
    """What a row of zeros is quantized with, []."""
    assert format.block is not None
    return quantize(jnp.zeros(format.block), format).scale[0, 0]


def to_bytes(data: jax.Array, scale: jax.Array) -> jax.Array:
    """uint8[..., D + B * bytes of a scale], of 8-bit data [..., D] and scales [..., B]."""
    return jnp.concatenate([_bytes(data), _bytes(scale)], axis=-1)


def from_bytes(
    rows: jax.Array, num_features: int, data_dtype: DTypeLike, scale_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """data [..., D], scale [..., B]: the inverse of `to_bytes`."""
    data, scale = rows[..., :num_features], rows[..., num_features:]
    return _of_bytes(data, data_dtype), _of_bytes(scale, scale_dtype)


def _bytes(x: jax.Array) -> jax.Array:
    # Elements of more bytes become one more dimension.
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _of_bytes(rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        rows = rows.reshape(*rows.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(rows, dtype)


@dataclasses.dataclass(frozen=True)
class Wire:
    """What rows of wide numbers are on the way: as they are, rounded to a dtype, or quantized row by row.

    Attributes:
      format: of the rows on the way, or the name of a floating dtype; None: as they are.
    """

    format: TensorFormat | str | None = None

    def encode(self, rows_ND: jax.Array) -> jax.Array:
        """The rows as they travel."""
        if not isinstance(self.format, TensorFormat):
            return rows_ND.astype(self.format or rows_ND.dtype)
        q = quantize(rows_ND, self.format)
        return to_bytes(q.data, q.scale)

    def decode(self, sent_N: jax.Array, like_ND: jax.Array) -> jax.Array:
        """The rows that arrive, in shape and dtype those of `like`."""
        if not isinstance(self.format, TensorFormat):
            return sent_N.astype(like_ND.dtype)
        assert self.format.block is not None
        data, scale = from_bytes(
            sent_N, like_ND.shape[-1], self.format.dtype, _scale_dtype(self.format)
        )
        rows = QuantizedArray(
            data=data,
            scale=scale,
            block=self.format.block,
            format=self.format,
            dtype=str(like_ND.dtype),
        )
        return dequantize(rows)


PLAIN = Wire()


def sum_dtype(dtype: DTypeLike, top_k: int) -> jnp.dtype:
    """In which sums of up to K rows travel. A sum of one row is that row: it need not be widened for the way back."""
    dtype = jnp.dtype(dtype)
    return dtype if top_k == 1 else accumulator_dtype(dtype)


def _scale_dtype(format: TensorFormat) -> str:
    return "float8_e8m0fnu" if format.scale == "float8_e8m0fnu" else "float32"
