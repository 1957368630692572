"""Rows quantized along their features, quantized again along the rows, for Hopper in CUDA C++."""

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize


def launch(data, scale, sizes, *, config: Config, format, dtype, out_type):
    """As `triton/grouped_requantize.py`."""
    _, C, K = data.shape
    return quantize.launch(
        data, scale, sizes,
        source=source(dtype, config=config, format=format), name="grouped_requantize",
        config=config, rows=C, columns=K, out_type=out_type,
    )  # fmt: skip


def source(dtype, *, config: Config, format) -> quantize.Source:
    """The kernel with `dtype` between the two formats."""
    return quantize.source(
        "grouped_requantize.cu", dtype, config=config, format=format, halves=1, row_bytes=8
    )
