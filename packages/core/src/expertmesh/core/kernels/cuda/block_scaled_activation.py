"""The up projection of block-scaled rows, activated and quantized in one kernel, for Hopper in CUDA C++."""

import jax.numpy as jnp

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config
from expertmesh.core.kernels.choice.quantized_grouped_gemm import BLOCK, BlockTiles
from expertmesh.core.kernels.cuda.cuda_call import activation_macros, cuda_call, source_text
from expertmesh.core.kernels.cuda.quantize import scale_macros
from expertmesh.core.kernels.cuda.quantized_grouped_gemm import rows_macros, rows_product


def launch(
    lhs, row_scales, rhs, weight_scales, weights, group_sizes, *,
    index, gathers: bool, config: Config, activation, format, dtype, narrow: bool, out_type,
):  # fmt: skip
    """Rows [C, K] times weights [G, 2 F, K] with scales [G, 2 F / 128, K / 128], and float32[C].

    Args:
      index: int32[C], each row's token, -1 where there is none.
      gathers: `lhs` and its scales are of tokens [T, K], and rows are those at the index.
      dtype: of h before it is activated.
      narrow: h is quantized.

    Returns:
      Results of `out_type`: h [C, 2, F], if it is narrow as data and scales along its features; data and scales of the
      activation along its features; and, unless h is narrow, along the rows, that data being [F, C].
    """
    (T, K), (C,), (G, W, _) = lhs.shape, index.shape, rhs.shape
    F, box = W // 2, launcher.TensorMap.of
    made = dict(tiles=config.tiles, activation=activation, format=format)
    made |= dict(gathers=gathers, narrow=narrow)
    return cuda_call(
        lhs if gathers else box(lhs, (128, BLOCK)), index, row_scales, box(rhs, (1, BLOCK, BLOCK)), weight_scales,
        weights, group_sizes.astype(jnp.int32),
        source=source(lhs.dtype, rhs.dtype, dtype, **made), name="block_scaled_activation",
        scalars=(*((T, K) if gathers else ()), C, -(-K // BLOCK), F, G), out_type=out_type,
        programs=config.programs, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def source(
    lhs_dtype,
    rhs_dtype,
    dtype,
    *,
    tiles: BlockTiles,
    activation,
    format,
    gathers: bool,
    narrow: bool,
) -> str:
    """The kernel in CUDA C++ for rows and weights of these types, and h of `dtype`, quantized if it is `narrow`."""
    defined = rows_macros(dtype, tiles, gathers=gathers) | dict(NARROW=int(narrow))
    defined |= activation_macros(activation) | scale_macros(dtype, format)
    files = "hopper.cuh", "split_rows.cuh", "activation.cuh", "scales.cuh"
    instructions = rows_product(lhs_dtype, rhs_dtype)
    file = "block_scaled_activation.cu"
    return source_text(*files, file, defined=defined, INSTRUCTIONS=instructions)
