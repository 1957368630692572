"""Scales from amax, in numpy's float32 arithmetic; at the bounds of what has one."""

import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core.quantization.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from expertmesh.core.quantization.scales import (
    amax_multiplier,
    block_amax,
    block_scales,
    reciprocal,
    repeat_blocks,
)

SUBNORMAL, NORMAL = 0x007FFFFF, 0x00800000  # the largest and the least
BITS = [0, 1, SUBNORMAL, NORMAL, NORMAL + 1, 0x3F800000, 0x3F800001, 0x40490FDB, 0x7F7FFFFF]
NOT_FINITE = [0x7F800000, 0x7FC00000, 0x7F800001]


def expected(bits: int, largest: float, limit: float) -> np.float32:
    if bits == 0 or bits in NOT_FINITE:
        return np.float32(1)
    if bits <= SUBNORMAL:
        return np.float32(limit)
    amax = np.array(bits, np.int32).view(np.float32)
    with np.errstate(over="ignore"):
        return np.minimum(np.float32(largest) / amax, np.float32(limit))


@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0 * 448.0])
@pytest.mark.parametrize("limit", [float(np.finfo(np.float32).max), 2.0**100, 256.0])
def test_multipliers(largest, limit):
    bits = BITS + NOT_FINITE
    got = np.asarray(amax_multiplier(jnp.asarray(bits, jnp.int32), largest, limit))
    want = np.array([expected(b, largest, limit) for b in bits], np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def test_a_scale_is_the_reciprocal():
    multipliers = np.float32([1, 3, 448, 2.0**-126, 2.0**127, 1.1])
    np.testing.assert_array_equal(reciprocal(jnp.asarray(multipliers)), np.float32(1) / multipliers)


@pytest.mark.parametrize("block", [(1, 1), (1, 2), (2, 3), (5, 7), (8, 16)])
def test_blocks_and_their_elements(block):
    """The last ones may be partial; those of zeros have the amax 0."""
    values = np.random.default_rng(0).integers(1, 2**30, (5, 7)).astype(np.int32)
    values[: block[0], : block[1]] = 0
    counts = [-(-n // b) for n, b in zip(values.shape, block, strict=True)]
    rows, columns = np.arange(5) // block[0], np.arange(7) // block[1]
    want = np.zeros(counts, np.int32)
    np.maximum.at(want, (rows[:, None], columns[None, :]), values)
    got = block_amax(jnp.asarray(values), block)
    np.testing.assert_array_equal(got, want)
    assert got[0, 0] == 0
    np.testing.assert_array_equal(repeat_blocks(got, (5, 7), block), want[np.ix_(rows, columns)])


def bits_of(*amax: float) -> np.ndarray:
    return np.array(amax, np.float32).view(np.int32)


def test_powers_of_2_of_tiny_and_of_no_numbers():
    """The multiplier is finite, whatever its block holds."""
    format = Float8BlockScaling().formats().x
    amax = bits_of(2.0**-126, 2.0**-118, 1.0, np.inf, np.nan)
    multiplier, scale = block_scales(jnp.asarray(amax), format, "float32")
    # 448 is 1.75 * 2^8.
    np.testing.assert_array_equal(multiplier, np.float32([2.0**127, 2.0**126, 2.0**8, 1, 1]))
    want = np.float32([2.0**-127, 2.0**-126, 2.0**-8, 1, 1])
    np.testing.assert_array_equal(np.asarray(scale).view(np.int32), want.view(np.int32))


def test_exponents_as_they_are_stored():
    format = MXFP8BlockScaling().formats().x
    amax = bits_of(0, 2.0**-126, 448.0, np.finfo(np.float32).max, np.inf, np.nan)
    multiplier, scale = block_scales(jnp.asarray(amax), format, "float32")
    assert scale.dtype == jnp.float8_e8m0fnu
    stored = np.asarray(scale).view(np.uint8)
    np.testing.assert_array_equal(stored, [0, 0, 127, 127 + 120, 254, 255])
    want = np.float32([2.0**127, 2.0**127, 1, 2.0**-120, 2.0**-127, np.nan])
    np.testing.assert_array_equal(np.asarray(multiplier)[[0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5]])


def test_two_levels_of_tiny_numbers():
    """amax / 6 is subnormal, its product with the tensor's multiplier is not."""
    format = NVFP4BlockScaling().formats().x
    amax, g = bits_of(2.0**-125, 2.0**-134, 0), jnp.float32(2.0**127)
    multiplier, scale = block_scales(jnp.asarray(amax), format, "float32", g)
    want = np.float32([0.6875, 2.0**-9, 0])  # 2/3 and 2/3 * 2^-9 in e4m3
    np.testing.assert_array_equal(scale.astype(jnp.float32), want)
    np.testing.assert_array_equal(multiplier[0], np.float32(2.0**127) / want[0])
    assert multiplier[2] == 0


def test_two_levels_at_the_ends():
    """Zeros, the largest number, and what is not finite."""
    format = NVFP4BlockScaling().formats().x
    most = np.finfo(np.float32).max
    amax = bits_of(0, 1, 6, np.inf, np.nan)
    multiplier, scale = block_scales(jnp.asarray(amax), format, "float32", jnp.float32(64))
    want = np.float32([0, 11, 64, 448, np.nan])  # 64 / 6 in e4m3
    np.testing.assert_array_equal(scale.astype(jnp.float32), want)
    with np.errstate(divide="ignore"):
        want = np.where(want > 0, np.float32(64) / want, want)
    np.testing.assert_array_equal(multiplier, want)
    g = np.float32(2688) / most
    _, scale = block_scales(jnp.asarray(bits_of(most)), format, "float32", jnp.asarray(g))
    assert scale.astype(jnp.float32) == 448
    tensors = jnp.float32([64, 1])  # one for each row of blocks
    both, scale = block_scales(jnp.asarray([amax[1:3]] * 2), format, "float32", tensors[:, None])
    np.testing.assert_array_equal(scale.astype(jnp.float32), [[11, 64], [0.171875, 1]])
    np.testing.assert_array_equal(both[0], multiplier[1:3])
