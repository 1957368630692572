"""A step over microbatches against a step of the whole batch, and what the backward computes again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases import train
from cases.covering import full
from expertmesh.core import as_recipe, hlo
from expertmesh.flax_moe import REMAT_POLICIES, MoEConfig
from expertmesh.train import model
from expertmesh.train.mesh import AXES, make_mesh, microbatches
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import REMAT

pytestmark = pytest.mark.default_jax

MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=32, z_loss_coeff=1e-3, dtype=jnp.float32)
CONFIG = ModelConfig(layers=2, model_dim=32, heads=2, moe=MOE)
B, S = 32, 12


forward = jax.jit(model.forward, static_argnums=2)


@functools.cache
def begun(layers, recipe):
    """The state before the first step, in the host's memory; what else a trainer is does not change it."""
    moe = dataclasses.replace(MOE, recipe=recipe)
    one = train.trainer(dataclasses.replace(CONFIG, layers=layers, moe=moe))
    with one.on_mesh():
        return jax.device_get(one.init())


def trained(one, steps=3, program=None):
    """The state after some steps, and the metrics of each."""
    state = jax.device_put(begun(one.config.layers, one.config.moe.recipe), one.shardings)
    state, found = train.run(one, (B, S + 1), state=state, last=steps, program=program)
    return jax.device_get(state), found


def batch(number):
    return train.text(number, (B, S + 1))


def assert_same_training(got, want, rtol=1e-5):
    (state, metrics), (expected, expected_metrics) = got, want
    for a, b in zip(metrics, expected_metrics, strict=True):
        np.testing.assert_array_equal(a.tokens_per_expert, b.tokens_per_expert)
        assert a.num_dropped == b.num_dropped
        for name in ("loss", "aux_loss", "z_loss", "grad_norm"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=rtol), name
    # An update of Adam is its gradient's sign at first: what is all rounding may differ by it.
    for a, b in zip(*map(jax.tree.leaves, (state.opt_state, expected.opt_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(np.abs(b).max(), 1e-9))


@pytest.fixture(scope="module")
def whole():
    return trained(train.trainer(CONFIG))


@pytest.mark.parametrize("axis_type, count", [(AxisType.Explicit, 4), full(AxisType.Auto, 2)])
def test_microbatches_train_as_the_batch(whole, axis_type, count):
    parts = train.trainer(CONFIG, axis_type=axis_type, grad_accum=count)
    assert_same_training(trained(parts), whole)


def test_each_microbatch_is_balanced_by_itself():
    """The balance loss of a step is the mean over microbatches, which are made of rows of every device."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, aux_loss_coeff=0.1))
    _, (metrics,) = trained(train.trainer(config, grad_accum=2), steps=1)
    params = model.init(jax.random.key(0), config)
    by_device = batch(1).reshape(8, 2, B // 16, S + 1)
    losses = [
        float(forward(params, by_device[:, i].reshape(-1, S + 1)[:, :-1], config).aux_loss)
        for i in range(2)
    ]
    together = float(forward(params, batch(1)[:, :-1], config).aux_loss)
    assert metrics.aux_loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics.aux_loss != pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_rows_are_divided_where_they_are(axis_types):
    mesh = make_mesh(2, 4, axis_types)
    rows = jax.device_put(batch(0), NamedSharding(mesh, PartitionSpec(AXES)))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda rows: microbatches(rows, 2)).lower(rows).compile()
        got = program(rows)
    assert hlo.collectives(program.as_text()) == []
    want = NamedSharding(mesh, PartitionSpec(None, AXES))
    assert got.shape == (2, B // 2, S + 1) and got.sharding.is_equivalent_to(want, got.ndim)
    assert sorted(map(tuple, np.asarray(got).reshape(B, -1))) == sorted(map(tuple, batch(0)))


def test_quantizers_remember_each_microbatch():
    """Under DelayedScaling, what one forward after the other over the same weights leaves."""
    moe = dataclasses.replace(MOE, recipe=as_recipe("fp8_delayed"))
    config = dataclasses.replace(CONFIG, moe=moe)
    state, _ = trained(train.trainer(config, grad_accum=2), steps=1)
    params, expected = model.init(jax.random.key(0), config), model.init_quant_states(config)
    by_device = batch(1).reshape(8, 2, B // 16, S + 1)
    for i in range(2):
        rows = by_device[:, i].reshape(-1, S + 1)[:, :-1]
        expected = forward(params, rows, config, expected).quant_state
    assert jax.tree.leaves(expected)
    for a, b in zip(*map(jax.tree.leaves, (state.quant_state, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.full  # of shards it always runs, below
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_weights_that_are_quantized_once(recipe):
    """The logits and gradients of weights that each call quantizes."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, recipe=as_recipe(recipe)))
    params, key = model.init(jax.random.key(0), config), jax.random.key(1)
    params |= {"head": jax.random.normal(key, params["head"].shape)}

    @jax.jit
    def both(params, weights):
        def loss(params):
            logits = model.forward(params, batch(1)[:4, :-1], config, None, key, weights).logits
            return jnp.sum(jnp.sin(logits))

        return jax.value_and_grad(loss)(params)

    got = both(params, model.quantize_experts(params, config))
    for a, b in zip(*map(jax.tree.leaves, (got, both(params, None))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, full(AxisType.Auto)])
def test_shards_of_weights_are_quantized_once(monkeypatch, axis_type):
    """A step on a mesh trains as one whose every microbatch quantizes its weights."""
    config = dataclasses.replace(
        CONFIG, moe=dataclasses.replace(MOE, recipe=as_recipe("fp8_current"))
    )
    calls, quantize = [], model.quantize_experts
    monkeypatch.setattr(model, "quantize_experts", lambda *a: calls.append(a) or quantize(*a))
    options = dict(axis_type=axis_type, grad_accum=2)
    once = trained(train.trainer(config, **options), steps=2)
    assert len(calls) == 1  # traced once, outside of the loop over microbatches
    monkeypatch.setattr(model, "quantize_experts", lambda *a: None)
    assert_same_training(once, trained(train.trainer(config, **options), steps=2))


def test_weights_that_calls_change_are_not_quantized_once():
    for recipe in (None, as_recipe("fp8_delayed")):
        config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, recipe=recipe))
        assert model.quantize_experts({}, config) is None


def test_names_of_remat_are_those_of_the_block():
    assert set(REMAT) == {"none", "full", *REMAT_POLICIES} - {"save_all"}


@pytest.fixture(scope="module")
def remat():
    """What a step of each remat needs beside its operands, in bytes, and how it trains."""
    found = {}
    for name in REMAT:
        policy = name if name in REMAT_POLICIES else "save_all"
        moe = dataclasses.replace(MOE, remat=policy)
        config = dataclasses.replace(CONFIG, moe=moe, remat_layers=name == "full", layers=4)
        one = train.trainer(config, sizes=(1, 1))
        with one.on_mesh():
            lowered = one.step.lower(one.abstract(), train.abstract_batch(one, (B, S + 1)), 0)
        program = lowered.compile()
        memory = program.memory_analysis().temp_size_in_bytes
        found[name] = memory, trained(one, steps=2, program=program)
    return found


def test_remat_needs_less_memory(remat):
    memory = [remat[name][0] for name in REMAT]
    assert memory == sorted(memory, reverse=True) and memory[-1] < 0.6 * memory[0], memory


@pytest.mark.parametrize("name", [name for name in REMAT[1:] if name != "save_8_bits"])
def test_remat_trains_the_same(remat, name):
    assert_same_training(remat[name][1], remat["none"][1])


def test_8_bits_train_nearly_the_same(remat):
    """The first loss is the same, its gradient nearly so."""
    (_, kept), (_, whole) = remat["save_8_bits"][1], remat["none"][1]
    assert kept[0].loss == pytest.approx(whole[0].loss, rel=1e-6)
    assert kept[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-2)
    assert kept[1].loss == pytest.approx(whole[1].loss, rel=1e-2)
