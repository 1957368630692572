"""A gated activation, or its gradient, quantized in both directions at once, against a copy of the bytes that it must
read and write, and the gradient against its two steps."""

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import group_sizes, on_gpu
from benchmarks.grouped_quantize import arrays_of_both
from expertmesh.core import Activation, Float8BlockScaling, MXFP8BlockScaling
from expertmesh.core.ops.activation import gated_grad_op
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.quantization.quantize_rows import grouped_quantize_both

# rows, expert width, groups
GPU, CPU = (32768, 4096, 32), (1024, 256, 8)
RECIPES = {"fp8_block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling()}


def cases():
    num_rows, width, groups = GPU if on_gpu() else CPU
    keys = jax.random.split(jax.random.key(0), 2)
    h = jax.random.normal(keys[0], (1, num_rows, 2, width), jnp.bfloat16)
    d = jax.random.normal(keys[1], (1, num_rows, width), jnp.bfloat16)
    sizes = jnp.asarray(group_sizes(num_rows, groups))[None]
    for name, recipe in RECIPES.items():
        formats = recipe.formats().x, recipe.formats().x_wgrad
        for function in ("silu", "gelu"):

            def run(h, sizes, formats=formats, function=function):
                return arrays_of_both(activate_quantize(h, sizes, formats, function))

            case = f"bfloat16 {function} {name} {num_rows}x2x{width}, {groups} groups"
            moved = h.nbytes + h.size  # 4 bytes read and 2 written for each number of the result
            yield _measure.copy_case("activate_quantize", case, run, (h, sizes), moved)

            def gradient(h, d, sizes, formats=formats, function=function):
                return arrays_of_both(activate_grad_quantize(h, d, sizes, formats, function))

            def two_steps(h, d, sizes, formats=formats, function=function):
                d_h = gated_grad_op(h, d, activation=Activation(function=function))
                return arrays_of_both(grouped_quantize_both(d_h, sizes, formats))

            case = f"bfloat16 {function}'s gradient {name} {num_rows}x2x{width}, {groups} groups"
            operands = h, d, sizes
            moved = h.nbytes + d.nbytes + 2 * h.size
            yield _measure.copy_case("activate_quantize", case, gradient, operands, moved)
            seconds = moved / 2.5e12, moved / 2e12
            pair = (gradient, operands), (two_steps, operands)
            yield _measure.time_case("activate_quantize", case, *pair, "two steps", seconds)


def main():
    options = _measure.parser(__doc__).parse_args()
    _measure.write(options.json, _measure.measured(cases()))


if __name__ == "__main__":
    main()
