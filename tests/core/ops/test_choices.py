"""Ids in a dtype that cannot hold the number of experts mean what they say, in every op that takes choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import (
    RouterConfig,
    expert_counts,
    plan_permute,
    route,
    router_statistics,
    to_routing_map,
    topk_weights_to_probs,
)

pytestmark = pytest.mark.default_jax

E = 300  # 44 in int8
IDX = np.asarray([[0, 50], [119, -1], [119, 1]], np.int8)
COUNTS = np.bincount([0, 50, 119, 119, 1], minlength=E)
LOGITS = np.random.default_rng(0).normal(size=(3, E)).astype(np.float32)


def counts_of_plan(idx):
    return plan_permute(idx, num_experts=E).tokens_per_expert


def counts_of_replay(idx):
    routing = route(jnp.asarray(LOGITS), RouterConfig(top_k=2), topk_idx=idx)
    assert routing.topk_idx.dtype == jnp.int32
    return np.bincount(routing.topk_idx[routing.topk_idx >= 0], minlength=E)


def counts_of_map(idx):
    return to_routing_map(idx, E).sum(axis=0)


def counts_of_probs(idx):
    return topk_weights_to_probs(jnp.ones(idx.shape), idx, num_experts=E).sum(axis=0)


def counts_of_statistics(idx):
    return router_statistics(jnp.asarray(LOGITS), idx).tokens_per_expert


@pytest.mark.parametrize(
    "counts",
    [counts_of_plan, lambda idx: expert_counts(idx, num_experts=E), counts_of_replay]
    + [counts_of_statistics, counts_of_map, counts_of_probs],
)
def test_narrow_ids(counts):
    np.testing.assert_array_equal(counts(jnp.asarray(IDX)), COUNTS)


def test_masked_narrow_ids():
    """-1 for a masked token must not become the last id of an unsigned dtype."""
    idx = jnp.asarray(np.asarray([[255], [3]]), jnp.uint8)
    mask = jnp.asarray([True, False])
    routing = jax.jit(
        lambda i, m: route(jnp.asarray(LOGITS[:2]), RouterConfig(top_k=1), topk_idx=i, token_mask=m)
    )(idx, mask)
    assert routing.topk_idx.tolist() == [[255], [-1]]
