"""The main job, from options to pictures: `run` is the table of contents."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from expertmesh.core.support import platform_of
from expertmesh.ep import raise_stall, recv_capacity
from expertmesh.ep.transports import choose_auto
from expertmesh.ep.transports.choice import Exchange
from expertmesh.flax_moe import REMAT_POLICIES, MoEConfig, exchange_bytes
from expertmesh.train import agreement, checkpoint, data, devices, flops, metrics, order1, rundir
from expertmesh.train.attention import implementation
from expertmesh.train.data import Corpus
from expertmesh.train.mesh import make_mesh, mesh_sizes
from expertmesh.train.model import LAYER_INPUT, ModelConfig
from expertmesh.train.offload import unsupported
from expertmesh.train.options import ModelOptions, Options, TrainingError, UsageError
from expertmesh.train.recorder import Recorder
from expertmesh.train.rundir import RunFolder
from expertmesh.train.step import TrainState, TrainStep
from expertmesh.train.stop import StopRequest
from expertmesh.train.trainer import Trainer

SMALLEST_BATCH = 8


class Job(NamedTuple):
    """Everything that is decided before the first step."""

    options: Options  # with the values that depend on the devices filled in
    trainer: Trainer
    corpus: Corpus
    valid: npt.NDArray[np.int32]  # [V, S + 1], the validation windows
    order1_loss: float  # of the order-1 model on `valid`
    folder: RunFolder

    @property
    def config(self) -> ModelConfig:
        return self.trainer.config

    @property
    def mesh(self) -> Mesh:
        return self.trainer.mesh


class Functions(NamedTuple):
    """The job's computations on devices."""

    batch: Callable[[int], jax.Array]
    train_step: TrainStep
    evaluate: Callable[[TrainState], float]


def run(options: Options) -> int:
    """Trains as the options say and returns the exit code.

    Raises:
      UsageError: for input that the user can put right.
      TrainingError: the devices' memory does not hold the step, or the disk not a file of the run.
    """
    corpus = data.load_corpus(options.training.data, options.model.seq_len)
    devices.start(options.devices)
    job = plan(options, corpus)
    _say(_describe(job))
    with contextlib.ExitStack() as stack:
        try:
            return _run(job, stack)
        except jax.errors.JaxRuntimeError as error:
            if not re.search("RESOURCE_EXHAUSTED|Out of memory", str(error)):
                raise
            raise TrainingError(
                f"a device's memory must hold the state and a step; got {str(error).splitlines()[0]}; give a larger "
                "--grad-accum, --remat full or --offload, or fewer tokens by --batch-size"
            ) from error
        except OSError as error:
            if error.errno is None or isinstance(error, ConnectionError):  # of no file
                raise
            raise TrainingError(
                f"the system must let a run write its files; got {error.filename or job.folder.path}: "
                f"{error.strerror}; make room or give the right to write, then --resume goes on from the last "
                "checkpoint"
            ) from error


def _run(job: Job, stack: contextlib.ExitStack) -> int:
    """Trains, and returns the exit code; `stack` holds the run's folder."""
    with job.trainer.on_mesh():
        _agree(job)
        functions = _functions(job)
        start, state = _begin(job, stack)
        began = time.perf_counter()
        step, signal_number, state = _loop(job, functions, start, state)
        # If no step was left to train, the last row may lack it.
        valid_loss = functions.evaluate(state) if step == start else None
        phases = _phases(job, functions, step, state) if signal_number is None else {}
    if signal_number is not None:
        name = signal.Signals(signal_number).name
        _say(f"stopped by {name} after step {step}; --resume continues from its checkpoint")
        return 128 + signal_number
    if jax.process_index() == 0:
        _report(job, time.perf_counter() - began, phases, valid_loss)
    return 0


def plan(options: Options, corpus: Corpus) -> Job:
    """Fits the options to the devices.

    Raises:
      UsageError: where they do not fit.
    """
    fsdp, ep = mesh_sizes(dict(options.devices.mesh), jax.device_count(), options.model.experts)
    if options.model.transport == "local" and ep > 1:
        raise UsageError(
            f"--transport local must have a mesh axis ep of 1; got ep={ep}; "
            "give --transport auto or --mesh ep=1"
        )
    _check_width(options.model, fsdp)
    if options.training.offload and (missing := unsupported(jax.devices()[0])):
        raise UsageError(
            f"--offload must have a host's memory that the devices reach; got {missing}; leave --offload out"
        )
    by_experts = options.devices.shard_exp_on_fsdp
    if by_experts and options.model.experts % (fsdp * ep):
        raise UsageError(
            "--experts must be a multiple of the number of devices under --shard-exp-on-fsdp; "
            f"got experts={options.model.experts}, fsdp={fsdp} x ep={ep}; leave --shard-exp-on-fsdp out"
        )
    options = _fill(options)
    config = model_config(options.model)
    remat = options.training.remat
    try:
        moe = dataclasses.replace(
            config.moe,
            shard_exp_on_fsdp=by_experts,
            num_spare_experts=options.devices.spare_experts,
            remat=remat if remat in REMAT_POLICIES else config.moe.remat,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    V, S = _num_windows(options), options.model.seq_len
    valid = data.windows(corpus.valid, data.spread_starts(V, len(corpus.valid), S), S)
    config = dataclasses.replace(
        config,
        moe=moe,
        remat_layers=remat == "full",
        kept_in_host=(LAYER_INPUT,) if remat == "full" and options.training.offload else (),
        unrolled=_unrolls(options),
    )
    mesh = make_mesh(fsdp, ep, options.devices.axis_types)
    return Job(
        options=options,
        trainer=Trainer(config=config, options=options.training, mesh=mesh),
        corpus=corpus,
        valid=valid,
        order1_loss=order1.loss(order1.fit(corpus.train), valid),
        folder=RunFolder(options.run.out),
    )


# Each layer by itself adds 0.6 s to the time in which XLA compiles a step for a GPU.
UNROLLED = 16


def _unrolls(options: Options) -> bool:
    """Whether layers are compiled one by one.

    Not where a scan copies little, since layers are computed again, nor where microbatches add each layer's gradient to
    their sum in place.
    """
    training = options.training
    return (
        options.model.layers <= UNROLLED and training.remat != "full" and training.grad_accum == 1
    )


def model_config(options: ModelOptions) -> ModelConfig:
    """The model that the options describe; their dtype is "float32" or "bfloat16".

    Raises:
      UsageError: where they contradict each other.
    """
    D, H = options.model_dim, options.heads
    if D % (2 * H):
        raise UsageError(
            f"--model-dim must be a multiple of twice --heads; got model-dim={D}, heads={H}; "
            f"give --model-dim {-(-D // (2 * H)) * 2 * H} or fewer heads"
        )
    if options.top_k > options.experts:
        raise UsageError(
            f"--top-k must be at most --experts; got top-k={options.top_k}, "
            f"experts={options.experts}; give --top-k {options.experts} or less"
        )
    try:
        moe = MoEConfig(
            num_experts=options.experts,
            top_k=options.top_k,
            expert_dim=options.expert_dim,
            aux_loss_coeff=options.aux_loss,
            z_loss_coeff=options.z_loss,
            capacity_factor=options.capacity_factor,
            transport=options.transport,
            recipe=options.recipe,
            dtype=jnp.dtype(options.dtype),
            param_dtype=jnp.float32,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return ModelConfig(layers=options.layers, model_dim=D, heads=H, moe=moe)


def _check_width(options: ModelOptions, fsdp: int) -> None:
    """Every weight is split over fsdp along the model width."""
    D, unit = options.model_dim, math.lcm(fsdp, 2 * options.heads)
    if D % fsdp:
        raise UsageError(
            f"--model-dim must be a multiple of the mesh axis fsdp; got model-dim={D}, fsdp={fsdp}; "
            f"give --model-dim {-(-D // unit) * unit} or another --mesh"
        )


def _fill(options: Options) -> Options:
    """The options with the batch size and the compute dtype decided for the devices at hand."""
    training, count = options.training, jax.device_count()
    unit, batch_size = count * training.grad_accum, training.batch_size
    recorded = None
    if batch_size is None:
        recorded = rundir.batch_size_of(RunFolder(options.run.out)) if options.run.resume else None
        batch_size = recorded or -(-SMALLEST_BATCH // unit) * unit
    if batch_size % unit:
        of_run, remedy = "", f"give --batch-size {-(-batch_size // unit) * unit}"
        if recorded:
            of_run = " of the run that --resume continues"
            remedy = f"take devices that divide it, or {remedy}, which makes another run of it"
        raise UsageError(
            "--batch-size must be a multiple of the number of devices times --grad-accum; "
            f"got batch-size={batch_size}{of_run} with {count} devices, grad-accum={training.grad_accum}; {remedy}"
        )
    dtype = options.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return dataclasses.replace(
        options,
        model=dataclasses.replace(options.model, dtype=dtype),
        training=dataclasses.replace(training, batch_size=batch_size),
    )


def _num_windows(options: Options) -> int:
    """`eval_windows` rounded up to whole batches."""
    batch_size = _batch_size(options)
    return -(-options.training.eval_windows // batch_size) * batch_size


def _batch_size(options: Options) -> int:
    assert options.training.batch_size is not None  # _fill
    return options.training.batch_size


def _agree(job: Job) -> None:
    """Raises where the job's processes were not started alike."""
    training, model = job.options.training, job.options.model
    microbatch = _batch_size(job.options) // training.grad_accum
    agreement.check_job(
        job.options,
        job.trainer,
        job.config.moe.exchange(axis=("ep",), capacity=_capacity(job)),
        tokens=(microbatch, model.seq_len),
        fingerprint=job.corpus.fingerprint,
    )


def _begin(job: Job, stack: contextlib.ExitStack) -> tuple[int, TrainState]:
    """Prepares the run folder, which `stack` holds then; returns the last finished step and the state after it."""
    options = job.options
    record = rundir.record(
        options.model,
        options.training,
        job.corpus.fingerprint,
        spare_experts=options.devices.spare_experts,
    )
    resume = options.run.resume
    prepare = rundir.check_resumable if resume else rundir.begin
    _on_first_process(lambda: prepare(job.folder, record))
    _on_first_process(lambda: stack.enter_context(rundir.held(job.folder)))
    if resume:
        abstract = job.trainer.abstract().saved
        restored = checkpoint.restore(job.folder.checkpoints, abstract, _say)
        if restored is not None:
            step, saved = restored
            _check_steps(options.training.steps, step)
            state = job.trainer.restored(saved)
            _on_first_process(lambda: metrics.keep_until(job.folder.metrics, step))
            _say(f"resuming after step {step}")
            return step, state
        _say("no checkpoint was finished yet, so the run starts at its first step")
        _on_first_process(lambda: metrics.keep_until(job.folder.metrics, 0))
    return 0, job.trainer.init()


def _check_steps(steps: int, step: int) -> None:
    if steps < step:
        raise UsageError(
            f"--steps must be no less than the step that --resume continues from; got {steps}, and a checkpoint of "
            f"step {step}; give --steps {step} or more"
        )


def _on_first_process(action: Callable[[], str | None]) -> None:
    """Runs `action` on process 0 and prints its note; an error there stops every process."""
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            if note := action():
                _say(note)
        except (UsageError, OSError) as caught:
            error = caught
    failed = multihost_utils.broadcast_one_to_all(np.int32(error is not None))
    if failed:
        raise error or UsageError("process 0 could not begin; its message says why")


def _functions(job: Job) -> Functions:
    """Makes them, without compiling.

    Raises:
      UsageError: a recipe's blocks do not fit the model or its shards, or a transport is not available.
    """
    training, S, B = job.options.training, job.options.model.seq_len, _batch_size(job.options)
    trainer = job.trainer
    place = functools.partial(data.device_windows, seq_len=S, sharding=trainer.rows)
    valid_starts = data.spread_starts(len(job.valid), len(job.corpus.valid), S)
    valid = [
        place(job.corpus.valid, starts)
        for starts in np.split(valid_starts, len(job.valid) * training.grad_accum // B)
    ]

    def batch(step: int) -> jax.Array:
        starts = data.batch_starts(training.seed, step, B, len(job.corpus.train), S)
        return place(job.corpus.train, starts)

    def evaluate(state: TrainState) -> float:
        return float(np.mean([float(trainer.evaluate(state, rows)) for rows in valid]))

    rows = jax.ShapeDtypeStruct((B, S + 1), jnp.int32, sharding=trainer.rows)
    try:
        jax.eval_shape(trainer.step, trainer.abstract(), rows, 0)
    except ValueError as error:
        raise UsageError(
            "--recipe and --transport must fit the model, its shards and the devices; got "
            f"{job.options.model.recipe}, {job.options.model.transport}: {error}"
        ) from error
    return Functions(batch, trainer.step, evaluate)


def _loop(
    job: Job, functions: Functions, start: int, state: TrainState
) -> tuple[int, int | None, TrainState]:
    """Trains after step `start`; returns the last step, the signal that ended it early, if any, and the state."""
    training, run_options = job.options.training, job.options.run
    names = metrics.header(job.config.layers, job.config.moe.num_experts)
    recorder = Recorder(
        job.folder.metrics,
        names,
        start=start,
        steps=training.steps,
        tokens=_batch_size(job.options) * job.options.model.seq_len,
        log_every=run_options.log_every,
        mfu=_meter(job).mfu,
    )
    with recorder, StopRequest() as stop:
        for step in range(start + 1, training.steps + 1):
            state, step_metrics = functions.train_step(state, functions.batch(step), step)
            last, stopped = step == training.steps, stop.reached(step)
            valid_loss = None
            if last or step % training.eval_every == 0:
                with recorder.apart(step_metrics):
                    valid_loss = functions.evaluate(state)
            recorder.add(step, step_metrics, valid_loss)
            if last or stopped or step % run_options.checkpoint_every == 0:
                _flush(recorder)
                with recorder.apart(step_metrics):
                    checkpoint.save(job.folder.checkpoints, step, state.saved, run_options.keep)
            if stopped and not last:
                return step, stop.signal_number, state
    return max(start, training.steps), None, state


def _phases(job: Job, functions: Functions, step: int, state: TrainState) -> dict[str, float]:
    """Milliseconds of each phase of the first layer's block, under `--phases`; else {}."""
    if not job.options.run.phases:
        return {}
    from expertmesh.train import phases

    grad_accum = job.options.training.grad_accum
    return phases.time_phases(job.config, state, functions.batch(step), grad_accum=grad_accum)


def _exchange_bytes(job: Job) -> dict[str, int]:
    """Bytes that a device sends to others for one layer and microbatch."""
    return exchange_bytes(
        job.config.moe,
        model_dim=job.config.model_dim,
        num_tokens=_tokens_per_device(job),
        ep_size=job.mesh.shape["ep"],
    )


def _flush(recorder: Recorder) -> None:
    """Its `flush`; where a stalled exchange is why training cannot go on, the error says so."""
    try:
        recorder.flush()
    except TrainingError as error:
        try:
            raise_stall()
        except RuntimeError as stall:
            raise TrainingError(f"{error}; {stall}") from error
        raise


def _report(job: Job, seconds: float, phases: dict[str, float], valid_loss: float | None) -> None:
    """Writes the pictures and the summary, and prints the result. For process 0.

    `valid_loss`: None where the last step's row has it.
    """
    from expertmesh.train import plots  # 0.8 s of imports that only this needs

    try:
        columns = metrics.read_columns(job.folder.metrics)
    except (OSError, ValueError) as error:  # no step was left to train, and the rows are gone
        _say(f"no summary: {error}")
        return
    E = job.config.moe.num_experts
    shares_NLE = metrics.expert_shares(columns, job.config.layers, E)
    share, layer, expert, steps = metrics.smallest_share(shares_NLE)
    plots.plot_loss(columns, job.order1_loss, job.folder.loss_plot)
    plots.plot_experts(columns["step"], shares_NLE, job.folder.experts_plot)
    valid_loss = float(columns["valid_loss"][-1]) if valid_loss is None else valid_loss
    dropped = columns["dropped"]
    speed, meter = metrics.median_speed(columns), _meter(job)
    summary = {
        "valid_loss": valid_loss,
        "order1_loss": job.order1_loss,
        "smallest_expert_share": share,
        "dropped": int(dropped.sum()),
        "tokens_per_second": speed,
        "mfu": None if speed is None else meter.mfu(speed),
        "seconds": round(seconds, 1),
        "transport": _transport(job),
        "exchange_bytes": _exchange_bytes(job),
        "phases_ms": {phase: round(each, 3) for phase, each in phases.items()},
    }
    checkpoint.write_whole(job.folder.summary, json.dumps(summary, indent=1))
    _say(f"validation loss        {valid_loss:.4f} nats per byte")
    _say(
        f"order-1 byte model     {job.order1_loss:.4f} nats per byte on the same bytes, "
        f"{abs(job.order1_loss - valid_loss):.4f} {'above' if job.order1_loss > valid_loss else 'below'}"
    )
    _say(
        f"smallest expert share  {share:.4f} (layer {layer}, expert {expert}, last {steps} steps); "
        f"even is {1 / E:.4f}, 1/(4E) is {1 / (4 * E):.4f}"
    )
    if dropped.any():
        _say(
            f"dropped choices        {int(dropped.sum())}, in {np.count_nonzero(dropped)} of {len(dropped)} steps"
        )
    _say(f"trained for            {seconds:.0f} s")
    if speed is not None:
        _say(f"speed                  {meter.describe(speed)}")
    if phases:
        times = ", ".join(f"{phase} {each:.2f}" for phase, each in phases.items())
        _say(f"phases of a block, ms  {times}")
    files = (job.folder.metrics, job.folder.loss_plot, job.folder.experts_plot)
    _say(f"wrote                  {', '.join(map(str, files))}")


def _meter(job: Job) -> flops.Meter:
    return flops.meter(job.config, job.options.model.seq_len)


def _transport(job: Job) -> str:
    """How tokens move between devices; what "auto" stands for."""
    moe, ranks = job.config.moe, job.mesh.shape["ep"]
    if moe.transport != "auto" or ranks == 1:
        return moe.transport if ranks > 1 else "local"
    return choose_auto(
        Exchange(
            num_tokens=_tokens_per_device(job),
            top_k=moe.top_k,
            capacity=_capacity(job),
            ep_size=ranks,
            dtype=moe.dtype,
            platform=platform_of(),
        )
    )


def _capacity(job: Job) -> int:
    """Receive rows of a device, for one layer and microbatch."""
    moe, ranks = job.config.moe, job.mesh.shape["ep"]
    tokens = _tokens_per_device(job)
    return recv_capacity(
        moe.num_experts, moe.top_k, tokens, ranks, moe.row_alignment, moe.capacity_factor
    )


def _tokens_per_device(job: Job) -> int:
    """Of a microbatch."""
    microbatch = _batch_size(job.options) // job.options.training.grad_accum
    return microbatch * job.options.model.seq_len // job.mesh.size


def _attention(job: Job) -> str:
    return implementation(platform_of(), job.config.moe.dtype, job.config.head_dim)


def _describe(job: Job) -> str:
    model, corpus, mesh = job.options.model, job.corpus, job.mesh
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return "\n".join(
        (
            f"data    {corpus.source}; {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.valid):,} held out",
            f"model   {model.layers} layers of width {model.model_dim}, {model.experts} experts of width "
            f"{model.expert_dim}, top {model.top_k}, {model.dtype}"
            + (f", experts in {model.recipe}" if model.recipe else ""),
            f"devices {jax.device_count()} {jax.default_backend()} in {jax.process_count()} process(es), "
            f"mesh {axes}, {job.options.devices.axis_types} axes; tokens move by {_transport(job)}, attention by "
            f"{_attention(job)}"
            + (
                f", {spare} spare slots a rank"
                if (spare := job.options.devices.spare_experts)
                else ""
            )
            + (", state in the host's memory" if job.options.training.offload else ""),
        )
    )


def _say(text: str) -> None:
    """Prints on process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)
