"""Quantization of rows in groups, each recipe and direction, against a copy of the bytes that it must read and write.

A scale per group is made of the group's amax, so that the rows are read twice: these bytes count. Rows of tokens are
read where the tokens are: their bytes count once, though each token is several rows.
"""

import itertools

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import group_sizes, on_gpu
from expertmesh.core import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, quantize
from expertmesh.core.ops.permute import plan_permute
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize_rows import (
    Moved,
    grouped_quantize,
    grouped_quantize_both,
)

# rows, width, groups
GPU = {"dsv3 hidden": (32768, 7168, 32)}
CPU = {"small": (1024, 256, 8)}
# tokens, width, experts, rows of a token
GPU_TOKENS = {"narrow": (40960, 768, 128, 8), "wide": (32768, 4096, 256, 16)}
CPU_TOKENS = {"few": (256, 256, 8, 2)}
RECIPES = {
    "fp8_current": Float8CurrentScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


def ways(format):
    """way -> function, how often the rows are read, and how often their data are written."""

    def along(axis):
        return lambda x, sizes: _arrays(grouped_quantize(x, sizes, format, axis=axis))

    def both(x, sizes):
        return arrays_of_both(grouped_quantize_both(x, sizes, (format, format)))

    if format.block is None:
        return {"per group": (along(-1), 2, 1), "per group, both": (both, 2, 2)}
    return {"along K": (along(-1), 1, 1), "along rows": (along(1), 1, 1), "both": (both, 1, 2)}


def _arrays(q):
    return q.data, q.scale


def arrays_along_rows(q):
    """Data and scale; but for blocks of 32 as the weight gradient reads them, with the rows contiguous."""
    return (q.data if 32 in q.block else jnp.swapaxes(q.data, 1, 2)), q.scale


def arrays_of_both(copies):
    return *_arrays(copies.along_features), *arrays_along_rows(copies.along_rows)


def cases_of(name, rows, width, groups, dtype):
    x = jax.random.normal(jax.random.key(0), (1, rows, width), dtype)
    sizes = jnp.asarray(group_sizes(rows, groups))[None]
    for recipe, value in RECIPES.items():
        for way, (function, reads, writes) in ways(value.formats().x).items():
            case = f"{jnp.dtype(dtype).name} {recipe} {way} {name} {rows}x{width}, {groups} groups"
            moved = reads * x.nbytes + writes * x.size
            yield _measure.copy_case("grouped_quantize", case, function, (x, sizes), moved)


def cases_of_tokens(name, tokens, width, experts, top_k):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (1, tokens, width), jnp.bfloat16)
    scores = jax.random.normal(keys[1], (tokens, experts))
    chosen = jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)[None]
    plan = jax.jit(lambda chosen: plan_permute(chosen, num_experts=experts, alignment=128))(chosen)
    places, rows = (plan.row, plan.source, plan.group_sizes), plan.source.size
    for recipe, value in RECIPES.items():
        format = value.formats().x

        def both(x, row, source, sizes, format=format):
            moved = Moved(x, RowMap(row, source))
            return arrays_of_both(grouped_quantize_both(moved, sizes, (format, format)))

        def move(q, row, source, sizes, format=format):
            moved = Moved(q, RowMap(row, source))
            return arrays_along_rows(grouped_requantize(moved, sizes, format))

        case = f"bfloat16 {recipe} {name} tokens {tokens}x{width}, {experts} groups, top {top_k}"
        size, reads = rows * width, 1 if format.block else 2
        run = f"rows of {case}", both, (x, *places), reads * x.nbytes + 2 * size
        yield _measure.copy_case("grouped_quantize", *run)
        if format.block is not None:
            q = quantize(x, format)
            run = f"rows, along the rows, of quantized {case}", move, (q, *places), x.size + size
            yield _measure.copy_case("grouped_quantize", *run)


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes, dtype = (GPU, jnp.bfloat16) if on_gpu() else (CPU, jnp.float32)
    tokens = GPU_TOKENS if on_gpu() else CPU_TOKENS
    cases = itertools.chain(
        (c for name, shape in shapes.items() for c in cases_of(name, *shape, dtype)),
        (c for name, shape in tokens.items() for c in cases_of_tokens(name, *shape)),
    )
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
