"""Grouped GEMMs of 8-bit operands for Hopper in CUDA C++.

Hopper's tensor cores take 8-bit operands whose contraction is contiguous: rows [C, D] times weights [G, W, D], with D
the contraction and W the width of the result; for the weight gradient [W, C] of both operands, as `triton/quantize.py`
leaves them. Dimension key as in `linear/grouped_gemm.py`.

Products of 128 of the contraction are added in float32. Those of rows have a scale for each row and block, or one for
each group (`split_gemm.cu`); those of weight gradients have one for each number and block
(`block_scaled_weight_gradient.cu`), or for each group (`tensor_scaled_weight_gradient.cu`). Rows of per-tensor FP8
whose sums the tensor cores add are in `cuda/grouped_gemm.py`.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config, WeightTiles
from expertmesh.core.kernels.choice.quantized_grouped_gemm import BLOCK, BlockTiles
from expertmesh.core.kernels.cuda import weight_gradients
from expertmesh.core.kernels.cuda.cuda_call import WGMMA_TYPES, cuda_call, source_text, wgmma
from expertmesh.core.kernels.cuda.grouped_gemm import (
    low_rank_instructions,
    low_rank_maps,
)
from expertmesh.core.kernels.low_rank import LowRank


def launch_rows(
    lhs, row_scales, rhs, weight_scales, group_sizes, *,
    config: Config, out_dtype, clear_padding: bool, low_rank: LowRank | None = None, index=None,
):  # fmt: skip
    """Rows [C, D] with scales [C, D / 128] times weights [G, W, D] with scales [G, W / 128, D / 128]; or of both [G].

    `low_rank`, of a transposed weight, is added. With an index, int32[C], rows are those of `lhs` there, zeros where
    there is none; then no term is added.
    """
    (T, D), (G, W, _) = lhs.shape, rhs.shape
    box, gathers = launcher.TensorMap.of, index is not None
    term = (low_rank.rank, low_rank.u.dtype.name) if low_rank else ()
    C, rows = (index.shape[0], (lhs, index)) if gathers else (T, (box(lhs, (128, BLOCK)),))
    options = dict(gathers=gathers, blocks=row_scales.ndim > 1)
    source = rows_source(lhs.dtype, rhs.dtype, out_dtype, config.tiles, *term, **options)
    return cuda_call(
        *rows, row_scales, box(rhs, (1, 256, BLOCK)), weight_scales,
        group_sizes.astype(jnp.int32), *low_rank_maps(low_rank, 128, 256),
        source=source, name="split_gemm",
        scalars=(*((T, D) if gathers else ()), C, C * clear_padding, -(-D // BLOCK), W, G),
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        programs=config.programs, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def rows_source(
    lhs_dtype, rhs_dtype, out_dtype, tiles: BlockTiles, rank: int = 0, term: str = "", *, gathers: bool = False,
    blocks: bool = True,
) -> str:  # fmt: skip
    """The kernel in CUDA C++ for rows of these types; `term`: the dtype of a term of this low rank.

    `gathers`: rows are found by an index; `blocks`: blocks have scales, else groups.
    """
    instructions = rows_product(lhs_dtype, rhs_dtype)
    if rank:
        instructions += low_rank_instructions(f"{_MULTIPLY}_low_rank", term, [128])
    files = "hopper.cuh", "split_rows.cuh", "split_gemm.cu"
    defined = rows_macros(out_dtype, tiles, gathers=gathers, rank=rank, blocks=blocks)
    return source_text(*files, defined=defined, INSTRUCTIONS=instructions)


_MULTIPLY = "__device__ __forceinline__ void multiply"


def rows_product(lhs_dtype, rhs_dtype) -> str:
    """What `split_rows.cuh` multiplies by."""
    return wgmma(_MULTIPLY, _instruction(lhs_dtype, rhs_dtype), 64, "1, 1")


def rows_macros(
    out_dtype, tiles: BlockTiles, *, gathers: bool, rank: int = 0, blocks: bool = True
) -> dict[str, object]:
    """What `split_rows.cuh` asks for."""
    out_dtype = jnp.dtype(out_dtype)
    less, more = tiles.registers
    return dict(
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16),
        BLOCKS=int(blocks), LOW_RANK=rank, GATHERS=int(gathers), STAGES=tiles.stages, BAND=tiles.band,
        ROOMS=tiles.rooms_of(out_dtype), SCRATCH=tiles.scratch, SHARED=SHARED_BYTES,
        REGISTERS_PRODUCER=less, REGISTERS_CONSUMER=more,
    )  # fmt: skip


def launch_weights(
    lhs, lhs_scales, dy, dy_scales, group_sizes, *, config: Config, along: int, out_dtype
):
    """[C, K] and [C, N], with scales of blocks of `along` rows, or of groups if it is 0 -> [G, K, N]."""
    box, types = launcher.TensorMap.of, (lhs.dtype, dy.dtype, out_dtype)
    if along:
        lhs_scales, dy_scales = box(lhs_scales, (1, 128)), box(dy_scales, (1, 256))
        source, name = block_weights_source(*types, config.tiles), "block_scaled_gemm_weights"
    else:
        source, name = weights_source(*types, config.tiles), _WEIGHTS
    return weight_gradients.launch(
        box(_transposed(lhs), (128, 128)), lhs_scales, box(_transposed(dy), (128, 128)), dy_scales, group_sizes,
        source=source, name=name, config=config, widths=(lhs.shape[1], dy.shape[1]), out_dtype=out_dtype,
    )  # fmt: skip


_WEIGHTS = "tensor_scaled_gemm_weights"


def launch_gathered_weights(
    tokens, index, token_scales, other, other_scales, group_sizes, *,
    config: Config, crosswise: bool, out_dtype,
):  # fmt: skip
    """Tokens [T, K] at the index, int32[C], and [C, N], with scales [G] of both -> [G, K, N], `crosswise` [G, N, K]."""
    types = tokens.dtype, other.dtype, out_dtype
    return weight_gradients.launch(
        tokens, index, token_scales, launcher.TensorMap.of(_transposed(other), (128, 128)), other_scales, group_sizes,
        source=weights_source(*types, config.tiles, gathers=True, crosswise=crosswise), name=_WEIGHTS,
        config=config, widths=(tokens.shape[1], other.shape[1]), out_dtype=out_dtype, crosswise=crosswise,
    )  # fmt: skip


def block_weights_source(lhs_dtype, dy_dtype, out_dtype, tiles: WeightTiles) -> str:
    """The kernel in CUDA C++ for weight gradients of these types, with scales of blocks."""
    multiply = wgmma(_MULTIPLY, _instruction(lhs_dtype, dy_dtype), 64, "1, 1")
    file = "block_scaled_weight_gradient.cu"
    return weight_gradients.source(file, out_dtype, tiles, INSTRUCTION=multiply)


def weights_source(
    lhs_dtype, other_dtype, out_dtype, tiles: WeightTiles, *, gathers: bool = False, crosswise: bool = False
) -> str:  # fmt: skip
    """With scales of groups; `gathers` and `crosswise`: as `launch_gathered_weights`."""
    of_lhs = dict(GATHERS=int(gathers), INTERLEAVED=int(gathers), CROSSWISE=int(crosswise))
    instruction = _instruction(lhs_dtype, other_dtype, 64)
    multiply = wgmma(_MULTIPLY, instruction, 32, "1, 1", in_registers=True)
    file = "tensor_scaled_weight_gradient.cu"
    return weight_gradients.source(file, out_dtype, tiles, of_lhs, INSTRUCTION=multiply)


def _instruction(lhs_dtype, rhs_dtype, width: int = 128) -> str:
    kinds = ".".join(WGMMA_TYPES[jnp.dtype(dtype).name] for dtype in (lhs_dtype, rhs_dtype))
    return f"m64n{width}k32.f32.{kinds}"


def _transposed(x):
    """[C, W] -> [W, C], in whole words of TMA: no work where `x` lies so, as `triton/quantize.py` leaves it."""
    return jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))).T
