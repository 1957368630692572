"""Rows of 16 bits, as they are or at an index, quantized in both directions, for Hopper in CUDA C++."""

from math import prod

from expertmesh.core.kernels.choice.quantize import Config, choose_panel
from expertmesh.core.kernels.cuda import quantize


def launch(x, index, sizes, *, config: Config, format, out_type):
    """As `triton/quantize.py`."""
    (_, tokens, *_), (_, C, *rest) = x.shape, out_type[0].shape
    N, panel = prod(rest), 0
    if index is not None:
        across = -(-N // quantize.COLUMNS)
        panel = choose_panel(tokens, quantize.COLUMNS * x.dtype.itemsize, across)
    given = (operand for operand in (x, index, sizes) if operand is not None)
    return quantize.launch(
        *given, source=source(x.dtype, config=config, format=format, panel=panel), name="quantize_both",
        config=config, rows=C, columns=N, out_type=out_type,
    )  # fmt: skip


def source(dtype, *, config: Config, format, panel: int) -> quantize.Source:
    """The kernel for rows of `dtype`; `panel`: of rows at an index, else 0."""
    return quantize.source(
        "quantize_both.cu", dtype=dtype, config=config, format=format, layout=quantize.Layout(16),
        ACTIVATES=0, PANEL=panel,
    )  # fmt: skip
