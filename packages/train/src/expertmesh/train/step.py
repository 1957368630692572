"""One step of training and one of validation, as pure functions, and the state they act on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from expertmesh.core import accumulate_gradient
from expertmesh.train import model
from expertmesh.train.mesh import RESOURCE, microbatches
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions

# Of the steps. With a shorter one most tokens crowd on two of eight experts for a while.
WARMUP = 0.2


class TrainState(NamedTuple):
    """What a checkpoint holds: the parameters, AdamW's moments and step count, and what quantizers remember."""

    params: Any
    opt_state: Any
    quant_state: Any  # see model.init_quant_states


class StepMetrics(NamedTuple):
    """Of one step, before its update; replicated on every device. Losses are means over its microbatches."""

    loss: jax.Array  # float32[], cross entropy in nats per byte
    aux_loss: jax.Array  # float32[]
    z_loss: jax.Array  # float32[]
    grad_norm: jax.Array  # float32[], before clipping
    num_dropped: jax.Array  # int32[]
    tokens_per_expert: jax.Array  # int32[L, E]
    entropy: jax.Array  # float32[L], of the routers, in nats


class Inputs(NamedTuple):
    """What a forward pass reads besides the parameters."""

    batch: jax.Array  # int32[B, S + 1]
    quant_state: Any
    key: jax.Array | None
    weights_quantized: Any = None


TrainStep = Callable[[TrainState, jax.Array, int], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[TrainState, jax.Array], jax.Array]


def schedule(options: TrainingOptions) -> optax.Schedule:
    """Learning rate of a step: linear warm-up over WARMUP of all, cosine to a twentieth of the peak."""
    peak, warmup = options.learning_rate, int(WARMUP * options.steps)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(options.steps, 2), peak / 20)


def make_optimizer(options: TrainingOptions) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            schedule(options),
            b2=0.95,
            weight_decay=options.weight_decay,
            mask=model.is_matrix,
        ),
    )


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Where the state lives: the moments lie with their parameters, the rest is replicated."""
    specs = model.specs(config, RESOURCE)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.eval_shape(lambda: _init(config, optimizer, 0))
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        shardings,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(
        shardings, opt_shardings, jax.tree.map(lambda _: replicated, state.quant_state)
    )


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState, seed: int
) -> TrainState:
    """The state before the first step; its values depend on `seed` alone, not on the mesh."""
    out: TrainState = jax.jit(lambda: _init(config, optimizer, seed), out_shardings=shardings)()
    return out


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """The state's shapes, dtypes and shardings, without its values."""
    out: TrainState = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: _init(config, optimizer, 0)),
        shardings,
    )
    return out


def _init(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    params = model.init(jax.random.key(seed), config)
    return TrainState(params, optimizer.init(params), model.init_quant_states(config))


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    mesh: Mesh,
    *,
    seed: int = 0,
    grad_accum: int = 1,
) -> TrainStep:
    """(state, int32[B, S + 1], step) -> (next state, metrics), compiled; the state's buffers are reused.

    Random rounding depends on (seed, step) alone. With `grad_accum` above 1 the batch is that many microbatches, one
    after the other: the update is that of their mean gradient, which is added in the parameters' float32.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    step = functools.partial(_train_step, config, optimizer, seed, grad_accum)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, replicated),
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )


def compiler_options(platform: str) -> dict[str, bool] | None:
    """Of a step on devices of that platform: sums in a fixed order, so that a resumed run has the same bits.

    cuDNN's gradient of attention adds in any order unless XLA asks for a fixed one.
    """
    return {"xla_gpu_exclude_nondeterministic_ops": True} if platform == "gpu" else None


def make_eval_step(config: ModelConfig, mesh: Mesh) -> EvalStep:
    """(state, int32[B, S + 1]) -> float32[], the mean cross entropy in nats per byte, compiled."""

    def step(state: TrainState, batch: jax.Array) -> jax.Array:
        # Stochastic rounding is in the backward.
        key = key_of_step(config, 0, 0)
        return _cross_entropy(config, state.params, Inputs(batch, state.quant_state, key))[0]

    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    grad_accum: int,
    state: TrainState,
    batch: jax.Array,
    step: jax.Array,
) -> tuple[TrainState, StepMetrics]:
    inputs = Inputs(batch, state.quant_state, key_of_step(config, seed, step))
    gradient = _gradient if grad_accum == 1 else functools.partial(_mean_gradient, grad_accum)
    grad, quant_state, losses = gradient(config, state.params, inputs)
    updates, opt_state = optimizer.update(grad, state.opt_state, state.params)
    metrics = StepMetrics(**losses, grad_norm=optax.tree_utils.tree_norm(grad))
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, quant_state), metrics


_MEANS = ("loss", "aux_loss", "z_loss", "entropy")
_SUMS = ("num_dropped", "tokens_per_expert")


def _gradient(
    config: ModelConfig,
    params: Any,
    inputs: Inputs,
    totals: Any = None,
    scale: float = 1.0,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """The gradient of `scale` times all losses, on top of `totals`; quantizers' next state; fields of StepMetrics."""

    def scaled(params: Any) -> tuple[jax.Array, Any]:
        if totals is not None:
            params = accumulate_gradient(params, totals)
        loss, output = _cross_entropy(config, params, inputs)
        return scale * (loss + output.aux_loss + output.z_loss), (loss, output)

    grad, (loss, output) = jax.grad(scaled, has_aux=True)(params)
    fields = {name: getattr(output, name) for name in (*_MEANS[1:], *_SUMS)}
    return grad, output.quant_state, {"loss": loss, **fields}


def _mean_gradient(
    count: int, config: ModelConfig, params: Any, inputs: Inputs
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """`_gradient` of `count` microbatches, one after the other. Weights are quantized once for all of them."""
    inputs = inputs._replace(weights_quantized=model.quantize_experts(params, config))

    def add(carry: tuple[Any, Any], own: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        (totals, quant_state), (number, rows) = carry, own
        key = None if inputs.key is None else jax.random.fold_in(inputs.key, number)
        part = inputs._replace(batch=rows, quant_state=quant_state, key=key)
        grad, quant_state, losses = _gradient(config, params, part, totals, 1 / count)
        return (grad, quant_state), losses

    start = (jax.tree.map(jnp.zeros_like, params), inputs.quant_state)
    rows = microbatches(inputs.batch, count)
    (grad, quant_state), losses = jax.lax.scan(add, start, (jnp.arange(count), rows))
    means = {name: jnp.mean(losses[name], axis=0) for name in _MEANS}
    sums = {name: jnp.sum(losses[name], axis=0) for name in _SUMS}
    return grad, quant_state, means | sums


def key_of_step(config: ModelConfig, seed: int, step: jax.Array | int) -> jax.Array | None:
    """The key of a step; None where nothing is quantized."""
    if config.moe.recipe is None:
        return None
    return jax.random.fold_in(jax.random.key(seed), step)


def _cross_entropy(
    config: ModelConfig, params: Any, inputs: Inputs
) -> tuple[jax.Array, model.Output]:
    batch, *quantization = inputs
    output = model.forward(params, batch[:, :-1], config, *quantization)
    return jnp.mean(model.cross_entropy(output.logits, batch[:, 1:])), output
