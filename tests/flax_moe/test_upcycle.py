"""A dense layer as a block: the same y, for every option that keeps it, and an error for those that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import full
from expertmesh.core import Activation
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, init_params, moe, upcycle
from flax_moe.moe_oracle import activate

D, WIDTH = 24, 32


def dense_layer(gated=True, biased=False, dtype=np.float32):
    rng = np.random.default_rng(0)
    pair = (2,) * gated
    layer = {
        "wi": rng.normal(size=(D, *pair, WIDTH)) * D**-0.5,
        "wo": rng.normal(size=(WIDTH, D)) * WIDTH**-0.5 * 2.0 ** rng.integers(-2, 3, (WIDTH, 1)),
    }
    if biased:
        layer |= {"wi_bias": rng.normal(size=(*pair, WIDTH)), "wo_bias": rng.normal(size=D)}
    return jax.tree.map(lambda w: w.astype(dtype), layer)


def tokens(shape=(6, 7)):
    rng = np.random.default_rng(1)
    return (rng.normal(size=(*shape, D)) * 2.0 ** rng.integers(-3, 4, (*shape, 1))).astype(
        np.float32
    )


def dense_output(layer, x, activation):
    """In float64, token by token."""
    wide = {name: w.astype(np.float64) for name, w in layer.items()}
    rows = [
        activate(np.tensordot(t, wide["wi"], 1) + wide.get("wi_bias", 0), activation) @ wide["wo"]
        + wide.get("wo_bias", 0)
        for t in x.reshape(-1, D).astype(np.float64)
    ]
    return np.reshape(rows, x.shape)


def config_of(**options):
    return MoEConfig(
        **{"num_experts": 8, "top_k": 2, "expert_dim": WIDTH, "dtype": "float32", **options}
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(top_k=1),
        full(dict(expert_dim=8, top_k=4, num_experts=16)),
        dict(expert_dim=8, top_k=8, scaling_factor=4.0, separate_wi=True),
        dict(expert_dim=16, top_k=4, use_bias=True, score_function="sigmoid", scaling_factor=2.5),
        full(dict(expert_dim=16, top_k=4, activation=Activation(function="gelu", gated=False))),
        full(dict(score_function="sqrtsoftplus", use_gate_bias=True)),
        full(dict(score_function="sigmoid", top_k=1, normalize=True, weigh_inputs=True)),
        dict(expert_dim=8, top_k=4, shared_expert_dim=16, shared_expert_gate=True),
        full(dict(expert_dim=8, top_k=6, shared_expert_dim=8, num_experts=12)),
        dict(expert_dim=16, top_k=4, num_experts=16, num_groups=4, group_topk=2),
        full(dict(expert_dim=8, top_k=4, num_chunks=2, remat="recompute", num_experts=12)),
    ],
    ids=str,
)
def test_y_is_the_dense_layers(options):
    config = config_of(**options)
    layer = dense_layer(config.act.gated, config.use_bias)
    params = upcycle(jax.random.key(0), layer, config)
    shapes = jax.tree.map(jnp.shape, init_params(jax.random.key(0), D, config))
    assert jax.tree.map(jnp.shape, params) == shapes
    assert {w.dtype.name for w in params.values()} == {"float32"}
    x = tokens()
    bias = jnp.zeros(config.num_experts) if config.use_expert_bias else None
    out = moe(params, x, config, expert_bias=bias)
    want = dense_output(layer, x, config.act)
    assert relative_error(np.asarray(out.y), want) < 1e-6
    each = [
        relative_error(*p)
        for p in zip(np.asarray(out.y).reshape(-1, D), want.reshape(-1, D), strict=True)
    ]
    assert max(each) < 1e-5, "of each token"
    parts = (WIDTH - (config.shared_expert_dim or 0)) // config.expert_dim
    used = np.asarray(out.topk_idx).reshape(-1, config.top_k)
    copies = np.sort(used, axis=1).reshape(len(used), -1, parts)
    np.testing.assert_array_equal(copies % parts, np.broadcast_to(np.arange(parts), copies.shape))
    assert np.all(copies // parts == copies[..., :1] // parts), "whole copies"
    assert len(np.unique(copies // parts)) > 1 or config.num_experts == parts, "and not one alone"


def test_copies_that_tie():
    """A router of zeros: all scores are equal, and the choices are the first copies, whole."""
    config = config_of(expert_dim=8, top_k=8)
    layer = dense_layer()
    params = upcycle(jax.random.key(0), layer, config)
    params["gate_kernel"] = jnp.zeros_like(params["gate_kernel"])
    out = moe(params, tokens(), config)
    assert relative_error(np.asarray(out.y), dense_output(layer, tokens(), config.act)) < 1e-6


def test_copies_differ_by_noise():
    config = config_of(expert_dim=16, top_k=2, num_experts=4)
    layer = dense_layer()
    plain, noisy = (upcycle(jax.random.key(0), layer, config, noise=n) for n in (0, 0.01))
    np.testing.assert_array_equal(plain["wi"][0], plain["wi"][2])
    for name in ("wi", "wo"):
        assert np.all(noisy[name][0] != noisy[name][2])
        assert abs(relative_error(noisy[name], plain[name]) / 0.01 - 1) < 0.1
    np.testing.assert_array_equal(noisy["gate_kernel"], plain["gate_kernel"])
    want = dense_output(layer, tokens(), config.act)
    assert 1e-4 < relative_error(np.asarray(moe(noisy, tokens(), config).y), want) < 0.05


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(expert_dim=12), "multiple of expert_dim; got 32"),
        (dict(expert_dim=8, shared_expert_dim=32), "shared_expert_dim=32, expert_dim=8"),
        (dict(expert_dim=8), "top_k must be a multiple of the 4 parts"),
        (
            dict(expert_dim=8, top_k=4, num_experts=6),
            "num_experts must be a multiple of the 4 parts",
        ),
        (dict(expert_dim=8, top_k=4, num_groups=4, group_topk=2), "experts of a router group must"),
        (dict(use_pre_softmax=True), "must add up to a constant; got score_function=softmax"),
        (dict(score_function="sigmoid", top_k=1), "must add up to a constant"),
        (dict(score_function="sigmoid", normalize=False), "must add up to a constant"),
        (dict(capacity_factor=1.5), "no token may be dropped; got capacity_factor=1.5"),
        (dict(num_null_experts=2), "no null experts"),
        (dict(use_gate=False), "the router must be the block's"),
        (dict(latent_dim=16), "at the model's width"),
        (dict(activation=Activation(function="gelu", gated=False)), r"wi must be \[D, Fd\]"),
    ],
    ids=str,
)
def test_what_would_not_be_the_same(options, words):
    with pytest.raises(ValueError, match=f"upcycle: .*{words}"):
        upcycle(jax.random.key(0), dense_layer(), config_of(**options))


def test_biases_that_have_no_place():
    layer = dense_layer(biased=True)
    with pytest.raises(ValueError, match="biases must go with use_bias"):
        upcycle(jax.random.key(0), layer, config_of())
    with pytest.raises(ValueError, match="shared experts have no biases"):
        config = config_of(expert_dim=8, top_k=3, num_experts=6, shared_expert_dim=8, use_bias=True)
        upcycle(jax.random.key(0), layer, config)
    with pytest.raises(ValueError, match="wo_bias must be"):
        upcycle(jax.random.key(0), {**layer, "wo_bias": layer["wi_bias"]}, config_of(use_bias=True))
    with pytest.raises(TypeError, match="upcycle: wo must be an array of floats .*; got None"):
        upcycle(jax.random.key(0), {"wi": layer["wi"]}, config_of())
