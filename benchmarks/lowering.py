"""How long tracing and lowering a gradient of the MoE block takes, beside the same block in plain JAX in the same run.

On CPU, of few tokens: no time depends on sizes. Each call starts from empty caches of JAX, the blocks by turns. A value
is the median.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import jax

from benchmarks import _measure
from benchmarks.moe_block import SMALL, operands, passes
from expertmesh.flax_moe import moe
from expertmesh.flax_moe.native import native_moe

TURNS = 11
BLOCKS = {"plain JAX": (native_moe, None), "bfloat16": (moe, None), "fp8_block": (moe, "fp8_block")}


def seconds(block: Callable, recipe: str | None, arrays: tuple) -> float:
    """Of one call."""
    gradient = passes(block, SMALL.config(recipe=recipe))["forward and backward"]
    jax.clear_caches()
    gc.collect()  # what was cached, which else is freed in between
    start = time.perf_counter()
    jax.jit(gradient).lower(*arrays)
    return time.perf_counter() - start


def rows() -> Iterator[dict]:
    arrays = operands(SMALL, None)
    # The first turn also imports what is imported when it is needed.
    turns = [
        {name: seconds(*block, arrays) for name, block in BLOCKS.items()} for _ in range(TURNS + 1)
    ]
    medians = {name: statistics.median(turn[name] for turn in turns[1:]) for name in BLOCKS}
    native = medians["plain JAX"]
    for name, value in medians.items():
        yield _measure.row(
            bench="lowering",
            case=f"tracing and lowering a gradient of the block, {name}",
            metric="time",
            value=value,
            unit="s",
            reference=f"plain JAX, {native:.3f} s",
            ratio=native / value,
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    _measure.write(options.json, rows())


if __name__ == "__main__":
    main()
