"""Gated activations, forward and backward, against a copy of the bytes that they must read and write."""

import jax
import jax.numpy as jnp

from benchmarks import _measure
from expertmesh.core import activate

# rows, width
GPU = {"wide": (65536, 4096), "narrow": (65536, 512)}
CPU = {"small": (1024, 256)}
ACTIVATIONS = ("silu", "gelu")


def gradient(activation):
    return lambda h, d_out: jax.vjp(lambda h: activate(h, activation), h)[1](d_out)[0]


def cases_of(name, rows, width, dtype):
    keys = jax.random.split(jax.random.key(0))
    h = jax.random.normal(keys[0], (rows, 2, width), dtype)
    d_out = jax.random.normal(keys[1], (rows, width), dtype)
    for activation in ACTIVATIONS:
        case = f"{jnp.dtype(dtype).name} {activation} {name} {rows}x2x{width}"
        forward = (lambda h, activation=activation: activate(h, activation), (h,))
        backward = (gradient(activation), (h, d_out))
        moved = h.nbytes + d_out.nbytes
        yield _measure.copy_case("activation", f"forward {case}", *forward, moved)
        yield _measure.copy_case("activation", f"backward {case}", *backward, moved + h.nbytes)


def main():
    options = _measure.parser(__doc__).parse_args()
    on_gpu = jax.default_backend() == "gpu"
    shapes, dtype = (GPU, jnp.bfloat16) if on_gpu else (CPU, jnp.float32)
    cases = (c for name, shape in shapes.items() for c in cases_of(name, *shape, dtype))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
