"""A LoRA step of the block on one GPU: against what its frozen base costs alone, and against training all weights.

A step is the forward and the backward for tokens and adapters; the base alone, for tokens only, weights frozen; full
training, for tokens and all parameters. All programs of a case are scans without pauses and run in turns. Memory is
what the compiler gives a program beyond its operands, and what the gradients of full training add to these.

Wanted: at most 1.25 times the base.
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands
from expertmesh.flax_moe import LoRA, init_lora, moe, with_lora

SHAPES = [
    Shape((32768,), 2048, 768, 128, 8),
    Shape((32768,), 4096, 2048, 64, 4),
    Shape((16384,), 2048, 8192, 8, 2),
]
RANKS = 16, 64
RECIPES = None, "fp8_block"
TURNS, CALLS = 7, 8


def programs(shape: Shape, rank: int, recipe: str | None):
    """(operands, name -> function of them)."""
    params, x, dy = operands(shape, None)
    config = shape.config(recipe=recipe)
    lora = LoRA(rank=rank, alpha=2 * rank, dtype=jnp.bfloat16)
    adapters = init_lora(jax.random.key(1), shape.width, config, lora)

    def gradients(function, dy, *trained):
        y, pull = jax.vjp(function, *trained)
        return y, pull(dy.astype(y.dtype))

    def step(params, adapters, x, dy):
        def block(adapters, x):
            return moe(with_lora(params, adapters, lora), x, config).y

        return gradients(block, dy, adapters, x)

    def base(params, adapters, x, dy):
        del adapters
        return gradients(lambda x: moe(with_lora(params, {}, lora), x, config).y, dy, x)

    def full(params, adapters, x, dy):
        del adapters
        return gradients(lambda params, x: moe(params, x, config).y, dy, params, x)

    return (params, adapters, x, dy), {"step": step, "base": base, "full": full}


def memory(function, arrays) -> int:
    """Bytes of a program's buffers and results."""
    found = jax.jit(function).lower(*arrays).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def rows_of(shape: Shape, rank: int, recipe: str | None) -> Iterator[dict]:
    arrays, functions = programs(shape, rank, recipe)
    times = _measure.in_turns(functions, arrays, TURNS, CALLS)
    used = {name: memory(function, arrays) for name, function in functions.items()}
    median = {name: statistics.median(found) for name, found in times.items()}
    case = f"{recipe or 'bfloat16'} rank {rank}, {shape}"
    for name, words in (("base", "its frozen base alone"), ("full", "training all weights")):
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    cases = [(s, rank, recipe) for s in SHAPES for rank in RANKS for recipe in RECIPES]
    cases = cases if gpu else [(SMALL, 8, None)]
    _measure.write(options.json, (row for case in cases for row in rows_of(*case)))


if __name__ == "__main__":
    main()
