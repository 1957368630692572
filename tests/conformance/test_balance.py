"""An exchange whose ranks are levelled by copies of experts gives what the exchange over experts gives, bit for bit.

Tokens, weights and cotangents are small integers, so that every sum is exact in any order.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conformance.settings import SPARE, TOKENS, every_setting, run_on_mesh
from expertmesh.core import grouped_gemm
from expertmesh.ep import balance, combine, copy_experts, dispatch, prepare

pytestmark = pytest.mark.any_device

NUM_EXPERTS, TOP_K, WIDTH = 16, 2, 8
TOKENS_PER_SHARD = 32


def hot(num_tokens):
    """Half of all choices are of expert 1."""
    t = np.arange(num_tokens)
    return np.stack([0 * t + 1, t * 7 % NUM_EXPERTS], axis=1).astype(np.int32)


def scattered(num_tokens):
    """Low experts more often than high ones; some choices are not routed."""
    rng = np.random.default_rng(num_tokens)
    return (NUM_EXPERTS * rng.random((num_tokens, TOP_K)) ** 3).astype(np.int32) - 1


def experts(idx, x, w, g, *, config, num_spare):
    """The tokens' sums of their experts' products, the gradients, and what was dropped."""
    if num_spare:
        balanced = balance(idx, config, num_spare=num_spare, capacity_factor=3.0)
        handle = prepare(balanced.topk_idx, balanced.config)
    else:
        handle = prepare(idx, config)

    def both(x, w):
        of_slots = copy_experts(w, balanced.copies) if num_spare else w
        rows = grouped_gemm(dispatch(handle, x), of_slots.astype(x.dtype), handle.group_sizes)
        return combine(handle, rows)

    out, pull = jax.vjp(both, x, w)
    d_x, d_w = pull(g)
    return (out, d_x), d_w, handle.num_dropped


@pytest.mark.any_process
@every_setting
@pytest.mark.parametrize(("route", "num_spare"), [*zip([hot, scattered], SPARE, strict=True)])
def test_the_same_as_without_copies(setting, route, num_spare):
    num_tokens = TOKENS_PER_SHARD * int(np.prod(setting.sizes))
    rng = np.random.default_rng(0)
    x, g = (rng.integers(-1, 2, (num_tokens, WIDTH)).astype(setting.dtype) for _ in range(2))
    w = rng.integers(-1, 2, (NUM_EXPERTS, WIDTH, WIDTH)).astype(np.float32)
    axis = setting.config(NUM_EXPERTS).axis or "ep"
    of_experts = PartitionSpec() if setting.is_whole else PartitionSpec(axis)
    specs = TOKENS, TOKENS, of_experts, TOKENS
    operands = route(num_tokens), x, w, g
    want, got = (
        run_on_mesh(
            setting, experts, operands, specs, ((TOKENS, TOKENS), of_experts, TOKENS),
            config=setting.config(NUM_EXPERTS, alignment=8), num_spare=spare,
        )
        for spare in (0, num_spare)
    )  # fmt: skip
    assert np.any(want[1]) and not np.any(want[2])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
