"""A step of the trainer: the model of docs/train.md's command for GPUs, by recipe; its layers one by one, and scanned.

The rate counts the FLOPs of the model's formula, as the trainer's MFU does, and stands against the data sheet's of
dense bfloat16 GEMMs: the ratio is the MFU. A time is that of some steps in a row, each of which reuses the buffers of
the one before, over their number. What the compiler's memory says of a step is in the case: what it needs beside its
operands.
"""

import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.train.flops import meter
from expertmesh.train.job import model_config
from expertmesh.train.mesh import make_mesh, mesh_sizes
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import ModelOptions, TrainingOptions
from expertmesh.train.trainer import Trainer

# Name -> the recipe, and what experts keep for the backward.
KINDS = {
    "bfloat16": (None, "save_all"),
    "fp8_block": ("fp8_block", "save_all"),
    "fp8_current": ("fp8_current", "save_all"),
    "fp8_block with save_8_bits": ("fp8_block", "save_8_bits"),
}
WARM, STEPS, TURNS = 3, 10, 3
# That of the command. At the trainer's default, ten times as much, experts' loads drift apart within these steps.
LEARNING_RATE = 3e-4


# The options of a model, and the sequences of each device.
GPU = (
    ModelOptions(model_dim=2048, heads=16, expert_dim=4096, seq_len=1024, dtype="bfloat16"),
    64,
)
CPU = ModelOptions(model_dim=128, heads=2, expert_dim=128, seq_len=16, dtype="bfloat16"), 2


def step_of(config: ModelConfig, size: tuple[int, int]) -> tuple[float, int]:
    """(seconds of a step, bytes that it needs beside its operands)."""
    axes = mesh_sizes({}, jax.device_count(), config.moe.num_experts)
    mesh = make_mesh(*axes, "explicit")
    options = TrainingOptions(steps=100, learning_rate=LEARNING_RATE)
    one = Trainer(config=config, options=options, mesh=mesh)
    text = np.random.default_rng(0).integers(0, 256, size).astype(np.int32)
    batch, number = jax.device_put(text, one.rows), jnp.int32(0)
    with one.on_mesh():
        state = one.init()
        step = one.step.lower(state, batch, number).compile()
        found = []
        for count in (WARM, *[STEPS] * TURNS):
            begin = time.perf_counter()
            for _ in range(count):
                state, metrics = step(state, batch, number)
            jax.block_until_ready(metrics)
            found.append((time.perf_counter() - begin) / count)
    return min(found[1:]), step.memory_analysis().temp_size_in_bytes


def rows_of(model: ModelOptions, sequences: int) -> Iterator[dict]:
    size = jax.device_count() * sequences, model.seq_len + 1
    shape = (
        f"{sequences} x {model.seq_len} tokens, {model.layers} layers, {model.model_dim}, F {model.expert_dim}, "
        f"{model.experts} experts, top {model.top_k}"
    )
    for name, (recipe, remat) in KINDS.items():
        scanned = model_config(dataclasses.replace(model, recipe=recipe))
        scanned = dataclasses.replace(scanned, moe=dataclasses.replace(scanned.moe, remat=remat))
        config = dataclasses.replace(scanned, unrolled=True)
        of = meter(config, model.seq_len)
        flops = sequences * model.seq_len * of.flops_per_token
        peak = of.peak or 1e12  # no GPU has none
        seconds, needed = step_of(config, size)
        case = f"{name} step, {shape}, {needed / 1e9:.1f} GB"
        reference = "the data sheet's bfloat16", flops / peak
        yield _measure.rate_row("train_step", case, flops, seconds, *reference)
        longer, needed = step_of(scanned, size)
        case = f"{name} step, {shape}, layers scanned, {needed / 1e9:.1f} GB"
        yield _measure.time_row("train_step", case, longer, "each by itself", seconds, unit="ms")


def main():
    options = _measure.parser(__doc__).parse_args()
    _measure.write(options.json, rows_of(*(GPU if jax.default_backend() == "gpu" else CPU)))


if __name__ == "__main__":
    main()
