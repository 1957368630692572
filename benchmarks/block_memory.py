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


def block_with(params, x, config, weights):
    """With weights that are quantized."""
    return moe(params, x, config, weights_quantized=weights)


def bytes_of(shape: Shape, recipe: str | None) -> tuple[int, int]:
    """(saved, temporary)."""
    config = shape.config(recipe=recipe)
    arrays, given = jax.eval_shape(lambda: operands(shape, None)), ()
    block, both = moe, passes(moe, config)[BOTH]
    if recipe == "fp8_block":
        given = jax.eval_shape(quantized(shape), *arrays)
        block, both = block_with, microbatch(shape)
    program = jax.jit(both).lower(*arrays, *given).compile()
    saved = saved_bytes(block, config, arrays, *given)
    return saved, program.memory_analysis().temp_size_in_bytes


def rows_of(shape: Shape) -> Iterator[dict]:
    found = {recipe: bytes_of(shape, recipe) for recipe in (None, *RECIPES)}
    words = {
        r: "{:.0f} MB saved, {:.0f} MB temporary".format(*(n / 1e6 for n in found[r]))
        for r in found
    }
    for recipe, parts in found.items():
        yield _measure.row(
            bench="block_memory",
            case=f"{recipe or 'bfloat16'} {BOTH}, {shape}, 1 device: {words[recipe]}",
            metric="memory",
            value=sum(parts) / 1e9,
            unit="GB",
            reference=f"our bfloat16 block, {words[None]}",
            ratio=sum(found[None]) / sum(parts),
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = SHAPES if jax.default_backend() == "gpu" else [SMALL]
    _measure.write(options.json, (row for shape in shapes for row in rows_of(shape)))


if __name__ == "__main__":
    main()
