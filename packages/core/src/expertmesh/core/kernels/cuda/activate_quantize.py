"""A gated activation, or its gradient, quantized in both directions, for Hopper in CUDA C++."""

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize


def launch(h, d_out, sizes, *, config: Config, activation, format, out_type, zero_rest: bool):
    """As `triton/activate_quantize.py`, to the bit."""
    (_, C, _, F), gradient = h.shape, d_out is not None
    return quantize.launch(
        *((h, d_out) if gradient else (h,)), sizes,
        source=source(h.dtype, config=config, activation=activation, format=format, gradient=gradient),
        name="activate_quantize", config=config, rows=C, columns=F, zero_rest=zero_rest, out_type=out_type,
    )  # fmt: skip


def source(dtype, *, config: Config, activation, format, gradient: bool) -> quantize.Source:
    """The kernel for h of `dtype`."""
    defined = dict(
        GRADIENT=int(gradient), FUNCTION=activation.function, UP_OFFSET=quantize.literal(activation.up_offset)
    )  # fmt: skip
    if activation.limit is not None:
        defined["BOUND"] = quantize.literal(activation.limit)
    return quantize.source(
        "activate_quantize.cu", dtype, config=config, format=format,
        halves=1 + gradient, row_bytes=16 * (2 + gradient), **defined,
    )  # fmt: skip
