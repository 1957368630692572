"""What both passes of the block need on one GPU besides operands and results, by recipe; nothing runs.

Saved is what the forward keeps for the backward besides its operands; temporary is what the compiler's memory says of a
program of both. The latter includes the former, and leaves out what finds room in the buffers of results that are not
there yet, so both are shown. Under fp8_block weights are quantized before, as by a trainer with several microbatches.

Dimension key: M rows of tokens, D model width, F expert width. h has 4 M F bytes, and a row's results, before they are
added to those of their tokens, 2 M D: both have 16 bits under every recipe.
"""

from collections.abc import Iterator

import jax

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands, passes, saved_bytes
from benchmarks.single_gpu_blocks import BOTH, RECIPES, SHAPES, microbatch, quantized
from expertmesh.flax_moe import moe


def compiled(shape: Shape, recipe: str | None):
    """A program of both passes."""
    function, types = passes(moe, shape.config(recipe=recipe))[BOTH], _types(shape)
    if recipe == "fp8_block":
        function = microbatch(shape)
        types = *types, *jax.eval_shape(quantized(shape), *types)
    return jax.jit(function).lower(*types).compile()


def _types(shape: Shape) -> tuple:
    return jax.eval_shape(lambda: operands(shape, None))


def rows_of(shape: Shape) -> Iterator[dict]:
    theirs = None
    for recipe in (None, *RECIPES):
        saved = saved_bytes(moe, shape.config(recipe=recipe), _types(shape))
        temporary = compiled(shape, recipe).memory_analysis().temp_size_in_bytes
        parts = f"{saved / 1e6:.0f} MB saved, {temporary / 1e6:.0f} MB temporary"
        theirs = theirs or (saved + temporary, parts)
        yield _measure.row(
            bench="block_memory",
            case=f"{recipe or 'bfloat16'} {BOTH}, {shape}, 1 device: {parts}",
            metric="memory",
            value=(saved + temporary) / 1e9,
            unit="GB",
            reference=f"our bfloat16 block, {theirs[1]}",
            ratio=theirs[0] / (saved + temporary),
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = SHAPES if jax.default_backend() == "gpu" else [SMALL]
    _measure.write(options.json, (row for shape in shapes for row in rows_of(shape)))


if __name__ == "__main__":
    main()
