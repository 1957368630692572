"""What travels: which formats can, rows as bytes, and rows that are rounded or quantized on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import TensorFormat, dequantize, quantize
from expertmesh.core.testing import magnitudes
from expertmesh.ep import wire

E4M3 = "float8_e4m3fn"
E8M0 = TensorFormat(dtype=E4M3, block=(1, 32), scale="float8_e8m0fnu")
FREE = TensorFormat(dtype="float8_e5m2", block=(1, 16), scale="float32", amax_epsilon=0.25)


@pytest.mark.parametrize(
    "format, whole",
    [
        (E8M0, True),
        (FREE, True),
        (TensorFormat(dtype=E4M3), False),
        (TensorFormat(dtype=E4M3, block=(128, 128)), False),
        (TensorFormat(dtype="float4_e2m1fn", block=(1, 16), scale="float8_e4m3fn"), False),
    ],
)
def test_rows_of_whole_bytes_and_scales_of_their_own_travel(format, whole):
    assert wire.travels(format) is whole


@pytest.mark.parametrize("format", [E8M0, FREE])
def test_the_scale_of_zeros_is_what_zeros_are_quantized_with(format):
    zeros = quantize(jnp.zeros((4, 64)), format)
    assert wire.scale_of_zeros(format).dtype == zeros.scale.dtype
    np.testing.assert_array_equal(
        np.asarray(zeros.scale).view(np.uint8),
        np.broadcast_to(wire.scale_of_zeros(format), zeros.scale.shape).copy().view(np.uint8),
    )


@pytest.mark.parametrize("format, row", [(E8M0, 64 + 2), (FREE, 64 + 4 * 4)])
def test_bytes_there_and_back(format, row):
    q = quantize(magnitudes(np.random.default_rng(0), (3, 5, 64)), format)
    sent = wire.to_bytes(q.data, q.scale)
    assert (sent.shape, sent.dtype) == ((3, 5, row), jnp.uint8)
    for got, want in zip(
        wire.from_bytes(sent, 64, q.data.dtype, q.scale.dtype), (q.data, q.scale), strict=True
    ):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [None, "bfloat16", "float16", E8M0, FREE])
def test_what_arrives(format, dtype):
    """The rows as their format holds them, in their own dtype and shape."""
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(6, 64)), dtype)
    way = wire.Wire(format)
    sent = way.encode(rows)
    if isinstance(format, TensorFormat):
        assert sent.dtype == jnp.uint8
        want = dequantize(quantize(rows, format))
    else:
        assert sent.dtype == (format or dtype)
        want = rows.astype(format or dtype).astype(dtype)
    got = way.decode(sent, jax.ShapeDtypeStruct(rows.shape, rows.dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_plain_rows_are_sent_as_they_are():
    assert wire.PLAIN.encode(jnp.ones(3, jnp.float16)).dtype == jnp.float16


def test_a_sum_of_one_row_is_not_widened():
    assert wire.sum_dtype("bfloat16", 1) == jnp.bfloat16
    assert wire.sum_dtype("bfloat16", 2) == wire.sum_dtype("float8_e4m3fn", 3) == jnp.float32
    assert wire.sum_dtype("float64", 2) == jnp.float64
