"""A LoRA step of the block on one GPU: against what its frozen base costs alone, and against training all weights.

A step is the forward and the backward for tokens and adapters; the base alone, for tokens only, weights frozen; full
training, for tokens and all parameters. All programs of a case are scans without pauses and run in turns. Memory is
what the compiler gives a program beyond its operands, and what the gradients of full training add to these. The base's
weights are of 16 bits, or as a checkpoint of 8 bits is loaded, or a recipe quantizes them.

Wanted: at most 1.25 times the base.
"""

import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands
from expertmesh.core import quantize
from expertmesh.flax_moe import LoRA, init_lora, moe, with_lora
from expertmesh.flax_moe.models.fp8_blocks import block_format

SHAPES = [
    Shape((32768,), 2048, 768, 128, 8),
    Shape((32768,), 4096, 2048, 64, 4),
    Shape((16384,), 2048, 8192, 8, 2),
]
BASES = {"bfloat16": None, "weights of 8 bits": None, "fp8_block": "fp8_block"}  # and their recipes
KINDS = [("bfloat16", 16), ("bfloat16", 64), ("weights of 8 bits", 16), ("fp8_block", 16)]
WEIGHTS = "wi", "wo"
TURNS, CALLS = 7, 8


def programs(shape: Shape, rank: int, base: str):
    """(operands, name -> function of them)."""
    params, x, dy = operands(shape, None)
    config = shape.config(recipe=BASES[base])
    if base == "weights of 8 bits":
        blocks = dict(axis=1, across=-1, batch_dims=1)
        made = {
            name: quantize(params[name], block_format((128, 128)), **blocks) for name in WEIGHTS
        }
        params = {**params, **made}
    lora = LoRA(rank=rank, alpha=2 * rank, dtype=jnp.bfloat16)
    adapters = init_lora(jax.random.key(1), shape.width, config, lora)

    def gradients(function, dy, *trained):
        y, pull = jax.vjp(function, *trained)
        return y, pull(dy.astype(y.dtype))

    def step(params, adapters, x, dy):
        def block(adapters, x):
            return moe(with_lora(params, adapters, lora), x, config).y

        return gradients(block, dy, adapters, x)

    def frozen(params, adapters, x, dy):
        del adapters
        return gradients(lambda x: moe(with_lora(params, {}, lora), x, config).y, dy, x)

    def full(params, adapters, x, dy):
        del adapters
        return gradients(lambda params, x: moe(params, x, config).y, dy, params, x)

    made = {"step": step, "base": frozen}
    if base != "weights of 8 bits":  # which have no gradient
        made["full"] = full
    return (params, adapters, x, dy), made


def memory(function, arrays) -> int:
    """Bytes of a program's buffers and results."""
    found = jax.jit(function).lower(*arrays).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def rows_of(shape: Shape, rank: int, base: str) -> Iterator[dict]:
    arrays, functions = programs(shape, rank, base)
    times = _measure.in_turns(functions, arrays, TURNS, CALLS)
    used = {name: memory(function, arrays) for name, function in functions.items()}
    median = {name: statistics.median(found) for name, found in times.items()}
    case = f"{base} rank {rank}, {shape}"
    for name, words in (("base", "its frozen base alone"), ("full", "training all weights")):
        if name not in functions:
            continue
        pairs = zip(times[name], times["step"], strict=True)
        ratio = statistics.median(other / own for other, own in pairs)
        yield _measure.time_row(
            "lora", case, median["step"], words, median[name], unit="ms", ratio=ratio
        )
        yield _measure.row(
            bench="lora",
            case=case,
            metric="memory",
            value=used["step"] / 2**20,
            unit="MiB",
            reference=f"{words}, {used[name] / 2**20:.0f} MiB",
            ratio=used[name] / max(used["step"], 1),
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    gpu = jax.default_backend() == "gpu"
    cases = [(shape, rank, base) for shape in SHAPES for base, rank in KINDS]
    cases = cases if gpu else [(SMALL, 8, "bfloat16"), (SMALL, 8, "weights of 8 bits")]
    _measure.write(options.json, (row for case in cases for row in rows_of(*case)))


if __name__ == "__main__":
    main()
