"""One step of training and one of validation, as pure functions, and the state they act on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from expertmesh.flax_moe.train import model
from expertmesh.flax_moe.train.mesh import RESOURCE
from expertmesh.flax_moe.train.model import ModelConfig
from expertmesh.flax_moe.train.options import TrainingOptions

WARMUP_STEPS = 20


class TrainState(NamedTuple):
    """What a checkpoint holds: the parameters, and AdamW's moments and step count."""

    params: Any
    opt_state: Any


class StepMetrics(NamedTuple):
    """Of one step, before its update; replicated on every device."""

    loss: jax.Array  # float32[], cross entropy in nats per byte
    aux_loss: jax.Array  # float32[]
    z_loss: jax.Array  # float32[]
    grad_norm: jax.Array  # float32[], before clipping
    num_dropped: jax.Array  # int32[]
    tokens_per_expert: jax.Array  # int32[L, E]


TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[Any, jax.Array], jax.Array]


def schedule(options: TrainingOptions) -> optax.Schedule:
    """Learning rate of a step: linear warm-up over WARMUP_STEPS, cosine to a twentieth of the peak."""
    peak, warmup = options.learning_rate, min(WARMUP_STEPS, options.steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(options.steps, 2), peak / 20)


def make_optimizer(options: TrainingOptions) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            schedule(options),
            b2=0.95,
            weight_decay=options.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Where the state lives: the moments lie with their parameters, the rest is replicated."""
    specs = model.specs(config, RESOURCE)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    opt_state = jax.eval_shape(lambda: _init(config, optimizer, 0)).opt_state
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        shardings,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(shardings, opt_shardings)


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState, seed: int
) -> TrainState:
    """The state before the first step; its values depend on `seed` alone, not on the mesh."""
    return jax.jit(lambda: _init(config, optimizer, seed), out_shardings=shardings)()


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """The state's shapes, dtypes and shardings, without its values."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: _init(config, optimizer, 0)),
        shardings,
    )


def _init(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    params = model.init(jax.random.key(seed), config)
    return TrainState(params, optimizer.init(params))


def make_train_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh
) -> TrainStep:
    """(state, int32[B, S + 1]) -> (next state, metrics), compiled; the state's buffers are reused."""
    replicated = NamedSharding(mesh, PartitionSpec())
    step = functools.partial(_train_step, config, optimizer)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated))


def make_eval_step(config: ModelConfig, mesh: Mesh) -> EvalStep:
    """(params, int32[B, S + 1]) -> float32[], the mean cross entropy in nats per byte, compiled."""
    step = functools.partial(_cross_entropy, config)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda params, batch: step(params, batch)[0], out_shardings=replicated)


def _train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: jax.Array,
) -> tuple[TrainState, StepMetrics]:
    loss_and_output = functools.partial(_loss, config)
    grad, (loss, output) = jax.grad(loss_and_output, has_aux=True)(state.params, batch)
    updates, opt_state = optimizer.update(grad, state.opt_state, state.params)
    metrics = StepMetrics(
        loss=loss,
        aux_loss=output.aux_loss,
        z_loss=output.z_loss,
        grad_norm=optax.tree_utils.tree_norm(grad),
        num_dropped=output.num_dropped,
        tokens_per_expert=output.tokens_per_expert,
    )
    return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics


def _loss(
    config: ModelConfig, params: Any, batch: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, model.Output]]:
    loss, output = _cross_entropy(config, params, batch)
    return loss + output.aux_loss + output.z_loss, (loss, output)


def _cross_entropy(
    config: ModelConfig, params: Any, batch: jax.Array
) -> tuple[jax.Array, model.Output]:
    output = model.forward(params, batch[:, :-1], config)
    return jnp.mean(model.cross_entropy(output.logits, batch[:, 1:])), output
