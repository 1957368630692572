"""The Triton kernels of the router on a GPU, against the reference: the same choices, the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import RouterConfig, route
from expertmesh.core.router import route as ops
from expertmesh.core.testing import relative_error

# Experts and configuration.
CASES = {
    "softmax": (256, RouterConfig(top_k=8)),
    "softmax of 200": (200, RouterConfig(top_k=6, scaling_factor=2.5)),
    "softmax of 512": (512, RouterConfig(top_k=16)),
    "softmax before": (256, RouterConfig(top_k=8, use_pre_softmax=True)),
    "softmax, groups": (256, RouterConfig(top_k=8, num_groups=8, group_topk=2)),
    "sigmoid": (128, RouterConfig(top_k=4, score_function="sigmoid")),
    "sigmoid, one": (64, RouterConfig(top_k=1, score_function="sigmoid")),
    "sigmoid, not divided": (
        128,
        RouterConfig(top_k=4, score_function="sigmoid", normalize=False),
    ),
    "sigmoid, groups": (
        256,
        RouterConfig(top_k=8, score_function="sigmoid", num_groups=8, group_topk=4),
    ),
    "sigmoid, groups by their best": (
        256,
        RouterConfig(top_k=8, score_function="sigmoid", num_groups=8, group_topk=3, group_best=1),
    ),
}
RUNS = [
    *((name, "", "float32") for name in CASES),
    ("softmax", "mask", "bfloat16"),
    ("sigmoid", "bias", "float32"),
    ("sigmoid, groups", "bias and mask", "bfloat16"),
]


def _logits(E, dtype, T=1001):
    """Normal, some wide; whole numbers, so that there are ties; both zeros, infinities, NaN of either sign."""
    rng = np.random.default_rng(E)
    x = rng.normal(size=(T, E)) * rng.choice([0.3, 3, 12], size=(T, 1))
    x[:300] = np.round(x[:300])
    x[300:310] = 0
    x[300:310, ::2] = -0.0
    x[310:320, : E // 2 - 16] = -np.inf
    x[320:325, 3] = np.nan
    x[325:330, 5] = -np.nan
    return jnp.asarray(x, dtype)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name, extras, dtype", RUNS)
def test_equals_the_reference(name, extras, dtype):
    E, config = CASES[name]
    logits = _logits(E, dtype)
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.normal(size=E) * 0.1, jnp.float32) if "bias" in extras else None
    mask = jnp.asarray(rng.random(logits.shape[0]) < 0.8) if "mask" in extras else None
    d_weights = jnp.asarray(rng.normal(size=(logits.shape[0], config.top_k)), jnp.float32)

    def run(implementation):
        options = {"config": config, "implementation": implementation}
        choose = jax.jit(lambda *operands: ops._choose_op(*operands, **options))
        grad = jax.jit(lambda *operands: ops._weigh_grad_op(*operands, **options))
        idx, weights = choose(logits, bias, mask, None)
        return idx, weights, grad(logits, idx, weights, d_weights)

    got, want = run("triton"), run("reference")
    for one, again in zip(got, run("triton"), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(again))
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    for one, other in zip(got[1:], want[1:], strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        assert relative_error(np.nan_to_num(one), np.nan_to_num(other)) < 3e-6


@pytest.mark.gpu
@needs_triton
def test_logits_that_differ_in_their_last_bits():
    last_bits = np.random.default_rng(0).integers(0, 5, (99, 256))
    logits = (1 + last_bits * 2.0**-23).astype(np.float32)
    idx, _ = jax.jit(
        lambda x: ops._choose_op(
            x, None, None, None, config=RouterConfig(top_k=8), implementation="triton"
        )
    )(logits)
    np.testing.assert_array_equal(idx, np.argsort(-last_bits, axis=1, kind="stable")[:, :8])


@pytest.mark.gpu
@needs_triton
def test_replayed_choices_that_repeat_add_their_gradients():
    logits = _logits(64, "float32")[400:]
    rng = np.random.default_rng(0)
    idx = jnp.asarray(rng.integers(-1, 5, (logits.shape[0], 4)), jnp.int32)
    config = RouterConfig(top_k=4, score_function="sigmoid")
    c = jnp.asarray(rng.normal(size=idx.shape), jnp.float32)

    def loss(logits):
        return jnp.sum(c * route(logits, config, topk_idx=idx).topk_weights)

    def plain(logits):
        s = jnp.where(
            idx >= 0, jax.nn.sigmoid(jnp.take_along_axis(logits, jnp.maximum(idx, 0), 1)), 0
        )
        return jnp.sum(c * s / (jnp.sum(s, 1, keepdims=True) + 1e-20))

    assert relative_error(jax.jit(jax.grad(loss))(logits), jax.grad(plain)(logits)) < 1e-5


@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((4, 1024), {}, "32 to 512"),
        ((4, 64), {"top_k": 17}, "at most 16"),
        ((4, 48), {"num_groups": 4, "group_topk": 2}, "powers of two"),
        ((0, 48), {}, "there"),
        ((4, 48), {"score_function": "sqrtsoftplus"}, "sqrtsoftplus"),
    ],
)
def test_what_the_kernels_refuse(shape, options, words):
    config = RouterConfig(**{"top_k": 2} | options)
    assert words in ops._unsupported(jax.ShapeDtypeStruct(shape, jnp.float32), config=config)
