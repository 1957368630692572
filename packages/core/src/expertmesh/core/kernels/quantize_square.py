"""Weights in square blocks, or with a scale per matrix, as the forward and the input gradient read them, for NVIDIA
GPUs."""

from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Square, choose_square
from expertmesh.core.kernels.cuda import quantize_square as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.formats import result_types, stored_scale
from expertmesh.core.kernels.triton import quantize as triton


def quantize_square(x, *, format, block, batch_dims, dgrad, amax_axes=(), origin=()):
    """The leaves of what the reference of `quantization/quantize.py` gives."""
    del origin
    if not block:
        return _of_matrices(x, format, batch_dims, amax_axes, dgrad)
    return _in_blocks(x, format, block, dgrad)


@for_device
def _in_blocks(x, format, block, dgrad: bool, *, device):
    """(data, scale) as the forward reads them; then, if `dgrad`, as the input gradient does."""
    (A, M, B, N), (length, _) = triton.view(x.shape, block)
    config = choose_square(Square(A, M, B, N, length, device))
    if not config.transposed:
        return triton.blocks(x, None, format, block) * (1 + dgrad)
    counts = tuple(-(-n // b) for n, b in zip(x.shape, block, strict=True))
    of_scales = (A, B * -(-N // length), -(-M // length))
    out_type = result_types(x.shape, counts, format) if dgrad else ()
    out_type += result_types((A, B * N, M), of_scales, format)
    results = cuda.launch(x, (A, M, B, N), config=config, format=format, out_type=out_type)
    *first, data, scale = (
        stored_scale(part, format) if number % 2 else part for number, part in enumerate(results)
    )
    # Bitcasts, which the one before the GEMM undoes.
    data, scale = jnp.swapaxes(data, 1, 2), jnp.swapaxes(scale, 1, 2)
    return data.reshape(x.shape), scale.reshape(counts), *first


@for_device
def _of_matrices(x, format, batch_dims: int, amax_axes, dgrad: bool, *, device):
    """Likewise, with a scale for each matrix, of its amax."""
    leading, (K, *N) = x.shape[:batch_dims], x.shape[batch_dims:]
    shape = A, _, _, width = prod(leading), K, 1, prod(N)
    config = choose_square(Square(*shape, 0, device))
    amax = triton.amax_of_matrices(x, batch_dims, amax_axes)
    if not config.transposed:
        data, scale = triton.scaled(x, None, (A, K, width), format.dtype, amaxes=amax[..., None])
        return (data, scale.reshape(leading)) * (1 + dgrad)
    types = [(x.shape, format.dtype)] * dgrad + [((A, width, K), format.dtype), ((A,), jnp.float32)]
    out_type = tuple(jax.ShapeDtypeStruct(*each) for each in types)
    options = dict(config=config, format=format, out_type=out_type, amax=amax.reshape(A))
    *first, data, scale = cuda.launch(x, shape, **options)
    scale = scale.reshape(leading)
    # A bitcast, which the one before the GEMM undoes.
    data = jnp.swapaxes(data, 1, 2).reshape(x.shape)
    return data, scale, *((*first, scale) if dgrad else ())
