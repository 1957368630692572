"""Test 15: the grouped GEMM and its gradients, with empty groups and padding rows, in every mesh mode."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conformance.settings import (
    GROUPED_GEMMS,
    TOKENS,
    Setting,
    assert_close,
    each_mode,
    run_on_mesh,
)

pytestmark = pytest.mark.any_device

GROUPS, ROWS, LEFT_OVER, K, N = 4, 41, 5, 16, 24
EXPERTS = PartitionSpec("ep")


def make(participants, ranks, seed=0):
    """Random splits with group 1 empty; experts each 4 times the one before; NaN in every padding row."""
    rng = np.random.default_rng(seed)
    splits = rng.multinomial(ROWS - LEFT_OVER, [0.25, 0.25, 0.5], size=participants)
    sizes = np.insert(splits, 1, 0, axis=1).astype(np.int32)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    lhs, dy = draw(participants, ROWS, K), draw(participants, ROWS, N)
    lhs[:, -LEFT_OVER:] = dy[:, -LEFT_OVER:] = np.nan
    scale = np.tile(4.0 ** np.arange(GROUPS, dtype=np.float32), ranks)
    rhs = draw(ranks * GROUPS, K, N) * scale[:, None, None]
    return lhs, rhs, sizes, draw(ranks * GROUPS, N) * scale[:, None], dy


def per_group(lhs, rhs, sizes, bias, dy):
    """One matrix product per participant and group, in float64."""
    lhs, rhs, bias, dy = (a.astype(np.float64) for a in (lhs, rhs, bias, dy))
    out, d_lhs, d_rhs, d_bias = (np.zeros(a.shape) for a in (dy, lhs, rhs, bias))
    for p in range(len(sizes)):
        first = 0
        for g, size in enumerate(sizes[p]):
            rows = slice(first, first := first + size)
            e = (p * GROUPS + g) % len(rhs)
            out[p, rows] = lhs[p, rows] @ rhs[e] + bias[e]
            d_lhs[p, rows] = dy[p, rows] @ rhs[e].T
            d_rhs[e] += lhs[p, rows].T @ dy[p, rows]
            d_bias[e] += dy[p, rows].sum(axis=0)
    return out, d_lhs, d_rhs, d_bias


def value_and_gradients(lhs, rhs, sizes, bias, dy, *, implementation):
    grouped = GROUPED_GEMMS[implementation]
    out, pull = jax.vjp(lambda a, b, c: grouped(a, b, sizes, c), lhs, rhs, bias)
    return out, *pull(dy)


@each_mode
@pytest.mark.parametrize("implementation", GROUPED_GEMMS)
def test_equals_a_product_per_group(setting: Setting, implementation):
    participants = int(np.prod(setting.sizes))
    operands = make(participants, setting.mesh_shape["ep"])
    specs = (TOKENS, EXPERTS, TOKENS, EXPERTS, TOKENS)
    got = run_on_mesh(
        setting,
        value_and_gradients,
        operands,
        specs,
        out_specs=(TOKENS, TOKENS, EXPERTS, EXPERTS),
        implementation=implementation,
    )
    for name, x, want in zip(
        ("out", "d_lhs", "d_rhs", "d_bias"), got, per_group(*operands), strict=True
    ):
        assert_close(x, want, 1e-5, name)
        # Each expert by itself: the largest must not hide the others.
        for e in range(len(want)):
            assert_close(x[e], want[e], 1e-5, f"{name} of {e}")
    out, d_lhs, d_rhs, d_bias = got
    np.testing.assert_array_equal(out[:, -LEFT_OVER:], 0)
    np.testing.assert_array_equal(d_lhs[:, -LEFT_OVER:], 0)
    np.testing.assert_array_equal(d_rhs[1::GROUPS], 0)
    np.testing.assert_array_equal(d_bias[1::GROUPS], 0)
