"""The main job's steps under recipes: the quantizers' state goes on where it was, random rounding by seed and step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import train
from cases.covering import full
from expertmesh.core import DelayedScaling, as_recipe
from expertmesh.core.quantization.recipe import RECIPES
from expertmesh.flax_moe import MoEConfig, moe
from expertmesh.train import checkpoint, data, job, model, options
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import ModelOptions, Options, UsageError
from expertmesh.train.step import key_of_step

pytestmark = pytest.mark.default_jax

B, S = 8, 7
SIZE = B, S + 1


def model_of(recipe):
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=32, dtype=jnp.float32, recipe=recipe)
    return ModelConfig(layers=1, model_dim=32, heads=2, moe=moe)


def test_the_names_are_those_of_core():
    assert set(options.RECIPES) <= set(RECIPES)
    for name in options.RECIPES:
        config = job.model_config(ModelOptions(dtype="float32", recipe=name))
        assert config.moe.recipe == as_recipe(name)
    assert job.model_config(ModelOptions(dtype="float32")).moe.recipe is None


@pytest.mark.full
def test_the_quantizers_state_is_kept_by_a_checkpoint(tmp_path):
    """Three steps are, bit for bit, two steps, a checkpoint, and the third; the state is not that of the start."""
    one = train.trainer(model_of(DelayedScaling(amax_history_len=3)), sizes=(1, 2))
    with one.on_mesh():
        begun = jax.tree.map(np.asarray, one.init().quant_state)
        state, _ = train.run(one, SIZE, last=2)
        checkpoint.save(tmp_path, 2, state.saved, keep=1)
        whole = train.run(one, SIZE, state=state, first=3, last=3)
        step, saved = checkpoint.restore(tmp_path, one.abstract().saved, pytest.fail)
        assert step == 2
        remembered = jax.tree.map(np.asarray, saved.quant_state)
        again = train.run(one, SIZE, state=one.restored(saved), first=3, last=3)
        same, other = (
            float(one.evaluate(again[0]._replace(quant_state=s), train.batch(one, 9, SIZE)))
            for s in (again[0].quant_state, begun)
        )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    changed = [
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(begun), jax.tree.leaves(remembered), strict=True)
    ]
    # Multiplier and history of x and weight, of wi and wo.
    assert len(changed) == 8 and all(changed)
    assert np.isfinite(same) and same != other  # it is validated with what it has learned


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_delayed", full("nvfp4")])
def test_layers_are_a_loop_over_layers(recipe, unrolled):
    """Output, gradient and what quantizers remember of two layers, each with its own state and key."""
    config = dataclasses.replace(model_of(as_recipe(recipe)), layers=2, unrolled=unrolled)
    params = model.init(jax.random.key(0), config)
    head = jax.random.normal(jax.random.key(1), params["head"].shape)
    params, state = params | {"head": head}, model.init_quant_states(config)
    state = jax.tree.map(lambda s: s * (1 + jnp.arange(2.0).reshape(2, *[1] * (s.ndim - 1))), state)
    bytes_BS = np.random.default_rng(0).integers(0, 256, (2, S)).astype(np.int32)
    key = jax.random.key(2)

    def through_all(params):
        output = model.forward(params, bytes_BS, config, state, key)
        return jnp.sum(jnp.sin(output.logits)), output

    def looped(params):
        x = model._embed(params["embed"], bytes_BS, jnp.float32)
        outputs = []
        for i in range(2):
            own, of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], (params["layers"], state))
            x += model._attention(own, x, config)
            normed = model._rms_norm(x, own["moe_norm"])
            number = jax.random.fold_in(key, i)
            outputs.append(moe(own["moe"], normed, config.moe, quant_state=of_layer, key=number))
            x += outputs[-1].y
        logits = model._rms_norm(x, params["norm"]) @ params["head"]
        return jnp.sum(jnp.sin(logits)), outputs

    (_, got), gradient = jax.jit(jax.value_and_grad(through_all, has_aux=True))(params)
    (_, outputs), expected = jax.jit(jax.value_and_grad(looped, has_aux=True))(params)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *(o.quant_state for o in outputs))
    assert (want is None) == (recipe != "fp8_delayed")
    for a, b in zip(jax.tree.leaves(got.quant_state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for name in ("tokens_per_expert", "num_dropped", "aux_loss", "entropy"):
        each = np.stack([getattr(o, name) for o in outputs])
        total = each if name in ("tokens_per_expert", "entropy") else each.sum()
        np.testing.assert_allclose(getattr(got, name), total, rtol=1e-6)


@pytest.mark.full
def test_random_rounding_is_of_the_step():
    """The third step, as another step and as itself; before it there is no gradient to round."""
    one = train.trainer(model_of(as_recipe("nvfp4")), sizes=(1, 1))

    def norm_of_third(number):
        state, _ = train.run(one, SIZE, last=2)
        return float(one.step(state, train.batch(one, 3, SIZE), number)[1].grad_norm)

    with one.on_mesh():
        third, again, as_fourth = map(norm_of_third, (3, 3, 4))
    assert third == again != as_fourth


def test_each_seed_and_step_has_a_key_of_its_own():
    def numbers(seed, step, recipe="nvfp4"):
        key = key_of_step(model_of(as_recipe(recipe)), seed, step)
        return None if key is None else tuple(jax.random.key_data(key).tolist())

    keys = {numbers(seed, step) for seed in range(3) for step in range(3)}
    assert len(keys) == 9 and numbers(0, 1, recipe=None) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(recipe="fp8_block"), "; got fp8_block, auto: "),
        (dict(transport="nvlink"), "; got None, nvlink: .*it needs NVIDIA GPUs"),
    ],
)
def test_what_does_not_fit_is_bad_input(changes, words):
    """Blocks of 128 along a width of 128 in 8 shards, stores into memory of GPUs; found before anything is written."""
    chosen = ModelOptions(
        **changes, layers=1, model_dim=64, heads=2, experts=4, expert_dim=64, seq_len=8
    )
    corpus = data.Corpus(np.zeros(9000, np.uint8), np.zeros(1000, np.uint8), source="")
    planned = job.plan(Options(model=chosen), corpus)
    with (
        planned.trainer.on_mesh(),
        pytest.raises(UsageError, match=f"^--recipe and --transport must fit .*{words}") as error,
    ):
        job._functions(planned)
    assert "\n" not in str(error.value)
