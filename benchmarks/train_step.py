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
from expertmesh.flax_moe import MoEConfig
from expertmesh.train.flops import meter
from expertmesh.train.mesh import make_mesh
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.trainer import Trainer

RECIPES = None, "fp8_block", "fp8_current"
WARM, STEPS, TURNS = 3, 10, 3


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    expert_width: int
    sequences: int  # of each device
    length: int

    def __str__(self) -> str:
        tokens = f"{self.sequences} x {self.length} tokens"
        return (
            f"{tokens}, {self.layers} layers, {self.width}, F {self.expert_width}, 8 experts, top 2"
        )

    def model(self, recipe: str | None, unrolled: bool) -> ModelConfig:
        moe = MoEConfig(
            num_experts=8,
            top_k=2,
            expert_dim=self.expert_width,
            aux_loss_coeff=1e-2,
            z_loss_coeff=1e-3,
            recipe=recipe,
            dtype="bfloat16",
            param_dtype="float32",
        )
        return ModelConfig(
            layers=self.layers,
            model_dim=self.width,
            heads=self.heads,
            moe=moe,
            unrolled=unrolled,
        )


GPU, CPU = Shape(2, 2048, 16, 4096, 64, 1024), Shape(2, 128, 2, 128, 2, 16)


def step_of(config: ModelConfig, shape: Shape) -> tuple[float, int]:
    """(seconds of a step, bytes that it needs beside its operands)."""
    devices = jax.device_count()
    one = Trainer(
        config=config, options=TrainingOptions(steps=100), mesh=make_mesh(1, devices, "explicit")
    )
    size = devices * shape.sequences, shape.length + 1
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


def rows_of(shape: Shape) -> Iterator[dict]:
    tokens = jax.device_count() * shape.sequences * shape.length
    for recipe in RECIPES:
        config = shape.model(recipe, unrolled=True)
        of = meter(config, shape.length)
        flops = tokens * of.flops_per_token / of.devices
        peak = of.peak or 1e12  # no GPU has none
        name = recipe or "bfloat16"
        seconds, size = step_of(config, shape)
        case = f"{name} step, {shape}, {size / 1e9:.1f} GB"
        reference = "the data sheet's bfloat16", flops / peak
        yield _measure.rate_row("train_step", case, flops, seconds, *reference)
        scanned, size = step_of(shape.model(recipe, unrolled=False), shape)
        case = f"{name} step, {shape}, layers scanned, {size / 1e9:.1f} GB"
        yield _measure.time_row("train_step", case, scanned, "each by itself", seconds, unit="ms")


def main():
    options = _measure.parser(__doc__).parse_args()
    shape = GPU if jax.default_backend() == "gpu" else CPU
    _measure.write(options.json, rows_of(shape))


if __name__ == "__main__":
    main()
