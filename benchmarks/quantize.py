"""Quantization of experts' weights by each recipe, against a copy of the bytes that it must read and write.

A scale per expert is made of its amax, so that the weights are read twice: these bytes count. "For both GEMMs"
makes what the forward and the input gradient read: two copies, where one cannot serve both.
"""

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import on_gpu
from benchmarks.grouped_quantize import RECIPES
from expertmesh.core import quantize, quantize_weight

# experts, contraction, width
GPU = {"dsv3 w2": (32, 2048, 7168)}
CPU = {"small": (4, 256, 512)}


def cases_of(name, shape, dtype):
    w = jax.random.normal(jax.random.key(0), shape, dtype)
    for recipe, value in RECIPES.items():
        format = value.formats().weight

        def function(w, format=format):
            q = quantize(w, format, axis=1, across=2, batch_dims=1)
            return q.data, q.scale

        case = f"{jnp.dtype(dtype).name} {recipe} {name} {'x'.join(map(str, shape))}"
        moved = (2 if format.block is None else 1) * w.nbytes + w.size
        yield _measure.copy_case("quantize", case, function, (w,), moved)

        def copies(w, value=value):
            made = quantize_weight(w, value, batch_dims=1)
            return [(q.data, q.scale) for q in (made.forward, made.dgrad) if q is not None]

        moved += w.size * (len(jax.eval_shape(copies, w)) - 1)
        yield _measure.copy_case("quantize", f"{case}, for both GEMMs", copies, (w,), moved)


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes, dtypes = (GPU, (jnp.bfloat16, jnp.float32)) if on_gpu() else (CPU, (jnp.float32,))
    cases = (
        case
        for name, shape in shapes.items()
        for dtype in dtypes
        for case in cases_of(name, shape, dtype)
    )
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
