"""gemm and grouped_gemm of quantized operands; which pairs of operands are refused, and why."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.linear import dense_oracle
from expertmesh.core import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TensorFormat,
    gemm,
    grouped_gemm,
    grouped_quantize,
    quantize,
)
from expertmesh.core.testing import magnitudes, relative_error

MX, NV = MXFP8BlockScaling().formats(), NVFP4BlockScaling().formats()
BLOCKS = Float8BlockScaling().formats()
E4M3, E5M2 = (TensorFormat(dtype=f"float8_{name}") for name in ("e4m3fn", "e5m2"))


@functools.cache
def data():
    rng = np.random.default_rng(2)
    x, w = magnitudes(rng, (3, 64, 64)), magnitudes(rng, (64, 32))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w)


def test_gemm():
    """One rounding, to the dtype of what was quantized; a bias after it; both orders of the two 8-bit formats."""
    x, w = data()
    bias = jnp.arange(32.0)
    for format_x, format_w in ((MX.x, MX.weight), (E5M2, E4M3), (E4M3, E5M2)):
        q = quantize(x, format_x), quantize(w, format_w, axis=0)
        want = np.einsum("tsk,kn->tsn", *map(dense_oracle.values, q))
        got = gemm(*q, bias, out_dtype=jnp.float32)
        assert relative_error(got, want + np.arange(32)) < 2e-6
        assert gemm(*q).dtype == jnp.bfloat16


def test_grouped_gemm():
    """NaN in the padding rows; a bias for the groups only."""
    x, w = data()
    sizes = jnp.array([[32, 20], [0, 64], [0, 0]])
    weight = jnp.stack([w, 3 * w])
    x = x.at[0, 52:].set(jnp.nan)
    q = grouped_quantize(x, sizes, MX.x), quantize(weight, MX.weight, axis=1, batch_dims=1)
    bias = jnp.array([[1.0], [2.0]]) * jnp.ones((2, 32))
    got = grouped_gemm(*q, sizes, bias, out_dtype=jnp.float32)
    x, w = map(dense_oracle.values, q)
    want = np.zeros(got.shape)
    want[0, :32], want[0, 32:52], want[1] = (
        x[0, :32] @ w[0] + 1,
        x[0, 32:52] @ w[1] + 2,
        x[1] @ w[1] + 2,
    )
    assert relative_error(got, want) < 2e-6
    np.testing.assert_array_equal(np.asarray(got)[want == 0], 0)


def test_gradients_are_refused():
    x, w = data()
    q = quantize(x, E4M3), quantize(w, E4M3, axis=0)
    grouped = (
        grouped_quantize(x, jnp.array([[64]] * 3), E4M3),
        quantize(w[None], E4M3, batch_dims=1),
    )

    def of_scale(scale, pair, function):
        first = dataclasses.replace(pair[0], scale=scale)
        return jnp.sum(function(first, pair[1]).astype(jnp.float32))

    for pair, function in ((q, gemm), (grouped, lambda a, b: grouped_gemm(a, b, a.group_sizes))):
        with pytest.raises(NotImplementedError, match="has no derivative.*use"):
            jax.grad(of_scale)(pair[0].scale, pair, function)


def operand(format, shape=(32, 64), axis=-1, **parts):
    across = None if not format.block or format.block[0] == 1 else 0 if axis else 1
    q = quantize(jnp.ones(shape), format, axis=axis, across=across, key=jax.random.key(0))
    return dataclasses.replace(q, **parts)


W = ((64, 32), 0)  # shape and axis
PAIRS = [
    (lambda: (operand(E5M2), operand(E5M2, *W)), ["e5m2", "e4m3fn"]),
    (lambda: (operand(E4M3), operand(MX.weight, *W)), ["scales of one kind", "one scale"]),
    (
        lambda: (operand(BLOCKS.x), operand(MX.weight, *W)),
        ["one kind", "(1, 128)", "(1, 32)"],
    ),
    (
        lambda: (
            operand(dataclasses.replace(BLOCKS.x, scale="float32")),
            operand(BLOCKS.weight, *W),
        ),
        ["one kind", "power_of_2"],
    ),
    (lambda: (operand(BLOCKS.weight), operand(BLOCKS.weight, *W)), ["two-dimensional"]),
    (lambda: (operand(NV.x_wgrad), operand(NV.x, *W)), ["Hadamard", "hadamard=True"]),
    (lambda: (operand(MX.x, axis=0), operand(MX.weight, *W)), ["along", "axis=1"]),
    (lambda: (operand(MX.x), operand(MX.weight, (64, 32), 1)), ["along", "axis=0"]),
    (
        lambda: (operand(MX.x, scale=jnp.ones((32, 3), jnp.float8_e8m0fnu)), operand(MX.x, *W)),
        ["scale", "(32, 2)"],
    ),
    (
        lambda: (operand(E4M3, scale=jnp.ones(32)), operand(E4M3, *W)),
        ["tensor scale", "(32,)"],
    ),
    (
        lambda: (operand(E4M3), jnp.ones((64, 32))),
        ["both operands", "QuantizedArray", "float32"],
    ),
    (lambda: (jnp.ones((32, 64)), operand(E4M3, *W)), ["both operands", "float32"]),
    (
        lambda: (operand(E4M3, (32, 24)), operand(E4M3, (24, 32), 0)),
        ["multiple of 16", "24"],
    ),
    (
        lambda: (operand(NV.x, (32, 48)), operand(NV.x, (48, 32), 0)),
        ["multiple of 32", "48"],
    ),
    (
        lambda: (operand(E4M3), operand(E4M3, (32, 32), 0)),
        ["(32, 64)", "(32, 32)", "transpose"],
    ),
]


@pytest.mark.parametrize("make, words", PAIRS)
def test_pairs_that_no_gemm_takes(make, words):
    pair = jax.eval_shape(make)
    with pytest.raises(ValueError) as info:
        jax.eval_shape(gemm, *pair)
    assert all(word in str(info.value) for word in ["gemm", *words]), info.value


@pytest.mark.parametrize(
    "scale, words",
    [((), ["one scale per expert", "(2,)"]), ((2, 1), ["tensor scales", "leading"])],
)
def test_experts_have_a_scale_each(scale, words):
    sizes = jnp.array([[16, 16]] * 2)
    x = grouped_quantize(jnp.ones((2, 32, 64)), sizes, E4M3)
    w = quantize(jnp.ones((2, 64, 32)), E4M3, axis=1, batch_dims=1)
    with pytest.raises(ValueError) as info:
        grouped_gemm(x, dataclasses.replace(w, scale=jnp.ones(scale)), sizes)
    assert all(word in str(info.value) for word in ["grouped_gemm", *words]), info.value
    with pytest.raises(ValueError, match=r"one scale per group, \(2, 1\); got scale \(2, 2\)"):
        grouped_gemm(x, w, sizes[:, :1])


def test_results_have_sixteen_bits_at_least():
    q = operand(E4M3), operand(E4M3, (64, 32), 0)
    with pytest.raises(
        ValueError, match="of floats of at least 16 bits; got out_dtype=float8_e5m2"
    ):
        gemm(*q, out_dtype=jnp.float8_e5m2)
