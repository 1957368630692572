"""The gradient of a bias per group against a copy of the bytes that it must read."""

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import group_sizes, on_gpu
from expertmesh.core.linear.grouped_gemm import group_bias_grad_op

# rows, width, groups
GPU = {"w13": (32768, 4096, 32), "few groups": (16384, 14336, 8)}
CPU = {"small": (1024, 256, 8)}


def cases_of(name, rows, width, groups, dtype):
    dy = jax.random.normal(jax.random.key(0), (1, rows, width), dtype)
    sizes = jnp.asarray(group_sizes(rows, groups))[None]

    options = {"num_experts": groups, "out_dtype": jnp.dtype(jnp.float32)}
    options["implementation"] = "triton" if on_gpu() else "reference"

    def function(dy, sizes):
        return group_bias_grad_op(dy, sizes, None, **options)

    case = f"{jnp.dtype(dtype).name} {name} {rows}x{width}, {groups} groups"
    yield _measure.copy_case("group_bias", case, function, (dy, sizes), dy.nbytes)


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes, dtype = (GPU, jnp.bfloat16) if on_gpu() else (CPU, jnp.float32)
    cases = (c for name, shape in shapes.items() for c in cases_of(name, *shape, dtype))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
