"""One step of training and one of validation, as pure functions, and the state they act on."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from expertmesh.flax_moe.params import EXPERTS
from expertmesh.train import model
from expertmesh.train.mesh import RESOURCE, microbatches
from expertmesh.train.model import ModelConfig
from expertmesh.train.offload import (
    HOST,
    Chunks,
    Parameters,
    cast_in_chunks,
    in_host,
    like_state,
    update,
)
from expertmesh.train.options import TrainingOptions
from expertmesh.train.weight import Weight

# Of the steps. With a shorter one most tokens crowd on two of eight experts for a while.
WARMUP = 0.2
CHUNK_BYTES = 2**27  # of experts that an optimizer updates together, but never less than one


class SavedState(NamedTuple):
    """What a checkpoint holds: the parameters, the optimizer's state, and what quantizers remember."""

    params: Any
    opt_state: Any
    quant_state: Any  # see model.init_quant_states


class TrainState(NamedTuple):
    """What a step changes: what a checkpoint holds, and copies of parameters that lie in the host's memory."""

    params: Any
    opt_state: Any
    quant_state: Any
    copies: Any = None  # of each such parameter, in the dtype that products read; None of any other

    @property
    def saved(self) -> SavedState:
        return SavedState(self.params, self.opt_state, self.quant_state)


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


type Optimizer = optax.GradientTransformationExtraArgs


def make_optimizer(options: TrainingOptions) -> Optimizer:
    """The optimizer after clipping by the norm of all gradients, `grad_norm` of its update; only matrices decay.

    AdamW, or Muon for the weights of experts and AdamW for all else. Muon's update has the root mean square that is
    usual of AdamW's, 0.2, so one learning rate serves both.
    """
    rate = schedule(options)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=options.weight_decay, mask=model.is_matrix)
    clip = clip_by_norm(options.clip)
    if options.optimizer == "adamw":
        return optax.chain(clip, adamw)
    muon = optax.contrib.muon(
        rate,
        weight_decay=options.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_matrices_of_experts,
    )
    by_kind = {"experts": muon, "others": adamw}
    return optax.chain(clip, _laid_out_by_compiler(optax.partition(by_kind, _kinds)))


def _matrices_of_experts(params: Any) -> Any:
    """Of each weight of experts, the dimensions of one matrix; all others number matrices of one batched GEMM."""
    dims = {
        "wi": optax.contrib.MuonDimensionNumbers(-3, -1),  # [..., D, 2, F]: gate and up are apart
        "wo": optax.contrib.MuonDimensionNumbers(-2, -1),  # [..., F, D]
    }
    return jax.tree_util.tree_map_with_path(lambda path, _: dims[path[-1].key], params)


def _kinds(params: Any) -> Any:
    """Of each parameter, whose optimizer is its."""

    def kind(path: tuple[Any, ...], _: Any) -> str:
        return "experts" if path[-1].key in EXPERTS else "others"

    return jax.tree_util.tree_map_with_path(kind, params)


def _laid_out_by_compiler(optimizer: Optimizer) -> Optimizer:
    """The optimizer, with products of matrices that a mesh splits left to the compiler; its results lie as its inputs.

    Under Explicit axes a product over a split dimension is an error, and Newton-Schulz has two of each matrix.
    """

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any]
        if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
            found = optimizer.update(grads, state, params, **extra)
            return found
        layout = jax.tree.map(lambda x: jax.typeof(x).sharding, (grads, state))
        whole = jax.sharding.auto_axes(
            lambda *args: optimizer.update(*args, **extra), out_sharding=layout
        )
        found = whole(grads, state, params)
        return found

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def clip_by_norm(largest: float) -> Optimizer:
    """`optax.clip_by_global_norm`, of a part of the gradients: their norm is the update's argument `grad_norm`."""

    def update(
        grads: Any, state: Any, params: Any = None, *, grad_norm: jax.Array, **extra: Any
    ) -> tuple[Any, Any]:
        del params, extra

        def clip(grad: jax.Array) -> jax.Array:
            return jnp.where(
                grad_norm < largest, grad, grad / grad_norm.astype(grad.dtype) * largest
            )

        return jax.tree.map(clip, grads), state

    made: Optimizer = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    return made


def state_shardings(
    config: ModelConfig, optimizer: Optimizer, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """Where the state lives: the moments are laid out like their parameters, all else is replicated.

    With `offload` the moments of GEMMs' weights are in the host's memory. So are the weights that GEMMs read in another
    dtype; copies in that dtype are then on the device.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(lambda: _init(config, optimizer, 0))
    on_device = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.specs(config, RESOURCE))
    dtypes = _dtypes(config)

    def moments(sharding: NamedSharding, dtype: Any) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if offload and dtype is not None else sharding

    def copies(param: Any, sharding: NamedSharding, dtype: Any) -> NamedSharding | None:
        return None if dtype in (None, param.dtype) else sharding

    of_moments = jax.tree.map(moments, on_device, dtypes)
    of_copies = jax.tree.map(copies, state.params, on_device, dtypes) if offload else None
    of_params = on_device
    if offload:
        of_params = jax.tree.map(
            lambda at_device, at_rest, copy: at_device if copy is None else at_rest,
            on_device,
            of_moments,
            of_copies,
        )
    of_state = like_state(optimizer, state.opt_state, of_moments, replicated)
    of_quantizers = jax.tree.map(lambda _: replicated, state.quant_state)
    return TrainState(of_params, of_state, of_quantizers, of_copies)


def init_state(
    config: ModelConfig, optimizer: Optimizer, shardings: TrainState, seed: int
) -> TrainState:
    """The state before the first step; its values depend on `seed` alone, not on the mesh.

    Arrays in the host's memory are made leaf by leaf, before the device holds anything else.
    """
    places = jax.tree.leaves(shardings.saved)

    def made(numbers: list[int]) -> Any:
        def some() -> list[jax.Array]:
            leaves = jax.tree.leaves(_init(config, optimizer, seed))
            return [leaves[i] for i in numbers]

        return jax.jit(some, out_shardings=[places[i] for i in numbers])()

    on_host = in_host(places)
    leaves = {i: made([i])[0] for i, hosted in enumerate(on_host) if hosted}
    others = [i for i, hosted in enumerate(on_host) if not hosted]
    leaves |= dict(zip(others, made(others), strict=True))
    in_order = [leaves[i] for i in range(len(places))]
    saved = jax.tree.unflatten(jax.tree.structure(shardings.saved), in_order)
    return with_copies(config, saved, shardings)


def with_copies(config: ModelConfig, saved: SavedState, shardings: TrainState) -> TrainState:
    """The state with the copies that its shardings say."""
    if shardings.copies is None:
        return TrainState(*saved)
    copies = jax.tree.map(
        lambda param, sharding, dtype, chunks: (
            None if sharding is None else cast_in_chunks(param, dtype, chunks, sharding)
        ),
        saved.params,
        shardings.copies,
        _dtypes(config),
        chunks_of(config, saved, shardings),
    )
    return TrainState(*saved, copies)


def abstract_state(config: ModelConfig, optimizer: Optimizer, shardings: TrainState) -> TrainState:
    """The state's shapes, dtypes and shardings, without its values."""

    def struct(leaf: Any, sharding: Any, dtype: Any = None) -> Any:
        if sharding is None:
            return None
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)

    saved = jax.eval_shape(lambda: _init(config, optimizer, 0))
    out = TrainState(*jax.tree.map(struct, saved, shardings.saved))
    if shardings.copies is None:
        return out
    dtypes = _dtypes(config)
    return out._replace(copies=jax.tree.map(struct, saved.params, shardings.copies, dtypes))


def _dtypes(config: ModelConfig) -> Any:
    """For each weight, the dtype in which GEMMs read it."""
    return model.weights(config, lambda _, dims, dtype: jnp.dtype(dtype))


def chunks_of(config: ModelConfig, state: SavedState | TrainState, shardings: TrainState) -> Any:
    """For each parameter, the chunks in which it is updated: a layer's weight, or as many of its experts as fit.

    They fit that have CHUNK_BYTES together, as wholes: Muon gathers what a mesh splits of a matrix. Where an axis
    splits the experts themselves, a chunk has all of a layer. AdamW holds nothing beside a parameter and its state:
    where these are on a GPU, it updates each parameter at once, in place. XLA for CPUs fuses such an update with what
    made the gradient, which would round otherwise than with `offload`.
    """
    if shardings.copies is None and _on_gpu(shardings) and not _multiplies(state.opt_state):
        return jax.tree.map(lambda _: Chunks(), state.params)

    def chunks(param: Any, sharding: NamedSharding, batch_dims: int | None) -> Chunks:
        shard = sharding.shard_shape(param.shape)
        batch = zip(shard[: batch_dims or 0], param.shape, strict=False)
        whole = list(itertools.takewhile(lambda sizes: sizes[0] == sizes[1], batch))
        if len(whole) < 2:
            return Chunks((1,) * len(whole))
        ((count, _),) = whole[1:]
        of_expert = math.prod(param.shape[2:]) * param.dtype.itemsize
        together = max(1, CHUNK_BYTES // of_expert)
        return Chunks((1, max(n for n in range(1, count + 1) if count % n == 0 and n <= together)))

    batch_dims = model.weights(config, lambda _, dims, dtype: dims)
    return jax.tree.map(chunks, state.params, shardings.params, batch_dims)


def _on_gpu(shardings: TrainState) -> bool:
    first: NamedSharding = jax.tree.leaves(shardings.params)[0]
    return str(first.mesh.devices.flat[0].platform) == "gpu"


def _multiplies(opt_state: Any) -> bool:
    """Whether it is of an optimizer with GEMMs, whose operands are beside a parameter and its state."""

    def is_muons(state: Any) -> bool:
        return isinstance(state, optax.contrib.MuonState)

    return any(is_muons(state) for state in jax.tree.leaves(opt_state, is_leaf=is_muons))


def _init(config: ModelConfig, optimizer: Optimizer, seed: int) -> SavedState:
    params = model.init(jax.random.key(seed), config)
    return SavedState(params, optimizer.init(params), model.init_quant_states(config))


def make_train_step(
    config: ModelConfig,
    optimizer: Optimizer,
    shardings: TrainState,
    mesh: Mesh,
    *,
    seed: int = 0,
    grad_accum: int = 1,
) -> TrainStep:
    """(state, int32[B, S + 1], step) -> (next state, metrics), compiled; the state's buffers are reused.

    Stochastic rounding depends on (seed, step) alone. With `grad_accum` above 1 the batch is that many microbatches,
    one after the other. The update is that of their mean gradient, which is added in the parameters' float32.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    step = functools.partial(_train_step, config, optimizer, seed, grad_accum, shardings)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, replicated),
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )


def compiler_options(platform: str) -> dict[str, bool] | None:
    """XLA options of a step on that platform: sums in a fixed order, so that a resumed run has the same bits.

    cuDNN's gradient of attention adds in any order unless XLA asks for a fixed one.
    """
    return {"xla_gpu_exclude_nondeterministic_ops": True} if platform == "gpu" else None


def make_eval_step(config: ModelConfig, mesh: Mesh) -> EvalStep:
    """(state, int32[B, S + 1]) -> float32[], the mean cross entropy in nats per byte, compiled."""

    def step(state: TrainState, batch: jax.Array) -> jax.Array:
        # Stochastic rounding is in the backward.
        inputs = Inputs(batch, state.quant_state, key_of_step(config, 0, 0))
        return _cross_entropy(config, params_read(state), inputs)[0]

    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def params_read(state: TrainState) -> Any:
    """What a forward reads: the parameters, or copies of those whose masters are in the host's memory."""
    if state.copies is None:
        return state.params
    return jax.tree.map(lambda p, copy: p if copy is None else copy, state.params, state.copies)


def _train_step(
    config: ModelConfig,
    optimizer: Optimizer,
    seed: int,
    grad_accum: int,
    shardings: TrainState,
    state: TrainState,
    batch: jax.Array,
    step: jax.Array,
) -> tuple[TrainState, StepMetrics]:
    inputs = Inputs(batch, state.quant_state, key_of_step(config, seed, step))
    gradient = _gradient if grad_accum == 1 else functools.partial(_mean_gradient, grad_accum)
    grad, quant_state, losses = gradient(config, _trained(state), state.copies, inputs)
    norm = optax.tree_utils.tree_norm(grad)
    metrics = StepMetrics(**losses, grad_norm=norm)
    copies = _none_like(state.params) if state.copies is None else state.copies
    new = update(
        optimizer,
        grad,
        Parameters(state.params, state.opt_state, copies),
        in_host(Parameters(shardings.params, shardings.opt_state, None)),
        chunks_of(config, state, shardings),
        grad_norm=norm,
    )
    copies = None if state.copies is None else new.copies
    return TrainState(new.params, new.opt_state, quant_state, copies), metrics


def _none_like(tree: Any) -> Any:
    return jax.tree.map(lambda _: None, tree)


def _trained(state: TrainState) -> Any:
    """What the losses are differentiated in: the parameters; of one with a copy, what is never read."""
    if state.copies is None:
        return state.params

    def slot(param: jax.Array, copy: jax.Array | None) -> jax.Array:
        return param if copy is None else jnp.zeros_like(copy, param.dtype)

    return jax.tree.map(slot, state.params, state.copies)


def _read(trained: Any, copies: Any) -> Any:
    """What the model reads, for the two."""
    if copies is None:
        return trained
    return jax.tree.map(lambda t, c: t if c is None else Weight(c, t), trained, copies)


_MEANS = ("loss", "aux_loss", "z_loss", "entropy")
_SUMS = ("num_dropped", "tokens_per_expert")


def _gradient(
    config: ModelConfig, trained: Any, copies: Any, inputs: Inputs
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """The gradient of all losses; quantizers' next state; fields of StepMetrics."""
    grad, aux = jax.grad(_losses, has_aux=True)(trained, copies, config, inputs)
    return grad, *aux


def _losses(
    trained: Any, copies: Any, config: ModelConfig, inputs: Inputs, scale: float = 1.0
) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
    """`scale` times the sum of all losses; quantizers' next state and fields of StepMetrics."""
    loss, output = _cross_entropy(config, _read(trained, copies), inputs)
    fields = {name: getattr(output, name) for name in (*_MEANS[1:], *_SUMS)}
    total = scale * (loss + output.aux_loss + output.z_loss)
    return total, (output.quant_state, {"loss": loss, **fields})


def _mean_gradient(
    count: int, config: ModelConfig, trained: Any, copies: Any, inputs: Inputs
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """`_gradient` of `count` microbatches, one after the other. Weights are quantized once for all of them.

    Each microbatch adds to the same sum in place, layer by layer: there is one such sum, and no gradient beside it.
    """
    quantized = model.quantize_experts(_read(trained, copies), config)
    inputs = inputs._replace(weights_quantized=quantized)
    totals = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), trained)

    def add(quant_state: Any, own: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        number, rows = own
        key = None if inputs.key is None else jax.random.fold_in(inputs.key, number)
        part = inputs._replace(batch=rows, quant_state=quant_state, key=key)

        def losses(trained: Any) -> tuple[jax.Array, Any]:
            return _losses(trained, copies, config, part, 1 / count)

        pull: Any  # its types know no `with_refs`
        total, pull, (quant_state, fields) = jax.vjp(losses, trained, has_aux=True)
        pull.with_refs(totals)(jnp.ones_like(total))
        return quant_state, fields

    rows = microbatches(inputs.batch, count)
    quant_state, losses = jax.lax.scan(add, inputs.quant_state, (jnp.arange(count), rows))
    means = {name: jnp.mean(losses[name], axis=0) for name in _MEANS}
    sums = {name: jnp.sum(losses[name], axis=0) for name in _SUMS}
    return jax.tree.map(jax.freeze, totals), quant_state, means | sums


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
