"""Rows of 16 bits, as they are or at an index, quantized in both directions, for Hopper in CUDA C++."""

from math import prod

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize


def launch(x, index, sizes, *, config: Config, format, out_type):
    """As `launch_both` of `triton/quantize.py`."""
    _, C, *rest = out_type[0].shape
    N = prod(rest)
    made = source(x.dtype, config=config, format=format, panel=quantize.panel_of(x, index, N))
    given = (operand for operand in (x, index, sizes) if operand is not None)
    return quantize.launch(
        *given,
        source=made,
        name="quantize_both",
        config=config,
        rows=C,
        columns=N,
        out_type=out_type,
    )


def source(dtype, *, config: Config, format, panel: int) -> quantize.Source:
    """The kernel for rows of `dtype`; `panel`: of rows at an index, else 0."""
    return quantize.source(
        "quantize_both.cu", dtype=dtype, config=config, format=format, layout=quantize.Layout(16),
        ACTIVATES=0, PANEL=panel,
    )  # fmt: skip
