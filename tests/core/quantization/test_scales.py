"""Scales from amax, in numpy's float32 arithmetic; at the bounds of what has one."""

import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core.quantization.scales import amax_multiplier, reciprocal

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
