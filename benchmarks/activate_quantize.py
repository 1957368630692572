"""A gated activation quantized in both directions at once, against a copy of the bytes that it must read and write."""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import group_sizes, on_gpu
from benchmarks.grouped_quantize import arrays_of_both
from expertmesh.core import Float8BlockScaling, MXFP8BlockScaling
from expertmesh.core.ops.activate_quantize import activate_quantize

# rows, expert width, groups
GPU, CPU = (32768, 4096, 32), (1024, 256, 8)
RECIPES = {"fp8_block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling()}


def cases():
    num_rows, width, groups = GPU if on_gpu() else CPU
    h = jax.random.normal(jax.random.key(0), (1, num_rows, 2, width), jnp.bfloat16)
    sizes = jnp.asarray(group_sizes(num_rows, groups))[None]
    for name, recipe in RECIPES.items():
        formats = recipe.formats().x, recipe.formats().x_wgrad
        for function in ("silu", "gelu"):

            def run(h, sizes, formats=formats, function=function):
                pair = activate_quantize(h, sizes, formats, function)
                return arrays_of_both(*pair)

            case = f"bfloat16 {function} {name} {num_rows}x2x{width}, {groups} groups"
            moved = h.nbytes + h.size  # 4 bytes read and 2 written for each number of the result
            yield _measure.copy_case("activate_quantize", case, run, (h, sizes), moved)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    _measure.write(options.json, _measure.measured(cases()))


if __name__ == "__main__":
    main()
