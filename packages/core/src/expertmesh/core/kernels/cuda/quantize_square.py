"""Weights quantized in square blocks or with a scale per matrix, in both orders, for Hopper in CUDA C++."""

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize
from expertmesh.core.kernels.cuda.cuda_call import cuda_call


def launch(x, shape: tuple[int, int, int, int], *, config: Config, format, out_type, amax=None):
    """Of x [A, M, B, N] = `shape`: data and scale as it lies if `out_type` has them, then those as [A, B, N, M].

    Of a format without blocks: data as it lies if `out_type` has it, then as [A, B, N, M]; the scale [A]. It is made of
    `amax`, int32[A], the bits of float32.
    """
    A, M, B, N = shape
    operands = (x,) if format.block else (x, amax)
    both = len(out_type) == (4 if format.block else 3)
    made = source(x.dtype, config=config, format=format, both=both)
    programs = A * -(-M // quantize.COLUMNS) * B * -(-N // quantize.COLUMNS)
    return cuda_call(
        *operands, source=made.text, name="quantize_square", scalars=(M, B, N), out_type=out_type,
        programs=programs, warps=config.tiles.warps, shared=made.shared,
    )  # fmt: skip


def source(dtype, *, config: Config, format, both: bool) -> quantize.Source:
    """The kernel for weights of `dtype`; `both`: orders, or the forward's alone."""
    return quantize.source(
        "quantize_square.cu", dtype=dtype, config=config, format=format, layout=quantize.Layout(0),
        BOTH=int(both), SINGLE=int(jnp.dtype(dtype).itemsize == 4), WHOLE=int(not format.block),
    )  # fmt: skip
