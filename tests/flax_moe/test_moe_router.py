"""The router's options through the block: bias, mask, replay, scores and groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import full
from core.router import router_oracle
from expertmesh.core import RouterConfig, router_z_loss
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import moe, native_moe, stages
from flax_moe.moe_oracle import ACTIVATIONS, EXPLICIT, make_config, make_data, make_mesh, place

CONFIG = make_config(
    score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5, use_bias=False
)


def operands(seed=0):
    rng = np.random.default_rng(seed)
    bias = jnp.asarray(rng.normal(size=8) * 0.1, jnp.float32)
    return bias, jnp.asarray(rng.random((8, 5)) < 0.7)


def dense(data, config, idx, weights):
    """Every chosen expert of every token, by loops."""
    y = np.zeros(data.x.shape)
    for t in np.ndindex(*idx.shape[:-1]):
        for e, w in zip(idx[t], weights[t], strict=True):
            if e >= 0:
                h = np.tensordot(data.x[t].astype(np.float64), data.params["wi"][e], 1)
                y[t] += w * (ACTIVATIONS[config.activation](h[0]) * h[1]) @ data.params["wo"][e]
    return y


@pytest.mark.parametrize("on_mesh", [False, True])
def test_bias_mask_scores_and_groups(on_mesh):
    data, (bias, mask) = make_data(CONFIG), operands()
    mesh = make_mesh((2, 4), EXPLICIT) if on_mesh else None
    params, x, _ = place(data, CONFIG, mesh)
    out = jax.jit(lambda p, x, b, m: moe(p, x, CONFIG, expert_bias=b, token_mask=m))(
        params, x, bias, mask
    )
    logits = data.x.astype(np.float64) @ data.params["gate_kernel"]
    idx, weights = router_oracle.route(logits, CONFIG.router, np.asarray(bias), np.asarray(mask))
    assert relative_error(out.y, dense(data, CONFIG, idx, weights)) < 1e-5
    assert not np.asarray(out.y)[~np.asarray(mask)].any()
    counts = [(idx == e).sum() for e in range(8)]
    np.testing.assert_array_equal(out.tokens_per_expert, counts)
    want = router_oracle.balance(logits, idx, 0.5, "sigmoid", np.asarray(mask))
    assert relative_error(out.aux_loss, want) < 1e-5
    want = router_z_loss(jnp.asarray(logits[np.asarray(mask)], jnp.float32), coeff=0.25)
    assert relative_error(out.z_loss, want) < 1e-5


@pytest.mark.parametrize("per_sequence", [False, full(True)])
def test_unbiased_counts(per_sequence):
    """Of each token's best experts by score alone, while bias, groups and replay choose others; and the gradient."""
    options = dict(aux_loss_counts="unbiased", aux_loss_per_sequence=per_sequence)
    config = dataclasses.replace(CONFIG, **options, z_loss_coeff=0.0, num_groups=2, group_topk=1)
    data, (bias, mask) = make_data(config), operands()
    out = jax.jit(lambda p, x: moe(p, x, config, expert_bias=bias, token_mask=mask))(*data[:2])
    logits = data.x.astype(np.float64) @ data.params["gate_kernel"]
    alone = RouterConfig(top_k=2, score_function="sigmoid")
    idx, _ = router_oracle.route(logits, alone, None, np.asarray(mask))
    assert (np.sort(idx) != np.sort(out.topk_idx)).any()
    loss = router_oracle.sequence_balance if per_sequence else router_oracle.balance
    want = loss(logits, idx, 0.5, "sigmoid", np.asarray(mask))
    assert relative_error(out.aux_loss, want) < 1e-5
    chosen = loss(logits, np.asarray(out.topk_idx), 0.5, "sigmoid", np.asarray(mask))
    assert abs(chosen / want - 1) > 1e-3
    replay = dict(topk_idx=jnp.zeros((8, 5, 2), int), token_mask=mask)
    assert relative_error(moe(*data[:2], config, **replay).aux_loss, want) < 1e-5


def test_coefficients_of_a_schedule():
    """One program for all values, equal to the configs with these values; 0 in place of the config's leaves it out."""
    config = make_config(use_bias=False, aux_loss_coeff=0.0)
    data = make_data(config)

    @jax.jit
    def step(params, aux, z):
        def losses(params, aux, z):
            out = moe(params, data.x, config, aux_loss_coeff=aux, z_loss_coeff=z)
            return jnp.sum(out.y * data.dy) + out.aux_loss + out.z_loss, out

        return jax.grad(losses, (0, 1, 2), has_aux=True)(params, aux, z)

    def static(params):
        out = moe(params, data.x, make_config(use_bias=False))
        return jnp.sum(out.y * data.dy) + out.aux_loss + out.z_loss, out

    (d_params, d_aux, d_z), out = step(data.params, jnp.float32(0.5), jnp.float32(0.25))
    wanted, want = jax.jit(jax.grad(static, has_aux=True))(data.params)
    assert relative_error(out.aux_loss, want.aux_loss) < 1e-6
    assert relative_error(out.z_loss, want.z_loss) < 1e-6
    assert relative_error(d_params["gate_kernel"], wanted["gate_kernel"]) < 1e-6
    assert relative_error(d_aux, 2 * want.aux_loss) < 1e-6
    assert relative_error(d_z, 4 * want.z_loss) < 1e-6
    again = step(data.params, jnp.float32(0.0), jnp.float32(1.0))[1]
    assert float(again.aux_loss) == 0 and relative_error(again.z_loss, d_z) < 1e-6
    assert step._cache_size() == 1
    routed = stages.route(data.params, data.x, config, aux_loss_coeff=1.0, z_loss_coeff=0)
    assert relative_error(routed.aux_loss, d_aux) < 1e-6 and float(routed.z_loss) == 0


def test_replay_gives_the_same_output_and_gradients():
    config = make_config(use_bias=False)
    params, x, dy = place(make_data(config), config, None)
    logits = x @ params["gate_kernel"]
    recorded = jax.lax.top_k(logits, 2)[1]

    def loss(params, **options):
        return jnp.sum(moe(params, x, config, **options).y * dy)

    want = jax.value_and_grad(loss)(params)
    got = jax.value_and_grad(loss)(params, topk_idx=recorded)
    assert relative_error(got[0], want[0]) < 1e-6
    for name in params:
        assert np.asarray(want[1][name]).any()
        assert relative_error(got[1][name], want[1][name]) < 1e-6


def test_replay_uses_the_given_choices():
    config = make_config(use_bias=False)
    data = make_data(config)
    given = np.random.default_rng(1).integers(-1, 8, size=(8, 5, 2)).astype(np.int32)
    params, x, _ = place(data, config, None)
    out = moe(params, x, config, topk_idx=jnp.asarray(given))
    logits = data.x.astype(np.float64) @ data.params["gate_kernel"]
    idx, weights = router_oracle.route(logits, config.router, forced=given)
    assert relative_error(out.y, dense(data, config, idx, weights)) < 1e-5


def test_the_baseline_refuses_what_it_lacks():
    params, x, _ = place(make_data(CONFIG), CONFIG, None)
    with pytest.raises(ValueError, match="native_moe: the router must be softmax.*sigmoid"):
        native_moe(params, x, CONFIG)
