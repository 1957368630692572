"""Phases of a block: what their programs compute is the block's own, and each phase has a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core import global_shard_guard
from expertmesh.flax_moe import MoEConfig, moe
from expertmesh.train import model, phases
from expertmesh.train.mesh import AXES, RESOURCE, make_mesh
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import init_state, make_optimizer, state_shardings

pytestmark = pytest.mark.default_jax

MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=32, z_loss_coeff=1e-3, dtype=jnp.float32)
CONFIG = ModelConfig(layers=1, model_dim=32, heads=2, moe=MOE)
B, S = 16, 12


def config_of(recipe):
    return dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, recipe=recipe))


def begin(config, mesh):
    optimizer = make_optimizer(TrainingOptions(steps=4))
    state = init_state(config, optimizer, state_shardings(config, optimizer, mesh), seed=0)
    rows = NamedSharding(mesh, PartitionSpec(AXES, None))
    batch = np.random.default_rng(0).integers(0, 256, (B, S + 1)).astype(np.int32)
    return state, jax.device_put(batch, rows)


@covering(
    "axis_types, recipe",
    ("explicit", "auto"),
    (None, "fp8_delayed", "nvfp4"),
    covers=[("explicit", "fp8_delayed"), ("auto", None)],
)
def test_the_programs_compute_what_the_block_does(axis_types, recipe):
    config, mesh = config_of(recipe), make_mesh(2, 4, axis_types)
    with jax.set_mesh(mesh), global_shard_guard(RESOURCE):
        state, batch = begin(config, mesh)
        operands = jax.jit(phases.operands_of, static_argnums=(0, 1))(config, 1, state, batch)

        def block(params, x, quant_state, key):
            def forward(params, x):
                out = moe(params, x, config.moe, quant_state=quant_state, key=key)
                return out.y, out.aux_loss, out.z_loss

            made, pull = jax.vjp(forward, params, x)
            return made, pull((made[0], *map(jnp.ones_like, made[1:])))

        (y, aux_loss, z_loss), gradients = jax.jit(block)(*operands)
        *_, combine, backward = map(jax.jit, phases.programs(config))
        np.testing.assert_allclose(combine(*operands)[1], y, rtol=1e-5, atol=1e-6)
        made, _, found = backward(*operands)
        np.testing.assert_allclose(made[1:], (aux_loss, z_loss), rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, gradients
        )
        # The layer's input is the model's: it routes as the model does.
        inputs = dict(quant_state=state.quant_state, key=operands[3])
        whole = jax.jit(lambda p, b: model.forward(p, b, config, **inputs))(
            state.params, batch[:, :-1]
        )
        counts = jax.jit(phases.programs(config)[0])(*operands)[4]
        np.testing.assert_array_equal(counts, whole.tokens_per_expert[0])


def test_no_phase_takes_less_than_nothing():
    found = phases.of_ends([2.0, 5.0, 4.5, 6.0, 5.5])
    assert found == {"route": 2, "dispatch": 3, "experts": 0, "combine": 1, "backward": 0}


@covering("axis_types", ("explicit", "auto"), covers=["explicit"])
def test_each_phase_has_a_time(axis_types, monkeypatch):
    """By a clock that counts calls of it, so that each program takes as long as the one before."""
    mesh = make_mesh(2, 4, axis_types)
    with jax.set_mesh(mesh), global_shard_guard(RESOURCE):
        state, batch = begin(CONFIG, mesh)
        monkeypatch.setattr(phases.time, "perf_counter", iter(range(1000)).__next__)
        found = phases.time_phases(CONFIG, state, batch, grad_accum=2)
    assert found == {"route": 1000, "dispatch": 0, "experts": 0, "combine": 0, "backward": 0}
    assert tuple(found) == phases.PHASES
