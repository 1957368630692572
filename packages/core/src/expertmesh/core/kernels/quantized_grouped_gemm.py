"""Grouped GEMMs of 8-bit operands for NVIDIA GPUs of compute capability 9.0, group sizes read on the device; those for
later GPUs are in `quantized_grouped_gemm_sm100.py`.

Hopper's tensor cores take 8-bit operands whose contraction is contiguous: rows [C, D] times weights [G, W, D], with D
the contraction and W the width of the result; for the weight gradient [W, C] of both operands, as `quantize.py` leaves
them. Blocks of 32 are widened to bfloat16, exactly, for the kernels of `grouped_gemm.py`. Every byte of the outputs is
written, but for rows after the last group without `zero_rest`. Dimension key as in `ops/quantized_grouped_gemm.py`.

In Gluon are rows of blocks: one role of one warp loads, two of four warps multiply, one of two warps stores. A product
of 128 of the contraction, the length of a block, has a scale of its own: one role scales it and adds it in float32
while the other multiplies. In CUDA C++ are rows with a scale for each group (`grouped_gemm.cu`), and the weight
gradients: of blocks, whose products have a scale for each number (`quantized_grouped_gemm.cu`), and with a scale for
each group (`quantized_grouped_gemm_whole.cu`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from expertmesh.core.kernels import grouped_gemm as plain
from expertmesh.core.kernels import launcher, quantize
from expertmesh.core.kernels import quantized_grouped_gemm_sm100 as sm100
from expertmesh.core.kernels.cuda_call import WGMMA_TYPES, nvrtc, wgmma
from expertmesh.core.kernels.gluon_call import gluon_call

BLOCK = 128  # elements of the contraction, and columns of a weight, that share a scale
MX_BLOCK = 32


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _groups(sizes, G: gl.constexpr, G_POW2: gl.constexpr, BM: gl.constexpr):
    """Per group: its index, its end, the end of its tiles of rows, and the row of tile 0 were all tiles its own.

    Every warp holds all of them.
    """
    layout: gl.constexpr = gl.BlockedLayout([G_POW2 // 32], [32], [gl.num_warps()], [0])
    index_G = gl.arange(0, G_POW2, layout)
    size_G = gl.load(sizes + index_G, mask=index_G < G, other=0)
    end_G = gl.associative_scan(size_G, 0, _add)
    tiles_G = (size_G + BM - 1) // BM
    last_tile_G = gl.associative_scan(tiles_G, 0, _add)
    return index_G, end_G, last_tile_G, end_G - size_G - (last_tile_G - tiles_G) * BM


@gluon.jit
def _rows_tile(tile, groups, num_m, NUM_N: gl.constexpr, BM: gl.constexpr, BAND: gl.constexpr):
    """The group of a tile, its first row, the end of its group, and the tile's column."""
    index_G, end_G, last_tile_G, origin_G = groups
    # Tiles that run together share rows and columns, so that both stay in L2.
    band = tile // (BAND * NUM_N)
    band_m = gl.minimum(num_m - band * BAND, BAND)
    within = tile % (BAND * NUM_N)
    tile_m = band * BAND + within % band_m
    group = gl.sum((last_tile_G <= tile_m).to(gl.int32), 0)
    mine_G = index_G == group
    end = gl.sum(gl.where(mine_G, end_G, 0), 0)
    origin = gl.sum(gl.where(mine_G, origin_G, 0), 0)
    return group, origin + tile_m * BM, end, within // band_m


@gluon.jit
def _num_tiles(groups, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr):
    """The tiles of rows, and how many tiles this program has."""
    num_m = gl.max(groups[2], 0)
    return num_m, (num_m * NUM_N - gl.program_id(0) + NUM_PROGRAMS - 1) // NUM_PROGRAMS


@gluon.jit
def _load_rows(
    lhs_desc, rhs_desc, sizes, a_smem, b_smem, full, empty,
    G: gl.constexpr, G_POW2: gl.constexpr, STEPS: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role that loads: BK of the contraction of both operands a step, as long as a slot is empty."""
    groups = _groups(sizes, G, G_POW2, BM)
    num_m, count = _num_tiles(groups, NUM_N, NUM_PROGRAMS)
    step = 0
    for i in range(0, count):
        tile = gl.program_id(0) + i * NUM_PROGRAMS
        group, row, _, tile_n = _rows_tile(tile, groups, num_m, NUM_N, BM, BAND)
        for k in range(0, STEPS):
            slot = step % STAGES
            at = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(at, lhs_desc.nbytes_per_cta + rhs_desc.nbytes_per_cta)
            tma.async_load(lhs_desc, [row, k * BK], at, a_smem.index(slot))
            tma.async_load(rhs_desc, [group, tile_n * BN, k * BK], at, b_smem.index(slot))
            step += 1


@gluon.jit
def _part(a, b, part, PART: gl.constexpr):
    """Begins the product of a step's operands for one half of the columns."""
    WIDTH: gl.constexpr = part.shape[1]
    columns = b.slice(PART * WIDTH, WIDTH).permute((1, 0))
    return warpgroup_mma(a, columns, part, use_acc=False, is_async=True)


@gluon.jit
def _now(x):
    """`x`, which is known before anything follows: else two products are kept, and sums go to memory."""
    return gl.inline_asm_elementwise("", "=f,0", [x], gl.float32, False, 1)


@gluon.jit
def _multiply_rows(
    sizes, row_scales, weight_scales, out, a_smem, b_smem, out_smem, full, empty, ready, free,
    HALF: gl.constexpr, C: gl.constexpr, ZEROS_END: gl.constexpr, W: gl.constexpr,
    G: gl.constexpr, G_POW2: gl.constexpr, STEPS: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two roles that multiply: BM / 2 of a tile's rows, half of its columns at a time, as partial sums of
    more would not fit into registers. Then zeros in half of the rows after the last group, up to ZEROS_END."""
    BH: gl.constexpr = BM // 2
    PN: gl.constexpr = BN // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PN, 32])
    groups = _groups(sizes, G, G_POW2, BM)
    num_m, count = _num_tiles(groups, NUM_N, NUM_PROGRAMS)
    part = gl.zeros((BH, PN), gl.float32, mma)
    step = 0
    handed = 0
    for i in range(0, count):
        tile = gl.program_id(0) + i * NUM_PROGRAMS
        group, row, _, tile_n = _rows_tile(tile, groups, num_m, NUM_N, BM, BAND)
        # What lies beyond the last row or column is not stored: any scale will do.
        mine = row + HALF * BH + gl.arange(0, BH, gl.SliceLayout(1, mma))
        rows = gl.minimum(mine, C - 1) * STEPS
        last: gl.constexpr = (W + PN - 1) // PN - 1
        at_left = weight_scales + (group * (last + 1) + 2 * tile_n) * STEPS
        at_right = weight_scales + (group * (last + 1) + gl.minimum(2 * tile_n + 1, last)) * STEPS
        of_rows = gl.load(row_scales + rows)
        left = gl.zeros((BH, PN), gl.float32, mma)
        right = gl.zeros((BH, PN), gl.float32, mma)
        for k in range(0, STEPS):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = a_smem.index(slot).slice(HALF * BH, BH)
            b = b_smem.index(slot).reshape((BN, BK))
            begun = _part(a, b, part, 0)
            of_left = gl.load(at_left + k)
            of_right = gl.load(at_right + k)
            of_next = gl.load(row_scales + (rows + gl.minimum(k + 1, STEPS - 1)))
            part = warpgroup_mma_wait(0, deps=[begun])
            left = gl.fma(part, (of_rows * of_left)[:, None].broadcast_to(BH, PN), left)
            if out_smem.dtype == gl.float32:
                left = _now(left)
            begun = _part(a, b, part, 1)
            part = warpgroup_mma_wait(0, deps=[begun])
            mbarrier.arrive(empty.index(slot))
            right = gl.fma(part, (of_rows * of_right)[:, None].broadcast_to(BH, PN), right)
            of_rows = of_next
            step += 1
        handed = plain._hand_over(handed, left, out_smem, ready, free)
        handed = plain._hand_over(handed, right, out_smem, ready, free)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for start in range(
        gl.max(groups[1], 0) + gl.program_id(0) * 8 + HALF * 4, ZEROS_END, NUM_PROGRAMS * 8
    ):
        lines = start + gl.arange(0, 4, gl.SliceLayout(1, layout))
        for column in range(0, W, 256):
            columns = column + gl.arange(0, 256, gl.SliceLayout(0, layout))
            where = out + lines.to(gl.int64)[:, None] * W + columns[None, :]
            zeros = gl.zeros((4, 256), out.dtype.element_ty, layout)
            gl.store(where, zeros, mask=(lines < ZEROS_END)[:, None] & (columns < W)[None, :])


@gluon.jit
def _store_rows(
    sizes, out, staged, ready, free, W: gl.constexpr,
    G: gl.constexpr, G_POW2: gl.constexpr, NUM_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The role that stores, while the next tile is multiplied."""
    # Were the pieces of a tile unrolled, their addresses would not fit into registers.
    groups = _groups(sizes, G, G_POW2, BM)
    num_m, count = _num_tiles(groups, NUM_N, NUM_PROGRAMS)
    PIECE: gl.constexpr = staged.shape[2]
    TURNS: gl.constexpr = 2 * BN // PIECE
    for turn in range(0, TURNS * count):
        tile = gl.program_id(0) + turn // TURNS * NUM_PROGRAMS
        _, row, end, tile_n = _rows_tile(tile, groups, num_m, NUM_N, BM, BAND)
        column = tile_n * BN + turn % TURNS // 2 * PIECE
        plain._store_piece(turn, staged, ready, free, out, row, end, column, W, 8)


@gluon.jit
def _rows_kernel(
    lhs_desc, row_scales, rhs_desc, weight_scales, sizes, out,
    C: gl.constexpr, ZEROS_END: gl.constexpr, W: gl.constexpr, G: gl.constexpr, G_POW2: gl.constexpr,
    STEPS: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] . rhs[group of r], products of blocks times their scales, row_scales [C, STEPS] and weight_scales
    [G, W / 128, STEPS]; zeros after the last group, up to row ZEROS_END."""
    NUM_N: gl.constexpr = (W + BN - 1) // BN
    a_smem = gl.allocate_shared_memory(lhs_desc.dtype, [STAGES, BM, BK], lhs_desc.layout)
    b_smem = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, 1, BN, BK], rhs_desc.layout)
    staged = plain._staging(out.dtype.element_ty, BM, PIECE)
    full, empty, ready, free = plain._barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply_rows, (sizes, row_scales, weight_scales, out, a_smem, b_smem, staged.index(0), full, empty,
                              ready.index(0), free.index(0), 0, C, ZEROS_END, W, G, G_POW2, STEPS, NUM_N, NUM_PROGRAMS,
                              BM, BN, BK, BAND, STAGES)),
            (_multiply_rows, (sizes, row_scales, weight_scales, out, a_smem, b_smem, staged.index(1), full, empty,
                              ready.index(1), free.index(1), 1, C, ZEROS_END, W, G, G_POW2, STEPS, NUM_N, NUM_PROGRAMS,
                              BM, BN, BK, BAND, STAGES)),
            (_store_rows, (sizes, out, staged, ready, free, W, G, G_POW2, NUM_N, NUM_PROGRAMS,
                           BM, BN, BAND)),
            (_load_rows, (lhs_desc, rhs_desc, sizes, a_smem, b_smem, full, empty, G, G_POW2, STEPS, NUM_N, NUM_PROGRAMS,
                          BM, BN, BK, BAND, STAGES)),
        ],
        [4, 2, 1],  # warps of the roles after the first
        [REGISTERS[0], REGISTERS[1], REGISTERS[1]],  # and their registers
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile, and how its roles run it."""

    m: int
    n: int
    k: int
    stages: int
    band: int
    # Of the second role that multiplies, and of those that load and store.
    registers: tuple[int, int]


# NVIDIA H200, 2026-11-21: docs/dev/performance-log.md says what was measured.
ROWS_BLOCKS = Tiles(m=128, n=256, k=128, stages=4, band=16, registers=(224, 56))
# NVIDIA H200, 2026-11-23: likewise.
WEIGHTS_BLOCKS = plain.WeightTiles(
    stages=3, least=2, slot=50 * 1024, staged=5 * 1024, handed=2, band=4, registers=(24, 240)
)
WEIGHTS_WHOLE = plain.WeightTiles(
    stages=4, least=3, slot=48 * 1024, staged=1024, handed=1, band=4, registers=(40, 232)
)
PIECE = 128  # columns of a result that are staged in shared memory at once


def rows(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *, blocks, **options):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]; options: those of `launch_rows`."""
    if _rows_for_later(blocks, group_sizes):
        operands = lhs, lhs_scale, rhs, rhs_scale, group_sizes
        return sm100.rows(*operands, blocks=blocks, **options)
    if _along(blocks) == MX_BLOCK:
        wide = _wide(lhs, lhs_scale, blocks[0]), _wide(rhs, rhs_scale, blocks[1])
        return plain.rows(*wide, group_sizes, **options)
    # A bitcast where the compiler is free to choose how the weight lies.
    weight, scale = (
        x if x.ndim == 1 else jnp.swapaxes(sm100.flat(x), 1, 2) for x in (rhs, rhs_scale)
    )
    out = _launch_rows(lhs, lhs_scale, weight, scale, group_sizes, options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, dy_scale, rhs, rhs_scale, group_sizes, *, blocks, **options):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]; options: those of `launch_rows`."""
    if _rows_for_later(blocks, group_sizes):
        operands = dy, dy_scale, rhs, rhs_scale, group_sizes
        return sm100.rows_dgrad(*operands, blocks=blocks, **options)
    if _along(blocks) == MX_BLOCK:
        wide = _wide(dy, dy_scale, blocks[0]), _wide(rhs, rhs_scale, blocks[1])
        return plain.rows_dgrad(*wide, group_sizes, **options)
    dy, dy_scale, rhs, rhs_scale = map(sm100.flat, (dy, dy_scale, rhs, rhs_scale))
    return _launch_rows(dy, dy_scale, rhs, rhs_scale, group_sizes, options)[None]


def _rows_for_later(blocks, group_sizes) -> bool:
    """Whether the kernels for later GPUs multiply rows: on those, and what Hopper has no other kernel for."""
    return plain._capability() >= 100 or (not _along(blocks) and not plain.in_cuda(group_sizes))


def _launch_rows(lhs, lhs_scale, rhs, rhs_scale, group_sizes, options):
    """[1, C, D] x [G, W, D] -> [C, W], by the kernel for blocks of 128 or for a scale of each group."""
    lhs, lhs_scale, group_sizes = lhs[0], lhs_scale[0], group_sizes[0]
    if rhs_scale.ndim > 1:
        return launch_rows(lhs, lhs_scale, rhs, rhs_scale, group_sizes, **options)
    scales = lhs_scale, rhs_scale
    return plain.launch_rows_hopper(lhs, rhs, group_sizes, scales, transposed=True, **options)


def weights(lhs, lhs_scale, dy, dy_scale, group_sizes, *, num_experts, blocks, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    of_blocks = _along(blocks) == BLOCK
    tiles = (WEIGHTS_BLOCKS if of_blocks else WEIGHTS_WHOLE).fit(num_experts, out_dtype)
    if plain._capability() < 100 and _along(blocks) == MX_BLOCK:
        wide = _wide(lhs, lhs_scale, blocks[0]), _wide(dy, dy_scale, blocks[1])
        return plain.weights(*wide, group_sizes, num_experts=num_experts, out_dtype=out_dtype)
    if plain._capability() >= 100 or nvrtc() is None or tiles.stages < tiles.least:
        operands = lhs, lhs_scale, dy, dy_scale, group_sizes
        return sm100.weights(*operands, num_experts=num_experts, blocks=blocks, out_dtype=out_dtype)
    launch = launch_weights_blocks if of_blocks else launch_weights
    (_, _, K), N = lhs.shape, dy.shape[2:]
    dy, dy_scale = sm100.flat(dy), sm100.flat(dy_scale)
    of = lhs[0], lhs_scale[0], dy[0], dy_scale[0], group_sizes[0]
    return launch(*of, out_dtype=out_dtype, tiles=tiles).reshape(-1, K, *N)


def _wide(data, scale, block):
    """Exact in bfloat16: an 8-bit number has at most 4 significant bits, and its scale is a power of two."""
    return quantize.dequantize(data, scale, block=block, dtype=jnp.bfloat16)


def _along(blocks) -> int:
    """The length of the operands' blocks along the contraction; 0 where they have none."""
    return max(blocks[0], default=0)


def launch_rows(lhs, row_scales, rhs, weight_scales, group_sizes, *, out_dtype, zero_rest=True):
    """Rows [C, D] with scales [C, D / 128] times weights [G, W, D] with scales [G, W / 128, D / 128]."""
    (C, D), (G, W, _) = lhs.shape, rhs.shape
    tiles = fit(ROWS_BLOCKS, G, out_dtype)
    num_steps = plain._num_steps((tiles.m, tiles.n, tiles.k), C, W, D)
    return gluon_call(
        _descriptor(lhs, (tiles.m, tiles.k)), row_scales,
        _descriptor(rhs, (1, tiles.n, tiles.k)), weight_scales,
        group_sizes,
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, W), out_dtype),
        programs=plain._num_programs(num_steps), capability=90,
        C=C, ZEROS_END=C * zero_rest, W=W, STEPS=triton.cdiv(D, tiles.k), **constants(tiles, G, num_steps),
    )  # fmt: skip


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


def constants(tiles: Tiles, G: int, num_steps: int = 0) -> dict:
    """What the kernel in Gluon is compiled with."""
    return dict(
        G=G, G_POW2=max(32, triton.next_power_of_2(G)),
        NUM_PROGRAMS=plain._num_programs(num_steps),
        BM=tiles.m, BN=tiles.n, BK=tiles.k, BAND=tiles.band, STAGES=tiles.stages, REGISTERS=tiles.registers,
        PIECE=PIECE,
    )  # fmt: skip


def fit(tiles: Tiles, G: int, out_dtype) -> Tiles:
    """What results and groups take of shared memory is not there for loads."""
    staged = tiles.m * PIECE * jnp.dtype(out_dtype).itemsize + 16 * plain._table_width(G)
    stages = (plain.SHARED_BYTES - plain.BARRIER_BYTES - staged) // ((tiles.m + tiles.n) * tiles.k)
    return dataclasses.replace(tiles, stages=min(tiles.stages, stages))


def _turned(x):
    """[C, W] -> [W, C], in whole words of TMA: no work where `x` lies so, as `kernels/quantize.py` leaves it."""
    return jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0))).T


def _descriptor(x, block: tuple[int, ...]):
    """The TMA descriptor of `x` for loads of `block`."""
    dtype = gl.float8e5 if x.dtype == jnp.float8_e5m2 else gl.float8e4nv
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    import jax_triton

    return jax_triton.TensorDescriptor.from_array(x, block, layout)
