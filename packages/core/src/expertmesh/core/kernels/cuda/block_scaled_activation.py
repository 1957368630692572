"""The up projection of block-scaled rows, activated and quantized in one kernel, for Hopper in CUDA C++."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config
from expertmesh.core.kernels.choice.quantized_grouped_gemm import BLOCK, BlockTiles
from expertmesh.core.kernels.cuda.cuda_call import activation_macros, cuda_call, source_text
from expertmesh.core.kernels.cuda.quantize import scale_macros
from expertmesh.core.kernels.cuda.quantized_grouped_gemm import rows_macros, rows_product


def launch(
    tokens, index, token_scales, rhs, weight_scales, weights, group_sizes, *,
    config: Config, activation, format, dtype, out_type,
):  # fmt: skip
    """Rows of tokens [T, K] at int32[C], with scales [T, K / 128], times weights [G, 2 F, K] with scales
    [G, 2 F / 128, K / 128], and float32[C].

    Returns h [C, 2, F] of `dtype`, and four results of `out_type`: data and scales along the features, and along the
    rows, that data being [F, C].
    """
    (T, K), (C,), (G, W, _) = tokens.shape, index.shape, rhs.shape
    F = W // 2
    made = dict(tiles=config.tiles, activation=activation, format=format)
    h = jax.ShapeDtypeStruct((C, 2, F), dtype)
    return cuda_call(
        tokens, index, token_scales, launcher.TensorMap.of(rhs, (1, BLOCK, BLOCK)), weight_scales, weights,
        group_sizes.astype(jnp.int32),
        source=source(tokens.dtype, rhs.dtype, dtype, **made), name="block_scaled_activation",
        scalars=(T, K, C, -(-K // BLOCK), F, G), out_type=(h, *out_type),
        programs=config.programs, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def source(lhs_dtype, rhs_dtype, dtype, *, tiles: BlockTiles, activation, format) -> str:
    """The kernel in CUDA C++ for rows and weights of these types, and h of `dtype`."""
    defined = rows_macros(dtype, tiles, gathers=True)
    defined |= activation_macros(activation) | scale_macros(dtype, format)
    files = "hopper.cuh", "block_scaled_rows.cuh", "activation.cuh", "scales.cuh"
    instructions = rows_product(lhs_dtype, rhs_dtype)
    file = "block_scaled_activation.cu"
    return source_text(*files, file, defined=defined, INSTRUCTIONS=instructions)
