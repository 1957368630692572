"""Float32 arithmetic against NumPy's, bit for bit: the processor's does not flush subnormal numbers there."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from expertmesh.core.quantization import numerics

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


def test_quotients_that_are_subnormal():
    """Ties by powers of two, which lose one bit or more; and quotients that lie beside a tie."""
    rng = np.random.default_rng(6)
    x, powers = floats(rng, 1, 26), (2.0 ** rng.integers(1, 28, COUNT)).astype(np.float32)
    beside = np.nextafter(powers, rng.choice([0, np.inf], COUNT).astype(np.float32))
    for y in (powers, beside, floats(rng, 128, 153)):
        assert_same_bits(jax.jit(numerics.divide)(x, y), x / y)


def test_subnormal_quotients_that_are_above_a_tie_by_the_least_remainder():
    """x / y = (q + 1 / y's mantissa) * 2^-150, with an odd q: in units of 2^-149, just above a half."""
    found = []
    for under in range((1 << 23) + 1, (1 << 23) + 2001, 2):
        q = (1 << 23) + pow(-under, -1, 1 << 23)  # q * under + 1 = over << 23
        over = (q * under + 1) >> 23
        found += [(over, under)] if over < 1 << 24 else []
    assert len(found) > 900
    over, under = np.array(found).T
    x, y = np.ldexp(over, -149).astype(np.float32), np.ldexp(under, -22).astype(np.float32)
    assert_same_bits(jax.jit(numerics.divide)(x, y), x / y)


@pytest.mark.parametrize("error", [-3, -2, -1, 1, 2, 3])
def test_a_wrong_quotient_is_corrected(error):
    rng = np.random.default_rng(1)
    over, under = rng.integers(1 << 23, 1 << 24, size=(2, COUNT)).astype(np.int32)
    over[:100] = under[:100]  # nothing rests
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
    for zero in np.float32([0.0, -0.0]):
        assert_same_bits(numerics.multiply(zero, jnp.float32(2)), zero)


def test_flush():
    least = np.float32(2.0**-126)
    x = np.array([1e-45, -1e-40, least, -least, 1, np.inf], np.float32)
    assert_same_bits(numerics.flush(jnp.asarray(x)), [0.0, -0.0, least, -least, 1, np.inf])


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
    # XLA:CPU deals 4-bit numbers out to its threads one by one, and two of them may write the same byte.
    x = x[: len(x) // 16 * 16].astype(np.float32)
    most = numerics.largest(dtype)
    want = np.clip(x, -most, most).astype(dtype)

    @jax.jit
    def function(x):
        return numerics.cast(
            numerics.round_nearest(numerics.saturate(x, dtype), jnp.dtype(dtype)), jnp.dtype(dtype)
        )

    found = function(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), want.view(np.uint8))


def test_magnitudes_are_ordered():
    x = np.array([0, 1e-45, -1e-40, 1e-38, -1.5, 3e38, -np.inf, np.nan], np.float32)
    found = np.asarray(numerics.magnitude(jnp.asarray(x)))
    assert (np.diff(found) > 0).all()
    assert_same_bits(numerics.from_magnitude(jnp.asarray(found)), np.abs(x))
    narrow = x.astype(ml_dtypes.bfloat16)
    want = np.abs(narrow.astype(np.float32)).view(np.int32)
    np.testing.assert_array_equal(numerics.magnitude(jnp.asarray(narrow)), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_widening_keeps_subnormal_numbers(dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x = np.array([0, tiny, -3 * tiny, 1, -1.5, np.inf], np.float32)
    found = numerics.widen(jnp.asarray(x.astype(dtype)))
    assert found.dtype == jnp.float32
    assert_same_bits(found, x)


def test_regular_magnitudes():
    x = np.array([0, 1e-45, 1, 3e38, np.inf, np.nan], np.float32)
    regular = numerics.is_regular(numerics.magnitude(jnp.asarray(x)))
    assert list(regular) == [False, True, True, True, False, False]


def test_powers_of_2_and_scales_of_eight_exponent_bits():
    codes = np.arange(256)
    want = np.where(codes < 255, 2.0 ** (codes - 127.0), np.nan).astype(np.float32)
    assert_same_bits(numerics.power_of_2(jnp.asarray(codes, jnp.int32)), want)
    stored = jax.lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint8), jnp.float8_e8m0fnu)
    assert_same_bits(numerics.scale_values(stored), want)
    assert_same_bits(numerics.scale_values(jnp.float8_e4m3fn(0.5)), 0.5)


@pytest.mark.parametrize("most", [6.0, 448.0, 57344.0])
def test_excess_is_the_least_power_of_2_that_is_enough(most):
    rng = np.random.default_rng(4)
    x = np.concatenate([floats(rng, 1, 255), most * 2.0 ** np.arange(-9, 10)]).astype(np.float32)
    biased = np.asarray(numerics.excess(numerics.magnitude(jnp.asarray(x)), most))
    scale = 2.0 ** (biased - 127.0)
    assert np.all(scale >= x / np.float64(most)) and np.all(scale / 2 < x / np.float64(most))


def test_saturate():
    x = np.array([-np.inf, -500, -448, 3, 448, 500, np.inf, np.nan], np.float32)
    want = np.array([-448, -448, -448, 3, 448, 448, 448, np.nan])
    np.testing.assert_array_equal(numerics.saturate(jnp.asarray(x), "float8_e4m3fn"), want)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn"])
def test_random_rounding_is_up_as_often_as_a_number_is_near(dtype):
    """Exactly: by the 24 highest of its bits, the lowest and the highest among them."""
    rng = np.random.default_rng(5)
    numbers = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8).view(dtype)
    numbers = np.unique(np.abs(numbers.astype(np.float64)))
    numbers = numbers[np.isfinite(numbers)]
    x = np.concatenate([numbers[:-1], numbers[-2] * rng.random(COUNT) ** 4, numbers[:-1] + 1e-3])
    x = x.astype(np.float32)
    x = x[x < numbers[-1]]
    bits = rng.integers(0, 1 << 32, x.size, dtype=np.uint64).astype(np.uint32)
    bits[::3], bits[1::3] = 0, 2**32 - 1
    place = np.searchsorted(numbers, x, side="right") - 1
    low, high = numbers[place], numbers[place + 1]
    up = (bits >> 8) / 2.0**24 < (x - low) / (high - low)
    want = np.where(up, high, low)
    for sign in (1, -1):
        signed = jnp.asarray(np.float32(sign) * x)
        found = numerics.round_stochastically(signed, jnp.dtype(dtype), jnp.asarray(bits))
        assert_same_bits(found, sign * want)


def test_nan_has_one_code():
    nan = jnp.array([np.nan, -np.nan], jnp.float32)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        codes = np.asarray(numerics.cast(nan, jnp.dtype(dtype))).view(np.uint8)
        assert list(codes) == [0x7F, 0x7F]
    assert not np.asarray(numerics.cast(nan, jnp.dtype("float4_e2m1fn"))).astype(np.float32).any()


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"])
def test_a_dtype_may_be_given_by_name_or_class(dtype):
    numbers = jnp.array([-3, 0.5, 6], jnp.float32)
    for given in (dtype, getattr(jnp, dtype), jnp.dtype(dtype)):
        found = numerics.cast(numbers, given)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(jnp.float32), numbers)
