"""Grouped GEMMs of 8-bit operands for NVIDIA GPUs of compute capability 9.0, group sizes read on the device; those for
later GPUs are in `quantized_grouped_gemm_sm100.py`.

Hopper's tensor cores take 8-bit operands whose contraction is contiguous: rows [C, D] times weights [G, W, D], with D
the contraction and W the width of the result; for the weight gradient [W, C] of both operands, as `quantize.py` leaves
them. Blocks of 32 are widened to bfloat16, exactly, for the kernels of `grouped_gemm.py`. Every byte of the outputs is
written, but for rows after the last group without `zero_rest`. Dimension key as in `linear/grouped_gemm.py`.

All are in CUDA C++: rows of blocks, whose products of 128 of the contraction have a scale for each row
(`block_scaled_gemm.cu`); rows with a scale for each group (`grouped_gemm.cu`); and the weight gradients: of blocks,
whose products have a scale for each number (`quantized_grouped_gemm.cu`), and with a scale for each group
(`quantized_grouped_gemm_whole.cu`). Where NVRTC is missing, the kernels for later GPUs take their place.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton

from expertmesh.core.kernels import grouped_gemm as plain
from expertmesh.core.kernels import launcher, quantize
from expertmesh.core.kernels import quantized_grouped_gemm_sm100 as sm100
from expertmesh.core.kernels.cuda_call import WGMMA_TYPES, cuda_call, nvrtc, source_text, wgmma

BLOCK = 128  # elements of the contraction, and columns of a weight, that share a scale
MX_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class BlockTiles:
    """How the kernel in CUDA C++ for rows of blocks runs.

    Attributes:
      stages: steps of 128 of the contraction under way at most.
      band: tiles of 128 rows that run together.
      registers: of the role that loads and stores, and of those that multiply.
      rooms: parts of 64 x 128 of a result of 16 bits that a role has staged at most; of 32 bits, one.
    """

    stages: int
    band: int
    registers: tuple[int, int]
    rooms: int

    def rooms_of(self, out_dtype) -> int:
        """The parts of a result of this type that a role has staged at most."""
        return self.rooms if jnp.dtype(out_dtype).itemsize == 2 else 1

    def fit(self, G: int, out_dtype) -> "BlockTiles":
        """What results, barriers and the table of groups take of shared memory is not there for steps."""
        staged = 128 * 128 * jnp.dtype(out_dtype).itemsize * self.rooms_of(out_dtype)
        stages = (plain.SHARED_BYTES - staged - 320 - 8 * (G + 1)) // (48 * 1024)
        return dataclasses.replace(self, stages=min(self.stages, stages))


ROWS_BLOCKS = BlockTiles(stages=3, band=16, registers=(40, 232), rooms=2)
# NVIDIA H200, 2026-11-23: likewise.
WEIGHTS_BLOCKS = plain.WeightTiles(
    stages=3, least=2, slot=50 * 1024, staged=5 * 1024, handed=2, band=4, registers=(24, 240)
)
WEIGHTS_WHOLE = plain.WeightTiles(
    stages=4, least=3, slot=48 * 1024, staged=1024, handed=1, band=4, registers=(40, 232)
)


def rows(lhs, rhs, group_sizes, **options):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]; options: those of `launch_rows`."""
    if _rows_for_later(lhs, group_sizes):
        return sm100.rows(lhs, rhs, group_sizes, **options)
    if _along(lhs) == MX_BLOCK:
        return plain.rows(_wide(lhs), _wide(rhs), group_sizes, **options)
    # A bitcast where the compiler is free to choose how the weight lies.
    weight, scale = (
        x if x.ndim == 1 else jnp.swapaxes(sm100.flat(x), 1, 2) for x in (rhs.data, rhs.scale)
    )
    out = _launch_rows(lhs.data, lhs.scale, weight, scale, group_sizes, options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, **options):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]; options: those of `launch_rows`."""
    if _rows_for_later(dy, group_sizes):
        return sm100.rows_dgrad(dy, rhs, group_sizes, **options)
    if _along(dy) == MX_BLOCK:
        return plain.rows_dgrad(_wide(dy), _wide(rhs), group_sizes, **options)
    of_rows = sm100.flat(dy.data), sm100.flat(dy.scale)
    of_weight = sm100.flat(rhs.data), sm100.flat(rhs.scale)
    return _launch_rows(*of_rows, *of_weight, group_sizes, options)[None]


def _rows_for_later(lhs, group_sizes) -> bool:
    """Whether the kernels for later GPUs multiply rows: on those, and where those in CUDA C++ cannot."""
    return plain._capability() >= 100 or (
        _along(lhs) != MX_BLOCK and not plain.in_cuda(group_sizes)
    )


def _launch_rows(lhs, lhs_scale, rhs, rhs_scale, group_sizes, options):
    """[1, C, D] x [G, W, D] -> [C, W], by the kernel for blocks of 128 or for a scale of each group."""
    lhs, lhs_scale, group_sizes = lhs[0], lhs_scale[0], group_sizes[0]
    if rhs_scale.ndim > 1:
        return launch_rows(lhs, lhs_scale, rhs, rhs_scale, group_sizes, **options)
    scales = lhs_scale, rhs_scale
    return plain.launch_rows_hopper(lhs, rhs, group_sizes, scales, transposed=True, **options)


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    of_blocks = _along(lhs) == BLOCK
    tiles = (WEIGHTS_BLOCKS if of_blocks else WEIGHTS_WHOLE).fit(num_experts, out_dtype)
    options = dict(num_experts=num_experts, out_dtype=out_dtype)
    if plain._capability() < 100 and _along(lhs) == MX_BLOCK:
        return plain.weights(_wide(lhs), _wide(dy), group_sizes, **options)
    if plain._capability() >= 100 or nvrtc() is None or tiles.stages < tiles.least:
        return sm100.weights(lhs, dy, group_sizes, **options)
    launch = launch_weights_blocks if of_blocks else launch_weights
    (_, _, K), N = lhs.shape, dy.shape[2:]
    parts = lhs.data, lhs.scale, sm100.flat(dy.data), sm100.flat(dy.scale), group_sizes
    return launch(*(x[0] for x in parts), out_dtype=out_dtype, tiles=tiles).reshape(-1, K, *N)


def _wide(q):
    """Exact in bfloat16: an 8-bit number has at most 4 significant bits, and its scale is a power of two."""
    return quantize.dequantize(q.data, q.scale, block=q.block, dtype=jnp.bfloat16)


def _along(q) -> int:
    """The length of an operand's blocks along the contraction; 0 where it has none."""
    return max(q.block, default=0)


def launch_rows(
    lhs, row_scales, rhs, weight_scales, group_sizes, *, out_dtype, zero_rest=True, tiles: BlockTiles = ROWS_BLOCKS
):  # fmt: skip
    """Rows [C, D] with scales [C, D / 128] times weights [G, W, D] with scales [G, W / 128, D / 128]."""
    (C, D), (G, W, _) = lhs.shape, rhs.shape
    tiles, steps = tiles.fit(G, out_dtype), triton.cdiv(D, BLOCK)
    num_steps = plain._num_steps((128, 256, BLOCK), C, W, D)
    box = launcher.TensorMap.of
    return cuda_call(
        box(lhs, (128, BLOCK)), row_scales, box(rhs, (1, 256, BLOCK)), weight_scales,
        group_sizes.astype(jnp.int32),
        source=rows_source(lhs.dtype, rhs.dtype, out_dtype, tiles), name="block_scaled_gemm",
        scalars=(C, C * zero_rest, steps, W, G),
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        programs=plain._num_programs(num_steps), warps=12, shared=plain.SHARED_BYTES,
    )  # fmt: skip


def rows_source(lhs_dtype, rhs_dtype, out_dtype, tiles: BlockTiles) -> str:
    """The kernel in CUDA C++ for rows of blocks of these types."""
    out_dtype = jnp.dtype(out_dtype)
    less, more = tiles.registers
    defined: dict[str, object] = dict(
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16), STAGES=tiles.stages,
        BAND=tiles.band, ROOMS=tiles.rooms_of(out_dtype), SHARED=plain.SHARED_BYTES,
        REGISTERS_LESS=less, REGISTERS_MORE=more,
    )  # fmt: skip
    kinds = ".".join(WGMMA_TYPES[jnp.dtype(dtype).name] for dtype in (lhs_dtype, rhs_dtype))
    multiply = wgmma(
        "__device__ __forceinline__ void multiply", f"m64n128k32.f32.{kinds}", 64, "1, 1"
    )
    return source_text("hopper.cuh", "block_scaled_gemm.cu", defined=defined, INSTRUCTION=multiply)


def launch_weights(
    lhs, lhs_scales, dy, dy_scales, group_sizes, *, out_dtype, tiles: plain.WeightTiles
):
    """[C, K] with scales [G] and [C, N] likewise -> [G, K, N]."""
    source = weights_source(lhs.dtype, dy.dtype, out_dtype, tiles, blocks=False)
    box = launcher.TensorMap.of
    operands = box(_turned(lhs), (128, 128)), lhs_scales, box(_turned(dy), (128, 128)), dy_scales
    widths = lhs.shape[1], dy.shape[1]
    return _launch_weights(*operands, group_sizes, source, lhs.shape[0], widths, out_dtype)


def launch_weights_blocks(
    lhs, lhs_scales, dy, dy_scales, group_sizes, *, out_dtype, tiles: plain.WeightTiles
):
    """[C, K] with scales [C / 128, K] and [C, N] likewise -> [G, K, N]."""
    source = weights_source(lhs.dtype, dy.dtype, out_dtype, tiles, blocks=True)
    box = launcher.TensorMap.of
    scales = box(lhs_scales, (1, 128)), box(dy_scales, (1, 256))
    operands = box(_turned(lhs), (128, 128)), scales[0], box(_turned(dy), (128, 128)), scales[1]
    widths = lhs.shape[1], dy.shape[1]
    return _launch_weights(*operands, group_sizes, source, lhs.shape[0], widths, out_dtype)


def _launch_weights(
    lhs, lhs_scales, dy, dy_scales, group_sizes, source, num_rows, widths, out_dtype
):
    """[G, *widths] of descriptors of the turned operands, and scales as the kernel takes them."""
    return plain.call_weights(
        lhs, lhs_scales, dy, dy_scales, group_sizes,
        source=source, name="quantized_grouped_gemm_weights", step=BLOCK, contraction=num_rows, widths=widths,
        out_dtype=out_dtype,
    )  # fmt: skip


def weights_source(
    lhs_dtype, dy_dtype, out_dtype, tiles: plain.WeightTiles, *, blocks: bool
) -> str:
    """A kernel in CUDA C++ for operands of these types, with scales of blocks or of groups."""
    kinds = ".".join(WGMMA_TYPES[jnp.dtype(dtype).name] for dtype in (lhs_dtype, dy_dtype))
    width = 128 if blocks else 256
    multiply = wgmma(
        "__device__ __forceinline__ void multiply",
        f"m64n{width}k32.f32.{kinds}",
        width // 2,
        "1, 1",
    )
    file = "quantized_grouped_gemm.cu" if blocks else "quantized_grouped_gemm_whole.cu"
    return tiles.source(file, out_dtype, INSTRUCTION=multiply)


def _turned(x):
    """[C, W] -> [W, C], in whole words of TMA: no work where `x` lies so, as `kernels/quantize.py` leaves it."""
    return jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))).T
