"""The largest model of one layer shape that a GPU trains, with and without state in the host's memory.

With: AdamW's moments and float32 masters of weights in `pinned_host`, bfloat16 copies on the device, layers' inputs in
`pinned_host` too; some experts' or a layer's weight is updated at a time. Without: all on the device. Both: bfloat16
GEMMs, layers computed again in the backward, gradients added in float32 over microbatches.

How many layers fit is what the compiler's memory of two and of four layers says, and one less as long as they do not
run. Each count is a process of its own, so that the device's peak is its own. The time is that of a step after the
first. Two models of other sizes are compared by the time of a layer: a step has the same tokens, and each layer the
same GEMMs, so that is time per parameter and token.

A step moves 12 bytes of each parameter to the device and 12 back, whatever its tokens: at 50 GB/s and one after the
other 0.48 ns. Its GEMMs are 8 x the parameters that a token has x tokens; with 2 of 8 experts at 400 TFLOP/s that is
1.5 ns for 2**18 tokens. So many a step has here, as 16 microbatches.

Losses and parameters are compared bit for bit after some steps of four layers.

`--gib` leaves the rest of a GPU's memory out, as if it were a smaller one. A parameter takes 6 bytes of the GPU and 12
of the host, whose memory must then be more than twice the GPU's.

Wanted: 2.5 x the parameters, and a layer in at most 1.5 x the time.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.flax_moe import MoEConfig
from expertmesh.train.mesh import make_mesh
from expertmesh.train.model import LAYER_INPUT, ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import TrainState
from expertmesh.train.trainer import Trainer

MODES = {"with": True, "without": False}
WARM, STEPS = 1, 2
PROBES = 2, 4  # layers whose memory is compiled
SPARE = 0.03  # of the memory that XLA has, for what is cut into pieces
TRIES = 4
SHARE, HOST_SHARE = 0.92, 0.85  # of the GPU's memory and of the host's, at most


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int
    heads: int
    expert_width: int
    experts: int
    top_k: int
    sequences: int
    length: int
    microbatches: int

    def __str__(self) -> str:
        tokens = f"{self.microbatches} x {self.sequences} x {self.length} tokens"
        return f"{tokens}, {self.width}, F {self.expert_width}, {self.experts} experts, top {self.top_k}"

    @property
    def batch(self) -> tuple[int, int]:
        return self.microbatches * self.sequences, self.length + 1

    def model(self, layers: int, offload: bool) -> ModelConfig:
        moe = MoEConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            expert_dim=self.expert_width,
            aux_loss_coeff=1e-2,
            dtype="bfloat16",
            param_dtype="float32",
        )
        return ModelConfig(
            layers=layers,
            model_dim=self.width,
            heads=self.heads,
            moe=moe,
            remat_layers=True,
            kept_in_host=(LAYER_INPUT,) if offload else (),
        )


SHAPE = Shape(2048, 16, 8192, 8, 2, 8, 2048, 16)
SMALL = Shape(32, 2, 32, 4, 2, 2, 16, 2)  # for CPU


def trainer(shape: Shape, layers: int, offload: bool) -> Trainer:
    """Of a model of so many layers, with state in the host's memory or without."""
    return Trainer(
        config=shape.model(layers, offload),
        options=TrainingOptions(steps=8, grad_accum=shape.microbatches, offload=offload),
        mesh=make_mesh(1, 1, "explicit"),
    )


def compiled(shape: Shape, one: Trainer):
    """(the step, bytes of it on the device, bytes on the host)."""
    batch = jax.ShapeDtypeStruct(shape.batch, jnp.int32, sharding=one.rows)
    with one.on_mesh():
        lowered = one.step.lower(one.abstract(), batch, jax.ShapeDtypeStruct((), jnp.int32))
        program = lowered.compile()
    return program, *used(program.memory_analysis())


def begun(one: Trainer) -> TrainState:
    with one.on_mesh():
        return one.init()


def batch_of(shape: Shape, one: Trainer, number: int) -> jax.Array:
    text = np.random.default_rng(number).integers(0, 256, shape.batch).astype(np.int32)
    return jax.device_put(text, one.rows)


def used(found) -> tuple[int, int]:
    """Bytes on the device and on the host, of a program's memory analysis."""
    return tuple(
        getattr(found, f"{place}argument_size_in_bytes")
        + getattr(found, f"{place}output_size_in_bytes")
        - getattr(found, f"{place}alias_size_in_bytes")
        + getattr(found, f"{place}temp_size_in_bytes")
        for place in ("", "host_")
    )


def available() -> int | None:
    """Bytes that XLA may use of the device; None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats["bytes_limit"]


def most_layers(shape: Shape, offload: bool) -> int:
    """How many layers fit, by the compiler's memory of two counts."""
    limit = available()
    if limit is None:
        return 2 if offload else 1
    with concurrent.futures.ThreadPoolExecutor() as pool:
        probes = [trainer(shape, layers, offload) for layers in PROBES]
        few, more = (found[1] for found in pool.map(lambda one: compiled(shape, one), probes))
    of_layer = (more - few) / (PROBES[1] - PROBES[0])
    layers = PROBES[0] + int(((1 - SPARE) * limit - few) / of_layer)
    print(f"{few} bytes, {of_layer} more for a layer; {layers} fit in {limit}", flush=True)
    return layers


def trained(shape: Shape, offload: bool, layers: int) -> dict:
    """Time and memory of a step of so many layers."""
    one = trainer(shape, layers, offload)
    step, on_device, on_host = compiled(shape, one)
    state, seconds, losses = begun(one), [], []
    for number in range(WARM + STEPS):
        batch = batch_of(shape, one, number)
        start = time.perf_counter()
        state, metrics = step(state, batch, jnp.int32(number))
        losses.append(float(metrics.loss))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "layers": layers,
        "parameters": sum(p.size for p in jax.tree.leaves(one.abstract().params)),
        "seconds": seconds,
        "losses": losses,
        "compiler": on_device,
        "host": on_host,
        "device": stats.get("peak_bytes_in_use", 0),
    }


def equal(shape: Shape, steps: int = 4) -> dict:
    """In how many of some steps losses are the same bits with and without, and whether all parameters are then."""
    shape = dataclasses.replace(shape, microbatches=2)
    found = {}
    for mode, offload in MODES.items():
        one = trainer(shape, PROBES[1], offload)
        step, *_ = compiled(shape, one)
        state, losses = begun(one), []
        for number in range(steps):
            state, metrics = step(state, batch_of(shape, one, number), jnp.int32(number))
            losses.append(np.asarray([metrics.loss, metrics.grad_norm]).tobytes())
        found[mode] = losses, jax.device_get(state.saved)
    (ours, state), (theirs, other) = found.values()
    same = jax.tree.map(np.array_equal, state, other)
    return {
        "steps": steps,
        "losses": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "parameters": all(jax.tree.leaves(same)),
    }


def rows_of(shape: Shape, ours: dict, theirs: dict, same: dict) -> Iterator[dict]:
    def row(case: str, metric: str, value: float, unit: str, other: float, ratio: float) -> dict:
        reference = f"all on the device, {other:.4g} {unit}"
        return _measure.row(
            bench="offload",
            case=f"{case}, {shape}",
            metric=metric,
            value=value,
            unit=unit,
            reference=reference,
            ratio=ratio,
        )

    sizes, layers = ([one[key] for one in (ours, theirs)] for key in ("parameters", "layers"))
    billions = [size / 1e9 for size in sizes]
    yield row("most parameters", "size", billions[0], "1e9", billions[1], sizes[0] / sizes[1])
    seconds = [sum(one["seconds"][WARM:]) / STEPS for one in (ours, theirs)]
    name = f"a step of {layers[0]} layers and of {layers[1]}, by layer"
    of_layer = [1e3 * t / n for t, n in zip(seconds, layers, strict=True)]
    yield row(name, "time", of_layer[0], "ms", of_layer[1], of_layer[1] / of_layer[0])
    yield row("a step", "time", seconds[0], "s", seconds[1], seconds[1] / seconds[0])
    for key, words in (("compiler", "by the compiler"), ("device", "by the device")):
        mine, other = (one[key] / one["parameters"] for one in (ours, theirs))
        case = f"peak {words}, by parameter"
        yield row(case, "memory", mine, "bytes", other, other / max(mine, 1e-9))
    mine, other = (one["host"] / one["parameters"] for one in (ours, theirs))
    yield row("on the host, by parameter", "memory", mine, "bytes", other, other / max(mine, 1e-9))
    yield row(
        "steps of equal losses"
        + (" and equal parameters after them" if same["parameters"] else ", but not parameters"),
        "equal",
        same["losses"],
        "steps",
        same["steps"],
        same["losses"] / same["steps"],
    )


def child(what: str, layers: int | None, env: dict[str, str]) -> tuple[bool, dict]:
    """Whether a process of its own ended well, and what it found."""
    arguments = [] if layers is None else ["--layers", str(layers)]
    start = time.monotonic()
    status, found = _measure.process("offload", "--one", what, *arguments, env=env)
    print(f"{what} ended with {status} after {time.monotonic() - start:.0f} s: {found or {}}")
    return status == 0, found or {}


def one_gpu(gib: float | None) -> dict[str, str]:
    """The environment in which JAX has so much of one GPU, and most of the host."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total = float(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) / 1024
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    used = min(SHARE * total, gib or total)
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{used / total:.4f}",
        # XLA takes it in pieces, each twice the last, up to this; the state needs 2.2 x the GPU's.
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(int(min(HOST_SHARE * host, 2.6 * used + 16))),
    }


def largest(mode: str, env: dict[str, str]) -> dict:
    """`trained` of the most layers that run."""
    done, found = child(mode, None, env)
    for fewer in range(1, TRIES):
        if done:
            return found
        done, again = child(mode, found["layers"] - fewer, env)
        found = again if done else found
    raise RuntimeError(f"offload: nothing near {found} ran {mode} offload")


def one(what: str, layers: int | None, out: pathlib.Path) -> None:
    """What one process finds, as JSON; the number of layers before they are trained."""
    shape = SHAPE if jax.default_backend() == "gpu" else SMALL
    if what == "equal":
        out.write_text(json.dumps(equal(shape)))
        return
    layers = layers or most_layers(shape, MODES[what])
    out.write_text(json.dumps({"layers": layers}))
    out.write_text(json.dumps(trained(shape, MODES[what], layers)))


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--gib", type=float, help="of the GPU's memory to use; default: all")
    parser.add_argument("--one", help="one process of the benchmark")
    parser.add_argument("--layers", type=int, help="of --one")
    options = parser.parse_args()
    if options.one:
        return one(options.one, options.layers, options.json)
    gpu = _measure.has_gpu()
    env = one_gpu(options.gib) if gpu else {}
    ours, theirs = (largest(mode, env) for mode in MODES)
    _, same = child("equal", None, env)
    shape = SHAPE if gpu else SMALL
    _measure.write(options.json, rows_of(shape, ours, theirs, same))


if __name__ == "__main__":
    main()
