"""Float32 arithmetic against NumPy's, bit for bit: the processor's does not flush subnormal numbers there."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from expertmesh.core import numerics

COUNT = 50_000
LARGEST = np.finfo(np.float32).max


def floats(rng, first, end):
    """Positive numbers with biased exponents in [first, end)."""
    mantissa, exponent = rng.integers(0, 1 << 23, COUNT), rng.integers(first, end, COUNT)
    return (mantissa | exponent << 23).astype(np.uint32).view(np.float32)


def assert_same_bits(got, want):
    got, want = (np.asarray(a, np.float32).view(np.uint32) for a in (got, want))
    np.testing.assert_array_equal(got, want)


@pytest.mark.any_device
@pytest.mark.parametrize("exponents", [(1, 255), (120, 134)])
def test_divide(exponents):
    rng = np.random.default_rng(0)
    x, y = floats(rng, *exponents), floats(rng, *exponents)
    with np.errstate(over="ignore"):
        assert_same_bits(jax.jit(numerics.divide)(x, y), np.minimum(x / y, LARGEST))
    one, large = np.float32(1), floats(rng, 250, 255)
    assert_same_bits(jax.jit(numerics.divide)(one, large), one / large)


@pytest.mark.parametrize("error", [-3, -2, -1, 1, 2, 3])
def test_a_wrong_quotient_is_corrected(error):
    rng = np.random.default_rng(1)
    over, under = rng.integers(1 << 23, 1 << 24, size=(2, COUNT)).astype(np.int32)
    exact = (over.astype(np.int64) << 23) // under
    wrong = (exact + error).astype(np.int32)
    quotient, rest = numerics.corrected(*map(jnp.asarray, (wrong, over, under)), 23)
    np.testing.assert_array_equal(quotient, exact)
    np.testing.assert_array_equal(rest, (over.astype(np.int64) << 23) - exact * under)


@pytest.mark.any_device
def test_multiply():
    rng = np.random.default_rng(2)
    x, y = -floats(rng, 0, 255), floats(rng, 0, 255)
    with np.errstate(over="ignore", under="ignore"):
        want = x * y
    want = np.where(np.abs(want) < 2.0**-126, np.float32(-0.0), want)
    assert_same_bits(jax.jit(numerics.multiply)(x, y), want)
    assert_same_bits(numerics.multiply(jnp.float32(-np.inf), jnp.float32(2)), -np.inf)
    assert np.isnan(numerics.multiply(jnp.float32(np.nan), jnp.float32(2)))


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_rounding(dtype):
    """Ties and their neighbours too."""
    rng = np.random.default_rng(3)
    codes = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    x = np.concatenate([x, rng.normal(size=COUNT) * 2.0 ** rng.integers(-20, 20, COUNT)])
    x = x.astype(np.float32)
    most = numerics.largest(dtype)
    want = np.clip(x, -most, most).astype(dtype)

    @jax.jit
    def function(x):
        return numerics.cast(
            numerics.round_nearest(numerics.saturate(x, dtype), jnp.dtype(dtype)), jnp.dtype(dtype)
        )

    np.testing.assert_array_equal(np.asarray(function(x)).view(np.uint8), want.view(np.uint8))


def test_magnitudes_are_ordered():
    x = np.array([0, 1e-45, -1e-40, 1e-38, -1.5, 3e38, -np.inf, np.nan], np.float32)
    found = np.asarray(numerics.magnitude(jnp.asarray(x)))
    assert (np.diff(found) > 0).all()
    narrow = x.astype(ml_dtypes.bfloat16)
    want = np.abs(narrow.astype(np.float32)).view(np.int32)
    np.testing.assert_array_equal(numerics.magnitude(jnp.asarray(narrow)), want)
