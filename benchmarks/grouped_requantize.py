"""Rows in blocks of 8 bits along their features, quantized again along the rows, against a copy of the bytes that it
must read and write, and against its two steps."""

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import group_sizes, on_gpu
from benchmarks.grouped_quantize import arrays_along_rows
from expertmesh.core import Float8BlockScaling, MXFP8BlockScaling, dequantize, quantize
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize_rows import grouped_quantize

# rows, width, groups
GPU, CPU = (32768, 7168, 32), (1024, 256, 8)
RECIPES = {"fp8_block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling()}


def cases():
    rows, width, groups = GPU if on_gpu() else CPU
    x = jax.random.normal(jax.random.key(0), (1, rows, width), jnp.bfloat16)
    sizes = jnp.asarray(group_sizes(rows, groups))[None]
    for name, recipe in RECIPES.items():
        format = recipe.formats().x

        def at_once(q, sizes, format=format):
            return arrays_along_rows(grouped_requantize(q, sizes, format))

        def two_steps(q, sizes, format=format):
            return arrays_along_rows(grouped_quantize(dequantize(q), sizes, format, axis=1))

        operands = jax.jit(quantize, static_argnums=1)(x, format), sizes
        case, moved = f"bfloat16 {name} {rows}x{width}, {groups} groups", 2 * x.size
        yield _measure.copy_case("grouped_requantize", case, at_once, operands, moved)
        pair, seconds = ((at_once, operands), (two_steps, operands)), (moved / 2e12, moved / 5e11)
        yield _measure.time_case("grouped_requantize", case, *pair, "two steps", seconds)


def main():
    options = _measure.parser(__doc__).parse_args()
    _measure.write(options.json, _measure.measured(cases()))


if __name__ == "__main__":
    main()
