"""Blocks of other formulas, against loops in float64, in every mesh mode."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from cases.covering import full
from expertmesh.core import global_shard_guard
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import (
    MoEOutput,
    init_quant_state,
    linen,
    moe,
    native_moe,
    nnx,
    param_specs,
    permute_experts,
    stages,
)
from flax_moe.moe_oracle import (
    AUTO,
    EXPLICIT,
    RESOURCE,
    TOKENS,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    run,
    value_and_gradients,
)

# Scores of all experts, so that the weight of a single choice is not 1.
INPUTS = dict(weigh_inputs=True, top_k=1, use_pre_softmax=True)

IDENTITY = dict(num_null_experts=5, null_experts="identity", top_k=3)

LATENT = dict(latent_dim=6, shared_expert_dim=20)


def manual(config, mesh):
    """The block inside the user's `shard_map`, its losses left out."""
    specs = param_specs(config)  # fsdp splits none of them

    def block(params, x, config):
        def shard(params, x):
            out = moe(params, x, config)
            numbers = jax.tree.map(
                lambda n: jax.lax.psum(n, ("fsdp", "ep")),
                (out.tokens_per_expert, out.num_dropped, out.aux_loss, out.z_loss, out.entropy),
            )
            names = ("tokens_per_expert", "num_dropped", "aux_loss", "z_loss", "entropy")
            return out._replace(**dict(zip(names, numbers, strict=True)))

        out_specs = MoEOutput(*[PartitionSpec()] * 7)._replace(y=TOKENS, topk_idx=TOKENS)
        of_shards = jax.shard_map(shard, mesh=mesh, in_specs=(specs, TOKENS), out_specs=out_specs)
        return of_shards(params, x)

    return block


@pytest.mark.parametrize(
    "mode, changes",
    [
        ("explicit", INPUTS),
        full("resource", INPUTS),
        full("manual", INPUTS),
        ("explicit", LATENT),
        full("resource", LATENT | INPUTS),
        full("manual", LATENT),
        ("explicit", IDENTITY),
        full("resource", IDENTITY | dict(num_chunks=5)),
        full("manual", IDENTITY),
        full("explicit", IDENTITY | dict(null_experts="zero", shared_expert_dim=20)),
        full("resource", INPUTS | dict(num_null_experts=8, null_experts="identity")),
    ],
    ids=str,
)
def test_every_mode(mode, changes):
    """Results and all gradients."""
    if mode == "manual":
        changes = changes | dict(ep_axis="ep", aux_loss_coeff=0.0, z_loss_coeff=0.0)
    config = make_config(**changes)
    data, mesh = make_data(config), make_mesh((2, 4), EXPLICIT if mode == "explicit" else AUTO)
    block = manual(config, mesh) if mode == "manual" else moe
    placed = data if mode == "manual" else place(data, config, mesh)
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        (_, output), gradients = jax.jit(value_and_gradients(block, config))(*placed)
    assert_result(output, gradients, run(data, config))


def test_weights_of_inputs_and_of_results_differ():
    """Also in the baseline, which agrees; for a weight of 1 they are the same."""
    config = make_config(**INPUTS)
    data = make_data(config)

    @jax.jit
    def outputs(params, x):
        results = make_config(**INPUTS | dict(weigh_inputs=False))
        always_one = INPUTS | dict(use_pre_softmax=False)
        ones = (
            moe(params, x, make_config(**always_one | dict(weigh_inputs=weigh)))
            for weigh in (False, True)
        )
        blocks = moe(params, x, config), native_moe(params, x, config), moe(params, x, results)
        return [out.y for out in (*blocks, *ones)]

    y, native, of_results, one, same = map(np.asarray, outputs(data.params, data.x))
    assert relative_error(native, y) < 1e-5 < 0.05 < relative_error(of_results, y)
    np.testing.assert_array_equal(one, same)


def test_choices_of_null_experts_send_no_row():
    """Under `debug` their ids pass, recorded ones too, and an id past them is an error."""
    config = make_config(**IDENTITY, debug=True, use_bias=False)
    data = make_data(config)
    routed = stages.route(data.params, data.x, config)
    assert routed.tokens_per_expert.shape == (13,) and routed.tokens_per_expert[8:].sum() > 9

    def rows(topk_idx):
        again = routed._replace(topk_idx=topk_idx)
        return stages.dispatch(data.params, again, config).handle.group_sizes.sum()

    checked = checkify.checkify(rows)
    error, sent = checked(routed.topk_idx.astype(jnp.uint8))
    error.throw()
    assert sent == routed.tokens_per_expert[:8].sum()
    assert "ids must be below" in checked(routed.topk_idx.at[0, 0, 0].set(13))[0].get()
    replay = checkify.checkify(lambda idx: moe(data.params, data.x, config, topk_idx=idx))
    error, out = replay(routed.topk_idx)
    error.throw()
    np.testing.assert_array_equal(out.topk_idx, routed.topk_idx)
    assert "ids must be below" in replay(routed.topk_idx.at[0, 0, 0].set(13))[0].get()


def test_null_experts_stay_where_others_change_places():
    config = make_config(**IDENTITY, score_function="sigmoid", use_expert_bias=True)
    data = make_data(config)
    bias = np.linspace(0, 0.1, 13, dtype=np.float32)
    placement = np.roll(np.arange(8), 3)
    block = jax.jit(lambda p, bias: moe(p, data.x, config, expert_bias=bias))
    tree = permute_experts({"params": data.params, "expert_bias": bias}, placement)
    got, want = block(tree["params"], tree["expert_bias"]), block(data.params, bias)
    assert relative_error(got.y, want.y) < 1e-6
    order = [*placement, *range(8, 13)]
    np.testing.assert_array_equal(got.tokens_per_expert, want.tokens_per_expert[np.array(order)])
    module = linen.MoEBlock(config)
    variables = jax.eval_shape(module.init, jax.random.key(0), data.x)
    assert variables[linen.EXPERT_BIAS]["expert_bias"].shape == (13,)
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    assert block.expert_bias[...].shape == (13,) and block.gate_kernel[...].shape == (16, 13)


def test_what_is_sent_is_as_wide_as_the_latents():
    """Nothing of width D crosses devices that split the experts; D is 16, L is 6."""
    config = make_config(**LATENT, use_bias=False)
    placed = place(make_data(config), config, make_mesh((1, 4), EXPLICIT))
    program = jax.jit(lambda params, x: moe(params, x, config).y).lower(*placed[:2]).compile()
    widths = {re.search(r"(\d*)\]", s)[1] for c in collectives(program.as_text()) for s in c.shapes}
    assert "6" in widths and "16" not in widths, widths


@pytest.mark.parametrize("recipe", [None, full("fp8_delayed")])
def test_stages_at_a_latent_width(recipe):
    """Their composition is the block; latents must have been made."""
    config = make_config(latent_dim=16, expert_dim=16, recipe=recipe, use_bias=False)
    data, state = make_data(config, (8, 4, 32)), init_quant_state(config)

    @jax.jit
    def both(params, x):
        given = dict(quant_state=state)
        routed = stages.route(params, x, config)
        latent, of_down = stages.to_latent(params, routed, config, **given)
        assert latent.x.shape == (8, 4, 16)
        sent = stages.dispatch(params, latent, config)
        computed = stages.experts(params, sent, config, **given)
        y, of_up = stages.from_latent(params, stages.combine(computed), config, **given)
        states = state and {**computed.quant_state, **of_down, **of_up}
        out = moe(params, x, config, **given)
        return (y, states), (out.y, out.quant_state)

    got, want = both(data.params, data.x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
    if recipe is not None:
        assert set(got[1]) == set(state) == {"wi", "wo", "latent_down", "latent_up"}
    with pytest.raises(ValueError, match="latent_dim=16; pass what stages.to_latent returns"):
        stages.dispatch(data.params, stages.route(data.params, data.x, config), config)
    with pytest.raises(ValueError, match=r"wi must be \[E, L, 2, F\] = \(8, 16, 2, 16\)"):
        narrow = {**data.params, "wi": data.params["wi"][:, :8]}
        moe(narrow, data.x, config, quant_state=state)


def test_inputs_are_weighed_before_they_are_rounded():
    """In bfloat16: as float32 tokens times float32 weights would be sent."""
    config = make_config(**INPUTS, dtype=jnp.bfloat16, use_bias=False)
    data = make_data(config)
    out = moe(data.params, data.x, config)
    logits = data.x.astype(np.float64) @ data.params["gate_kernel"]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).max(-1, keepdims=True)
    weighed = (weights.astype(np.float32) * data.x).astype(jnp.bfloat16)
    plain = make_config(top_k=1, dtype=jnp.bfloat16, use_bias=False)
    want = moe(data.params, weighed, plain, topk_idx=out.topk_idx).y
    assert relative_error(out.y, want.astype(np.float32)) < 2e-3
