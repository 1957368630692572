"""The router (tests 22 and 23) against sorting and score functions in float64, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cases.covering import full
from conformance.settings import EACH_MODE, TOKENS, Setting, assert_close, run_on_mesh
from core.router import router_oracle
from expertmesh.core import RouterConfig, from_routing_map, route, to_routing_map

EXPERTS = 12
CONFIGS = {
    "softmax": RouterConfig(top_k=3),
    "pre_softmax": RouterConfig(top_k=3, use_pre_softmax=True, scaling_factor=2.5),
    "softmax_groups": RouterConfig(top_k=4, num_groups=4, group_topk=2),
    "sigmoid": RouterConfig(top_k=4, score_function="sigmoid", scaling_factor=2.5),
    "sigmoid_groups": RouterConfig(
        top_k=4, score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5
    ),
    "sigmoid_one": RouterConfig(top_k=1, score_function="sigmoid"),
    "sqrtsoftplus": RouterConfig(top_k=3, score_function="sqrtsoftplus"),
}


def make_logits(num_tokens, dtype, seed=0):
    """Steps of 1/4, shuffled for each token, so that no choice hangs on rounding; every third token has ties."""
    rng = np.random.default_rng(seed)
    steps = rng.permuted(np.tile(np.arange(EXPERTS) / 4 - 1.5, (num_tokens, 1)), axis=1)
    steps[::3] = np.round(steps[::3])
    return steps.astype(jnp.dtype(dtype))


def value_and_gradient(logits, bias, g, *, config):
    bias = None if config.score_function == "softmax" else bias

    def weights(logits):
        out = route(logits, config, expert_bias=bias)
        return out.topk_weights, out.topk_idx

    out, pull, idx = jax.vjp(weights, logits, has_aux=True)
    return idx, out, pull(g)[0]


def jacobian(x, idx, config, step=1e-5):
    """d weights[k] / d logits[e] of one token, its choices held, by central differences of the oracle."""
    columns = []
    for e in range(len(x)):
        moved = [x + sign * step * np.eye(len(x))[e] for sign in (1, -1)]
        up, down = (router_oracle.route_token(m, config, forced=idx)[1] for m in moved)
        columns.append((up - down) / (2 * step))
    return np.stack(columns, axis=1)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "setting, name",
    [(Setting("single"), name) for name in CONFIGS]
    + [(setting, "sigmoid_groups") for setting in EACH_MODE[:1]]
    + [full(setting, "sigmoid_groups") for setting in EACH_MODE[1:]],
    ids=str,
)
def test_router_equals_the_oracle(setting: Setting, name):
    """Test 22. The same experts, ties to the lower; weights; gradients of random cotangents; bias steers only."""
    config = CONFIGS[name]
    dtype = "bfloat16" if setting.mode == "resource" else "float32"
    logits = make_logits(
        16 * 5 if setting.mode == "single" else 5 * int(np.prod(setting.sizes)), dtype
    )
    rng = np.random.default_rng(1)
    # In steps that keep scores apart from each other and from ties.
    bias = (rng.permutation(EXPERTS) / 7).astype(np.float32)
    g = rng.normal(size=(len(logits), config.top_k)).astype(np.float32)
    idx, weights, gradient = run_on_mesh(
        setting,
        value_and_gradient,
        (logits, bias, g),
        (TOKENS, PartitionSpec(), TOKENS),
        config=config,
    )
    steering = None if config.score_function == "softmax" else bias
    want_idx, want = router_oracle.route(logits, config, steering)
    np.testing.assert_array_equal(idx, want_idx)
    assert weights.dtype == np.float32 and gradient.dtype == logits.dtype
    assert_close(weights, want, 1e-6, "weights")
    wide = logits.astype(np.float64)
    want = [
        c @ jacobian(x, i, config) for x, i, c in zip(wide, want_idx, g.astype(float), strict=True)
    ]
    assert_close(gradient, np.array(want), 1e-2 if dtype == "bfloat16" else 1e-5, "gradient")


@pytest.mark.any_device
@pytest.mark.parametrize("num_experts", [8, 20, 64, 257])
def test_bitmaps_equal_bytemaps(num_experts):
    """Test 23. The same flags, unused bits 0; weights and gradients from either are equal to the bit."""
    config = RouterConfig(top_k=5, score_function="sigmoid")
    rng = np.random.default_rng(num_experts)
    logits = jnp.asarray(rng.normal(size=(9, num_experts)), jnp.float32)
    idx = route(logits, config).topk_idx
    bytemap, bitmap = (to_routing_map(idx, num_experts, form) for form in ("bytemap", "bitmap"))
    bits = np.unpackbits(np.asarray(bitmap), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits[:, :num_experts], bytemap)
    assert bitmap.shape == (9, -(-num_experts // 8)) and not bits[:, num_experts:].any()
    assert bytemap.dtype == bool and (np.asarray(bytemap).sum(axis=1) == 5).all()

    @jax.jit
    def replay(logits, idx):
        return jax.value_and_grad(
            lambda x: jnp.vdot(route(x, config, topk_idx=idx).topk_weights, g)
        )(logits)

    g = jnp.asarray(rng.normal(size=idx.shape), jnp.float32)
    of_bytes = from_routing_map(bytemap, num_experts, 5)
    of_bits = from_routing_map(bitmap, num_experts, 5, "bitmap")
    np.testing.assert_array_equal(of_bits, of_bytes)
    np.testing.assert_array_equal(of_bytes, np.sort(idx, axis=1))
    for a, b in zip(replay(logits, of_bytes), replay(logits, of_bits), strict=True):
        np.testing.assert_array_equal(a, b)
