"""What the block keeps for its backward on one GPU, and what its passes need besides, by recipe; nothing runs.

Saved is what the forward makes and the backward reads; operands are not, nor weights that are quantized before, as by a
trainer with several microbatches. Temporaries are the larger ones of the two passes, each compiled by itself: a model
saves for each layer, and has the temporaries of one.

Dimension key: M rows of tokens, D model width, F expert width. In 16 bits h has 4 M F bytes, and the rows' results,
before they are added to those of their tokens, 2 M D, under every recipe. Therefore a block by itself gains little
where experts are narrow, and a model of many layers what is saved.
"""

import concurrent.futures
from collections.abc import Iterator

import jax

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands
from benchmarks.single_gpu_blocks import RECIPES, SHAPES, quantized
from expertmesh.flax_moe import moe

# Name -> the recipe, and what is kept for the backward.
KINDS = {recipe: (recipe, "save_all") for recipe in RECIPES}
KINDS["fp8_block with save_8_bits"] = "fp8_block", "save_8_bits"
LAYERS = 16  # of a model


def memory_of(shape: Shape, recipe: str | None, remat: str = "save_all") -> tuple[int, int]:
    """(Bytes that are saved, temporaries)."""
    config = shape.config(recipe=recipe, remat=remat)
    params, x, dy = jax.eval_shape(lambda: operands(shape, None))
    weights = None
    if recipe == "fp8_block":
        (weights,) = jax.eval_shape(quantized(shape, recipe), params)

    def forward(params, x, weights):
        def block(params, x):
            return moe(params, x, config, weights_quantized=weights).y

        return jax.vjp(block, params, x)

    given = {_type(leaf) for leaf in jax.tree.leaves((params, x, weights))}

    def saved(params, x, weights):
        y, pull = forward(params, x, weights)
        return y, [leaf for leaf in jax.tree.leaves(pull) if _type(leaf) not in given]

    pull = jax.eval_shape(forward, params, x, weights)[1]
    kept = jax.eval_shape(saved, params, x, weights)[1]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
    programs = (saved, (params, x, weights)), (lambda pull, dy: pull(dy), (pull, dy))
    return size, max(_temporaries(*program) for program in programs)


def _type(leaf) -> tuple:
    return leaf.shape, leaf.dtype


def _temporaries(function, types) -> int:
    compiled = jax.jit(function).lower(*types).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def sums(saved: int, temporaries: int) -> dict[str, int]:
    """What -> bytes."""
    return {
        "saved": saved,
        "saved and temporaries": saved + temporaries,
        f"saved and temporaries of {LAYERS} layers": LAYERS * saved + temporaries,
    }


def rows_of(shape: Shape) -> Iterator[dict]:
    wide = sums(*memory_of(shape, None))
    for name, kind in KINDS.items():
        for what, size in sums(*memory_of(shape, *kind)).items():
            of_wide = wide[what]
            yield _measure.row(
                bench="block_memory",
                case=f"{name} {what}, {shape}, 1 device",
                metric="memory",
                value=size / 1e6,
                unit="MB",
                reference=f"our bfloat16 block, {of_wide / 1e6:.0f} MB",
                ratio=of_wide / size,
            )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = SHAPES if jax.default_backend() == "gpu" else [SMALL]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda shape: list(rows_of(shape)), shapes))
    _measure.write(options.json, (row for rows in found for row in rows))


if __name__ == "__main__":
    main()
