"""Rows quantized in blocks along the rows, for Hopper in CUDA C++: of 16 bits, or quantized along their features."""

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize


def launch(data, scale, index, sizes, *, config: Config, format, dtype, out_type):
    """(data, scale) of rows [1, C, K], or of those at the index, int32[1, C].

    Args:
      scale: of 8 bits, float32[1, C, K / block] or bytes; None of 16.
      dtype: between the two formats.
      out_type: of the results.
    """
    (_, tokens, K), panel = data.shape, quantize.panel_of(data, index, data.shape[2])
    C = tokens if index is None else index.shape[1]
    given = (x for x in (data, scale, index, sizes) if x is not None)
    made = source(dtype, config=config, format=format, narrow=scale is not None, panel=panel)
    return quantize.launch(
        *given, source=made, name="grouped_requantize",
        config=config, rows=C, columns=K, out_type=out_type,
    )  # fmt: skip


def source(
    dtype, *, config: Config, format, narrow: bool = True, panel: int = 0
) -> quantize.Source:
    """The kernel with `dtype` between the two formats; `panel`: of rows at an index, else 0.

    `narrow`: rows have 8 bits, else `dtype`.
    """
    binary = narrow and jnp.dtype(dtype) == jnp.bfloat16 and format.scale != "float32"
    binary = binary and jnp.dtype(format.dtype) == jnp.float8_e4m3fn
    # Of what a thread reads, 16 bytes lie beside each other.
    row_bytes, apart = (16, 8) if narrow else (32, 64)
    return quantize.source(
        "grouped_requantize.cu", dtype=dtype, config=config, format=format,
        layout=quantize.Layout(row_bytes, eights=2, apart=apart, defers=True),
        NARROW=int(narrow), PANEL=panel, BINARY=int(binary),
    )  # fmt: skip
