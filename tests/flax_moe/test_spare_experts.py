"""The block with spare slots against the block by loops in float64, and with options against the block without them.

The router's bias sends most tokens to two experts, so that without copies one rank has most of the rows.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from expertmesh.core.mesh import global_shard_guard
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import LoRA, MoEConfig, init_lora, moe, quantize_weights, stages, with_lora
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

pytestmark = pytest.mark.default_jax

BIAS = np.array([0.9, 0.45, 0, 0, 0, 0, 0, 0], np.float32)
SKEWED = partial(moe, expert_bias=BIAS)
# With several EP groups each one's counts are others than their sum's.
MODES = {
    "types": (EXPLICIT, (1, 4), None),
    "one expert each": (EXPLICIT, (1, 8), None),
    "types and fsdp": (EXPLICIT, (2, 4), 1.5),
    "roles and fsdp": (AUTO, (2, 4), 1.5),
}
# All in nightly runs; over groups, by types and by roles, in every run.
FULL = pytest.mark.full
over_modes = pytest.mark.parametrize(
    ("kind", "shape", "factor"),
    [pytest.param(*m, id=k, marks=() if "fsdp" in k else FULL) for k, m in MODES.items()],
)


def with_spare(config, spare=2, factor=None):
    return dataclasses.replace(config, num_spare_experts=spare, capacity_factor=factor)


def outputs(data, config, kind, shape, block=SKEWED):
    """((loss, output), gradients)."""
    (result,) = runs(data, config, kind, shape, block, number=1)
    return result


def runs(data, config, kind, shape, block=SKEWED, *, number):
    """`outputs` of one program, so many times."""
    mesh = make_mesh(shape, kind)
    with jax.set_mesh(mesh), global_shard_guard(RESOURCE if kind is AUTO else None):
        placed, program = place(data, config, mesh), jax.jit(value_and_gradients(block, config))
        return [program(*placed) for _ in range(number)]


@over_modes
def test_the_oracle(kind, shape, factor):
    config = make_config()
    data = make_data(config, shape=(8, 12, 16))
    want = run(data, config, bias=BIAS)
    most = want.tokens_per_expert.reshape(shape[1], -1).sum(axis=1).max()
    assert most > 1.9 * want.tokens_per_expert.sum() / shape[1]
    spare = with_spare(config, factor=factor)
    ((_, out), gradients), ((_, again), twice) = runs(data, spare, kind, shape, number=2)
    assert_result(out, gradients, want)
    for one, other in zip(
        jax.tree.leaves((out.y, gradients)), jax.tree.leaves((again.y, twice)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_each_group_has_its_plan_in_a_shard_map_of_yours():
    """So two of them are level in buffers of their share, whatever the other's counts are."""
    config = make_config(ep_axis="ep", aux_loss_coeff=0.0, z_loss_coeff=0.0)
    data, mesh = make_data(config, shape=(8, 12, 16)), make_mesh((2, 4), AUTO)
    specs = {name: P() if name == "gate_kernel" else P("ep") for name in data.params}

    def gradients(params, x, dy, config):
        def loss(params, x):
            out = SKEWED(params, x, config)
            return jnp.sum(out.y * dy), (out.y, out.num_dropped[None])

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (*got, (y, dropped)), (*want, (y_want, _)) = (
        jax.jit(
            jax.shard_map(
                partial(gradients, config=c), mesh=mesh,
                in_specs=(specs, TOKENS, TOKENS), out_specs=((specs, TOKENS), (TOKENS, TOKENS)),
            )
        )(*data)
        for c in (with_spare(config), config)
    )  # fmt: skip
    assert not np.any(dropped)
    pairs = zip(jax.tree.leaves((y, got)), jax.tree.leaves((y_want, want)), strict=True)
    for one, other in pairs:
        assert relative_error(one, other) <= 1e-6


@covering("least", [0, 10], covers=[10])
def test_rows_are_level_and_buffers_a_share(least):
    """C is T K and what aligns; the worst case is that of all tokens at one rank."""
    config = make_config(alignment=4, use_expert_bias=True)
    data, mesh = make_data(config, shape=(8, 12, 16)), make_mesh((1, 4), EXPLICIT)
    loads = {}
    with jax.set_mesh(mesh):
        placed = place(data, config, mesh)
        for spare in (0, 2):
            one = dataclasses.replace(with_spare(config, spare), least_rows_per_copy=least)
            routed = stages.route(placed.params, placed.x, one, expert_bias=BIAS)
            handle = stages.dispatch(placed.params, routed, one).handle
            loads[spare] = handle.tokens_per_expert.sum(axis=1), handle.source.shape[1]
    (uneven, worst), (level, rows) = loads[0], loads[2]
    share = 8 * 12 * 2 / 4
    assert max(level) <= share + least and rows == -(-(share + least + 4 * 3) // 4) * 4
    assert max(uneven) > 1.9 * share and worst > 3 * share


@pytest.mark.parametrize(
    "changes",
    [
        {"num_chunks": 2, "remat": "save_min"},
        pytest.param({"remat": "recompute", "transport": "ring"}, marks=FULL),
        pytest.param({"num_null_experts": 2, "null_experts": "identity"}, marks=FULL),
        pytest.param({"activation": "relu", "latent_dim": 8, "shared_expert_dim": 4}, marks=FULL),
        pytest.param({"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, marks=FULL),
    ],
    ids=str,
)
def test_options_of_the_block(changes):
    config = make_config(**changes)
    data = make_data(config, shape=(8, 12, 16))
    narrow = config.param_dtype == jnp.bfloat16
    if narrow:
        data = jax.tree.map(lambda x: x.astype(jnp.bfloat16), data)
    bias = np.pad(BIAS, (0, config.num_null_experts))
    block = partial(moe, expert_bias=bias)
    pairs = zip(
        *(
            jax.tree.leaves(outputs(data, c, EXPLICIT, (1, 4), block))
            for c in (with_spare(config, factor=1.5), config)
        ),
        strict=True,
    )
    for got, want in pairs:
        assert got.dtype == want.dtype
        assert relative_error(np.asarray(got, np.float64), np.asarray(want, np.float64)) <= (
            1e-2 if narrow else 1e-5
        )


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        pytest.param("Float8CurrentScaling", False, marks=FULL),
        ("Float8CurrentScaling", True),
        pytest.param("Float8BlockScaling", False, marks=FULL),
        pytest.param("Float8BlockScaling", True, marks=FULL),
    ],
)
def test_recipes(recipe, given):
    """Copies of 8 bits are those that the expert's own rank computes with; so are rows whose scales are their own."""
    config = make_config(recipe=recipe, expert_dim=128, use_bias=False, dtype=jnp.bfloat16)
    data = make_data(config, shape=(8, 12, 128))

    def block(params, x, config):
        weights = quantize_weights(params, config) if given else None
        return SKEWED(params, x, config, weights_quantized=weights)

    (_, out), gradients = outputs(data, with_spare(config), EXPLICIT, (1, 4), block)
    (_, want), d_want = outputs(data, config, EXPLICIT, (1, 4), block)
    if recipe == "Float8BlockScaling":
        np.testing.assert_array_equal(out.y, want.y)
    pairs = zip(jax.tree.leaves((out.y, gradients)), jax.tree.leaves((want.y, d_want)), strict=True)
    for got, other in pairs:
        assert relative_error(got, other) <= 0.06  # along the rows, they are quantized with others


def test_adapters():
    config = make_config(use_bias=False)
    data, mesh = make_data(config, shape=(8, 12, 16)), make_mesh((1, 4), EXPLICIT)
    with jax.set_mesh(mesh):
        params, x, dy = place(data, config, mesh)
        lora = LoRA(rank=2, alpha=2)
        adapters = init_lora(jax.random.key(0), 16, config, lora)
        adapters = jax.tree.map(lambda a: a + 0.1, adapters)

        def loss(adapters, x, config):
            return jnp.sum(SKEWED(with_lora(params, adapters, lora), x, config).y * dy)

        got, want = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)(adapters, x, c)
            for c in (with_spare(config), config)
        )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(one, other) <= 1e-5 and np.any(other)


def test_one_rank_and_no_spare_slots_are_the_same_programs():
    config = make_config()
    data = make_data(config)

    def text(config):
        return jax.jit(value_and_gradients(moe, config)).lower(*data).as_text()

    assert text(with_spare(config)) == text(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_spare_experts": -1}, "num_spare_experts"),
        ({"least_rows_per_copy": -1}, "least_rows_per_copy"),
        ({"num_spare_experts": 1, "shard_exp_on_fsdp": True}, "shard_exp_on_fsdp=True"),
        ({"num_spare_experts": 1, "recipe": "DelayedScaling"}, "recipe=DelayedScaling"),
    ],
)
def test_what_the_config_refuses(changes, message):
    with pytest.raises(ValueError, match=f"MoEConfig: .*{message}"):
        MoEConfig(num_experts=4, top_k=2, expert_dim=8, **changes)
