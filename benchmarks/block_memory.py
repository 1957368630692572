"""What both passes of the block need on one GPU besides operands and results, by recipe; nothing runs.

It is what the compiler's memory says of a program of both: what the forward keeps for the backward is part of it, what
finds room in the buffers of results that are not there yet is not. Under fp8_block weights are quantized before, as by
a trainer with several microbatches.

Dimension key: M rows of tokens, D model width, F expert width. h has 4 M F bytes, and a row's results, before they are
added to those of their tokens, 2 M D: both have 16 bits under every recipe.
"""

from collections.abc import Iterator

import jax

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands, passes
from benchmarks.single_gpu_blocks import BOTH, RECIPES, SHAPES, microbatch, quantized
from expertmesh.flax_moe import moe


def bytes_of(shape: Shape, recipe: str | None) -> int:
    types = jax.eval_shape(lambda: operands(shape, None))
    both = passes(moe, shape.config(recipe=recipe))[BOTH]
    if recipe == "fp8_block":
        both, types = microbatch(shape), (*types, *jax.eval_shape(quantized(shape), *types))
    return jax.jit(both).lower(*types).compile().memory_analysis().temp_size_in_bytes


def rows_of(shape: Shape) -> Iterator[dict]:
    wide = bytes_of(shape, None)
    for recipe in RECIPES:
        size = bytes_of(shape, recipe)
        yield _measure.row(
            bench="block_memory",
            case=f"{recipe} {BOTH}, {shape}, 1 device",
            metric="memory",
            value=size / 1e6,
            unit="MB",
            reference=f"our bfloat16 block, {wide / 1e6:.0f} MB",
            ratio=wide / size,
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = SHAPES if jax.default_backend() == "gpu" else [SMALL]
    _measure.write(options.json, (row for shape in shapes for row in rows_of(shape)))


if __name__ == "__main__":
    main()
