"""Rows quantized along their features, quantized again along the rows, for Hopper in CUDA C++."""

from expertmesh.core.kernels.choice.quantize import Config, choose_panel
from expertmesh.core.kernels.cuda import quantize


def launch(data, scale, index, sizes, *, config: Config, format, dtype, out_type):
    """As `triton/grouped_requantize.py`."""
    _, C, K = data.shape
    panel = 0
    at: tuple = ()
    if index is not None:
        panel, at = choose_panel(C, quantize.COLUMNS, -(-K // quantize.COLUMNS)), (index,)
        C = index.shape[1]
    return quantize.launch(
        data, scale, *at, sizes,
        source=source(dtype, config=config, format=format, panel=panel), name="grouped_requantize",
        config=config, rows=C, columns=K, out_type=out_type,
    )  # fmt: skip


def source(dtype, *, config: Config, format, panel: int = 0) -> quantize.Source:
    """The kernel with `dtype` between the two formats; `panel`: of rows at an index, else 0."""
    options = dict(config=config, format=format, halves=1, row_bytes=8, PANEL=panel)
    return quantize.source("grouped_requantize.cu", dtype=dtype, **options)
