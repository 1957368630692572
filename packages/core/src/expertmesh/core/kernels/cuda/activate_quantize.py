"""A gated activation, or its gradient, quantized in both directions, for Hopper in CUDA C++."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda import quantize
from expertmesh.core.kernels.cuda.cuda_call import activation_macros


def launch(
    h, h_scale, d_out, weights, sizes, *, config: Config, activation, format, dtype, kept, out_type
):
    """As `triton/activate_quantize.py`, to the bit but for d_weights."""
    (_, C, _, F), gradient, weighted = h.shape, d_out is not None, bool(weights)
    made = dict(
        activation=activation, format=format, gradient=gradient, weighted=weighted, kept=kept
    )
    if gradient and weighted:
        out_type = *out_type, jax.ShapeDtypeStruct((-(-F // quantize.COLUMNS), C), jnp.float32)
    given = (x for x in (h, h_scale, d_out, *weights, sizes) if x is not None)
    return quantize.launch(
        *given,
        source=source(dtype, config=config, **made),
        name="quantize_both", config=config, rows=C, columns=F, out_type=out_type,
    )  # fmt: skip


def source(
    dtype, *, config: Config, activation, format, gradient: bool, weighted: bool, kept=None
) -> quantize.Source:
    """The kernel for h of `dtype`, or of the format `kept` made of it."""
    defined = dict(GRADIENT=int(gradient), WEIGHTED=int(weighted), **activation_macros(activation))
    defined |= dict(ACTIVATES=1, PANEL=0, NARROW=int(kept is not None))
    if kept is not None:
        defined |= dict(
            KEPT="u8" if kept.scale == "float8_e8m0fnu" else "float",
            KEPT_FORMAT=quantize.of_ptx(kept), ROUNDS=int(kept.scale == "float32"),
        )  # fmt: skip
    return quantize.source(
        "activation.cuh", "quantize_both.cu", dtype=dtype, config=config, format=format,
        layout=quantize.Layout(16 * (2 + gradient), halves=1 + gradient), **defined,
    )  # fmt: skip
