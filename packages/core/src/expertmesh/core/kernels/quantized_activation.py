"""The up projection of rows of 8 bits, activated and quantized, for NVIDIA GPUs.

Dimension key as in `linear/quantized_activation.py`.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import quantized_grouped_gemm as gemm
from expertmesh.core.kernels.activate_quantize import activate_quantize, copies_of, copy_types
from expertmesh.core.kernels.choice import quantized_activation as choice
from expertmesh.core.kernels.cuda import block_scaled_activation as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import quantize
from expertmesh.core.quantization.activate_quantize import Activated
from expertmesh.core.quantization.quantize_rows import Moved, tokens_of


@for_device
def quantized_activation(
    lhs, rhs, group_sizes, weights, source, *, activation, format, narrow, device
):  # fmt: skip
    """[1, C, K], or [1, T, K] `Moved` there, x [G, K, 2, F], times [1, C] -> [1, C, 2, F], and data and scales of
    [1, C, F], twice; if it is `narrow`, data and scales of h, and once those of [1, C, F]."""
    rows, dtype, gathers = tokens_of(lhs), jnp.dtype(lhs.dtype), isinstance(lhs, Moved)
    (_, C, K), (G, _, _, F) = lhs.shape, rhs.shape
    projection = choice.Projection(
        rows=C, contraction=K, width=F, groups=G, dtype=dtype,
        blocks=(max(rows.block), format.block[1]), function=activation.function, device=device,
    )  # fmt: skip
    config = choice.choose(projection)
    if config is None:
        h = gemm.rows(lhs, rhs, group_sizes, out_dtype=dtype)
        activated = Activated(h, weights, source, activation)
        made = activate_quantize(activated, group_sizes, None, None, format=format)
        if not narrow:
            return h, *made
        kept = quantize.blocks(
            h, group_sizes[0].astype(jnp.int32), format, (1, 1, 1, format.block[1])
        )
        return *kept, *made[:2]
    weight, weight_scale = (jnp.swapaxes(gemm.flat(x), 1, 2) for x in (rhs.data, rhs.scale))
    shape, index = (1, C, F), lhs.row_map.source_row if gathers else source
    types, of_h = copy_types(shape, format, transposed=True), (1, C, 2, F)
    if narrow:
        types = *result_types(of_h, (*of_h[:-1], F // format.block[1]), format), *types[:2]
    else:
        types = jax.ShapeDtypeStruct(of_h, dtype), *types
    h, *made = cuda.launch(
        rows.data[0], rows.scale[0], weight, weight_scale, weights[0], group_sizes[0],
        index=index[0], gathers=gathers, config=config, activation=activation, format=format, dtype=dtype,
        narrow=narrow, out_type=types,
    )  # fmt: skip
    if narrow:
        h_scale, data, scale = made
        return h, stored_scale(h_scale, format), data, stored_scale(scale, format)
    return h, *copies_of(made, shape, format, transposed=True)
