"""Weights quantized in square blocks, in both orders, for Hopper in CUDA C++."""

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize
from expertmesh.core.kernels.cuda.cuda_call import cuda_call


def launch(x, shape: tuple[int, int, int, int], *, config: Config, format, out_type):
    """Of x [A, M, B, N] = `shape`: data and scale as it lies if `out_type` has them, then those as [A, B, N, M]."""
    (A, M, B, N), block = shape, format.block[1]
    made = source(x.dtype, config=config, format=format, both=len(out_type) == 4)
    return cuda_call(
        x, source=made.text, name="quantize_square", scalars=(M, B, N), out_type=out_type,
        programs=A * -(-M // block) * B * -(-N // block), warps=config.tiles.warps, shared=made.shared,
    )  # fmt: skip


def source(dtype, *, config: Config, format, both: bool) -> quantize.Source:
    """The kernel for weights of `dtype`; `both`: orders, or the forward's alone."""
    return quantize.source(
        "quantize_square.cu", dtype=dtype, config=config, format=format, layout=quantize.Layout(0),
        BOTH=int(both), SINGLE=int(jnp.dtype(dtype).itemsize == 4),
    )  # fmt: skip
