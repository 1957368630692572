"""Grouped GEMM for NVIDIA GPUs from compute capability 9.0: persistent, group sizes read on the device, TMA loads.

Forward and input gradient are one kernel: C rows in G groups times each group's weight. The weight gradient contracts
over the rows of a group. Hopper has kernels of its own for both, in CUDA C++ (`grouped_gemm.cu`,
`grouped_gemm_weights.cu`). Every byte of the outputs is written, but for rows after the last group without `zero_rest`.
Dimension key as in `linear/grouped_gemm.py`.

The TMA descriptors are parameters of the launch: a descriptor that the device makes needs scratch memory, and a launch
that allocates it cannot be part of a captured loop.
"""

import dataclasses
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.cluster_order import cluster_order
from expertmesh.core.kernels.cuda_call import WGMMA_TYPES, cuda_call, nvrtc, source_text, wgmma


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile, and how it is run."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8


@triton.jit
def _group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM: tl.constexpr):
    """The group of the tile_m-th tile of rows, its first row, and the end of its group."""
    group = tl.sum((last_tile_G <= tile_m).to(tl.int32))
    mine_G = index_G == group
    end = tl.sum(tl.where(mine_G, end_G, 0))
    size = tl.sum(tl.where(mine_G, size_G, 0))
    first_tile = tl.sum(tl.where(mine_G, last_tile_G - tiles_G, 0))
    return group, end - size + (tile_m - first_tile) * BM, end


@triton.jit
def _tiles_of_groups(group_sizes, G: tl.constexpr, G_POW2: tl.constexpr, BM: tl.constexpr):
    """Of each group its index, its rows, where they end, its tiles of up to BM rows, and where those end."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    tiles_G = (size_G + BM - 1) // BM
    return index_G, size_G, end_G, tiles_G, tl.cumsum(tiles_G, 0)


@triton.jit
def _banded_tile(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: those that run together share rows and columns, so that both stay in L2."""
    band = tile // (GROUP_M * num_n)
    band_m = min(num_m - band * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * num_n)
    return band * GROUP_M + within % band_m, within // band_m


@triton.jit
def _store_zero_rows(
    out, first, END: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):
    """Zeros in the rows of `out` from `first` on, up to END."""
    zeros = tl.zeros((16, BN), out.dtype.element_ty)
    for start in tl.range(first + tl.program_id(0) * 16, END, NUM_PROGRAMS * 16):
        rows = start + tl.arange(0, 16)
        for column in tl.range(0, N, BN):
            columns = column + tl.arange(0, BN)
            where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(where, zeros, mask=(rows < END)[:, None] & (columns < N)[None, :])


@triton.jit
def _weight_tile(
    rhs_desc, group, k, tile_n, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The k-th BK of the contraction by the tile_n-th BN of the width of a group's weight, [G, W, D] if TRANSPOSED."""
    if TRANSPOSED:
        return rhs_desc.load([group, tile_n * BN, k * BK]).reshape(BN, BK).T
    else:
        return rhs_desc.load([group, k * BK, tile_n * BN]).reshape(BK, BN)


@triton.jit
def _rows_kernel(
    lhs_desc, rhs_desc, group_sizes, out,
    ZEROS_END: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r] (rhs [G, K, N], or [G, N, K] if TRANSPOSED); zeros after the last group, up to
    row ZEROS_END."""
    index_G, size_G, end_G, tiles_G, last_tile_G = _tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_live = tl.sum(size_G)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (N + BN - 1) // BN

    # Flattened with the loop over K: the next tile's loads run while this tile is stored.
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = _banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = _group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (K + BK - 1) // BK):
            a = lhs_desc.load([row, k * BK])
            b = _weight_tile(rhs_desc, group, k, tile_n, TRANSPOSED, BN, BK)
            acc = tl.dot(a, b, acc)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        live = (rows < end)[:, None] & (columns < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live, eviction_policy="evict_first")

    _store_zero_rows(out, num_live, ZEROS_END, N, BN, NUM_PROGRAMS)


@triton.jit
def _weights_kernel(
    lhs_desc, dy_desc, group_sizes, lhs, dy, out,
    C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g; tiles of BM x BN, BK rows at a time."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    num_m: tl.constexpr = (K + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), G * num_m * num_n, NUM_PROGRAMS):
        group = tile // (num_m * num_n)
        within = tile % (num_m * num_n)
        tile_m = within % num_m
        tile_n = within // num_m
        end = tl.sum(tl.where(index_G == group, end_G, 0))
        size = tl.sum(tl.where(index_G == group, size_G, 0))
        first = end - size
        columns_m = tile_m * BM + tl.arange(0, BM)
        columns_n = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, size // BK):
            a = lhs_desc.load([first + step * BK, tile_m * BM])
            b = dy_desc.load([first + step * BK, tile_n * BN])
            acc = tl.dot(a.T, b, acc)
        if size % BK != 0:  # rows of the next group are not loaded: they may hold NaN
            rows = first + size // BK * BK + tl.arange(0, BK)
            live = (rows < end)[:, None]
            wide = rows.to(tl.int64)[:, None]
            a = tl.load(
                lhs + wide * K + columns_m[None, :], mask=live & (columns_m < K)[None, :], other=0
            )
            b = tl.load(
                dy + wide * N + columns_n[None, :], mask=live & (columns_n < N)[None, :], other=0
            )
            acc = tl.dot(a.T, b, acc)
        where = out + (group.to(tl.int64) * K + columns_m)[:, None] * N + columns_n[None, :]
        inside = (columns_m < K)[:, None] & (columns_n < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the kernel in CUDA C++ runs.

    Attributes:
      boxes: of 64 columns, that a role multiplies by at most 256 / boxes rows.
      rows: at least and at most so many in a tile of a large group, in steps of `grain`.
      cost: of a tile's step, beside that of its rows, in rows.
      band: tiles of rows that run together.
      box: rows of one TMA load.
      registers: of the role that loads, and of those that multiply.
    """

    boxes: int
    rows: tuple[int, int]
    grain: int
    cost: int
    band: int
    box: int
    registers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """How a kernel of weight gradients in CUDA C++ runs.

    Attributes:
      stages: steps of the contraction under way at most.
      least: and at least.
      slot: bytes of shared memory of each.
      staged: where results begin in shared memory.
      handed: parts of 64 x 128 of a result of 16 bits that a role stages at once; of 32 bits, one.
      band: tiles, of 256 columns of lhs, that run together.
      registers: of the role that loads, and of those that multiply.
      passing: results leave L2 first, which operands then keep.
      strips: of 64 lines of 128 bytes of a result that a role has under way, if each of its warps sends its own lines
        (of 16 bits alone), in place of parts.
      keeping: operands that two blocks share leave L2 last.
    """

    stages: int
    least: int
    slot: int
    staged: int
    handed: int
    band: int
    registers: tuple[int, int]
    passing: bool = False
    strips: int = 0
    keeping: bool = True

    def handed_of(self, out_dtype) -> int:
        """The parts of a result of this type that a role stages at once."""
        return self.handed if jnp.dtype(out_dtype).itemsize == 2 else 1

    def slots(self, out_dtype) -> int:
        """Where the first step is in shared memory."""
        part = 64 * 128 * jnp.dtype(out_dtype).itemsize
        return self.staged + 2 * (self.strips * STRIP or self.handed_of(out_dtype) * part)

    @property
    def box(self) -> int:
        """The lines of a result that leave at once."""
        return 16 if self.strips else 32

    def fit(self, G: int, out_dtype) -> "WeightTiles":
        """What results and the table of groups take of shared memory is not there for steps."""
        stages = (SHARED_BYTES - 1024 - self.slots(out_dtype) - 16 * G) // self.slot
        return dataclasses.replace(self, stages=min(self.stages, stages))

    def source(self, file: str, out_dtype, **lines: str) -> str:
        """The kernel in `file`, in CUDA C++, for results of this type; `lines` as in `source_text`."""
        out_dtype = jnp.dtype(out_dtype)
        defined: dict[str, object] = dict(
            WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16), STAGES=self.stages,
            SLOT=self.slot, SLOTS=self.slots(out_dtype), STAGED=self.staged,
            HANDED=self.handed_of(out_dtype), OWN=self.strips, BAND=self.band,
            PASSING=int(self.passing), KEEPING=int(self.keeping), SHARED=SHARED_BYTES,
            REGISTERS_LESS=self.registers[0], REGISTERS_MORE=self.registers[1],
        )  # fmt: skip
        return source_text("hopper.cuh", "weight_gradients.cuh", file, defined=defined, **lines)


SHARED_BYTES = 227 * 1024  # of one program
STRIP = 64 * 128  # bytes that a role stages, of a result
# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
ROWS_HOPPER = RowTiles(
    boxes=1, rows=(128, 256), grain=8, cost=120, band=8, box=32, registers=(40, 232)
)
SMALL_GROUPS_HOPPER = dataclasses.replace(ROWS_HOPPER, boxes=2, rows=(128, 128), grain=32)
# NVIDIA H200, 2026-11-21 and 22: docs/dev/performance-log.md says what was measured.
ROWS = Tiles(m=128, n=256, k=64, warps=8, stages=3, group_m=8)
WEIGHTS = Tiles(m=128, n=256, k=64, warps=8, stages=3)
WEIGHTS_HOPPER = WeightTiles(
    stages=4, least=3, slot=48 * 1024, staged=1024, handed=1, band=4, registers=(40, 232),
    passing=True,
)  # fmt: skip
# Float32 results wait in no registers: each warp sends its own.
WEIGHTS_HOPPER_WIDE = dataclasses.replace(WEIGHTS_HOPPER, strips=4, registers=(56, 224))
# Where groups are small, what matters is how results get to memory: a tile's beside each other, and all of a row's.
WEIGHTS_HOPPER_SMALL = dataclasses.replace(
    WEIGHTS_HOPPER, strips=4, band=1, passing=False, keeping=False, registers=(56, 224)
)
SMALL_GROUP = 192  # rows in the mean, at most
STEP = 64  # rows
MOST_GROUPS = 1024  # whose places fit into shared memory
# NVIDIA H200, 2026-11-22: docs/dev/performance-log.md says what was measured.
MOST_PARTS = 2  # of a tile of the last round
MOST_TURNS = 4  # programs of a multiprocessor
LEAST_STEPS = 120  # of each, of 128 x 256 x 64, where there are several
# From these contractions on the end of a tile costs little, and Triton's tiles, which are all alike, keep step and
# share more in L2: from the first if there are less than so many tiles for each cluster, from the second anyway.
LONG_CONTRACTION, LONGEST_CONTRACTION, FEW_TILES = 8192, 20480, 4


def rows(lhs, rhs, group_sizes, *, out_dtype, zero_rest=True):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]."""
    K, N = lhs.shape[2], prod(rhs.shape[2:])
    launch = _rows_launch(lhs.shape[1], K, N, group_sizes)
    options = dict(out_dtype=out_dtype, transposed=False, zero_rest=zero_rest)
    out = launch(lhs[0], rhs.reshape(-1, K, N), group_sizes[0], **options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *, out_dtype, zero_rest=True):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]."""
    C, N = dy.shape[1], prod(dy.shape[2:])
    flat = rhs.reshape(rhs.shape[0], rhs.shape[1], N)
    launch = _rows_launch(C, N, flat.shape[1], group_sizes)
    options = dict(out_dtype=out_dtype, transposed=True, zero_rest=zero_rest)
    return launch(dy.reshape(C, N), flat, group_sizes[0], **options)[None]


def in_cuda(group_sizes) -> bool:
    """Whether rows of so many groups can take the kernel in CUDA C++, whose instructions are Hopper's alone."""
    return group_sizes.shape[1] <= MOST_GROUPS and _capability() == 90 and nvrtc() is not None


def _rows_launch(rows: int, contraction: int, width: int, group_sizes):
    """The kernel in CUDA C++ where it is the faster one."""
    tiles = rows * width / ROWS_HOPPER.rows[1] ** 2 / (_num_programs() // 2)  # for each cluster
    suited = contraction < (LONG_CONTRACTION if tiles < FEW_TILES else LONGEST_CONTRACTION)
    return launch_rows_hopper if suited and in_cuda(group_sizes) else launch_rows


def weights(lhs, dy, group_sizes, *, num_experts, out_dtype):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    del num_experts
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    tiles = weight_tiles(C, group_sizes.shape[1], out_dtype)
    # wgmma is Hopper's alone, and its windows need as many rows as a step.
    hopper = _capability() == 90 and nvrtc() is not None and C >= STEP
    launch = launch_weights
    if hopper and tiles.stages >= tiles.least:
        launch = partial(launch_weights_hopper, tiles=tiles)
    out = launch(lhs[0], dy.reshape(C, N), group_sizes[0], out_dtype=out_dtype)
    return out.reshape(-1, K, *dy.shape[2:])


def weight_tiles(num_rows: int, num_groups: int, out_dtype) -> WeightTiles:
    """How Hopper's kernel of weight gradients runs for these sizes."""
    if jnp.dtype(out_dtype).itemsize == 4:
        tiles = WEIGHTS_HOPPER_WIDE
    elif num_rows <= SMALL_GROUP * num_groups:
        tiles = WEIGHTS_HOPPER_SMALL
    else:
        tiles = WEIGHTS_HOPPER
    return tiles.fit(num_groups, out_dtype)


def launch_rows(
    lhs, rhs, group_sizes, *, out_dtype, transposed, zero_rest=True, tiles: Tiles = ROWS
):
    (C, K), G = lhs.shape, group_sizes.shape[0]
    N = rhs.shape[1] if transposed else rhs.shape[2]
    tiles = _fit(tiles, N, out_dtype)
    programs = _num_programs(_num_steps((tiles.m, tiles.n, tiles.k), C, N, K))
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return launcher.triton_call(
        _descriptor(lhs, (tiles.m, tiles.k)), _descriptor(rhs, rhs_block), group_sizes,
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        grid=(programs,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        ZEROS_END=C * zero_rest, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        NUM_PROGRAMS=programs, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


def launch_rows_hopper(
    lhs, rhs, group_sizes, scales=(), *, out_dtype, transposed, zero_rest=True,
    tiles: RowTiles | None = None,
):  # fmt: skip
    """`scales`: of lhs and of rhs, [G] each, if they have 8 bits; then rhs is transposed."""
    (C, K), G = lhs.shape, group_sizes.shape[0]
    if tiles is None:
        tiles = SMALL_GROUPS_HOPPER if C <= G * SMALL_GROUPS_HOPPER.rows[1] else ROWS_HOPPER
    N = rhs.shape[1] if transposed else rhs.shape[2]
    line = 128 // lhs.dtype.itemsize
    programs = _num_programs(_num_steps((128, 256, line), C, N, K)) // 2 * 2
    # Several programs of a multiprocessor fill each other's last rounds, and lie where there is room.
    alone = programs <= _num_programs()
    parts = MOST_PARTS if alone else 1
    places = cluster_order(programs, SHARED_BYTES) if alone else ()
    return cuda_call(
        _descriptor(lhs, (tiles.box, line)), _descriptor(rhs, (1, 64, line)),
        group_sizes.astype(jnp.int32), *scales,
        source=rows_source((lhs.dtype, rhs.dtype), out_dtype, transposed, tiles, places), name="grouped_gemm_rows",
        scalars=(C * zero_rest, triton.cdiv(K, line), N, G, parts),
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        programs=programs, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def rows_source(
    dtypes, out_dtype, transposed: bool, tiles: RowTiles = ROWS_HOPPER, places: tuple[int, ...] = ()
) -> str:
    """The kernel in CUDA C++ for lhs and rhs of `dtypes`; `places`: of its clusters, else as they are launched."""
    (lhs, rhs), out_dtype = map(jnp.dtype, dtypes), jnp.dtype(out_dtype)
    scaled = lhs.itemsize == 1
    # Low tiles, of which there are few, take the instructions of the next multiple of 16 rows.
    least, most = tiles.rows
    heights = {
        rows: max(rows, -(-min(rows, least) // 16) * 16)
        for rows in range(tiles.grain, most + 1, tiles.grain)
    }
    defined: dict[str, object] = dict(
        SCALED=int(scaled), TRANSPOSED=int(transposed),
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16),
        BOXES=tiles.boxes, MIN_ROWS=tiles.rows[0], MAX_ROWS=tiles.rows[1], GRAIN=tiles.grain, TILE_COST=tiles.cost,
        BAND=tiles.band, BOX_ROWS=tiles.box, SHARED=SHARED_BYTES,
        REGISTERS_LESS=tiles.registers[0], REGISTERS_MORE=tiles.registers[1],
    )  # fmt: skip
    if places:
        defined["PLACES"] = ", ".join(map(str, places))
    # The columns of the weight are the rows of the instruction.
    kinds = ".".join(WGMMA_TYPES[dtype.name] for dtype in (rhs, lhs))
    depth, flags = (32, "1, 1") if scaled else (16, f"1, 1, {int(not transposed)}, 0")
    function = "template <> __device__ __forceinline__ void multiply<{}>"
    instructions = "".join(
        wgmma(function.format(n), f"m64n{n}k{depth}.f32.{kinds}", n // 2, flags)
        for n in sorted({*heights.values()})
    )
    cases = "".join(
        f"case {rows // tiles.grain}: multiply_steps<{height}>(d, ring, result, steps); break;\n"
        for rows, height in heights.items()
    )
    return source_text(
        "hopper.cuh", "grouped_gemm.cu", defined=defined, INSTRUCTIONS=instructions, CASES=cases
    )


def launch_weights(lhs, dy, group_sizes, *, out_dtype, tiles: Tiles = WEIGHTS):
    (C, K), N, G = lhs.shape, dy.shape[1], group_sizes.shape[0]
    tiles = _fit(tiles, N, out_dtype)
    return launcher.triton_call(
        _descriptor(lhs, (tiles.k, tiles.m)), _descriptor(dy, (tiles.k, tiles.n)), group_sizes,
        lhs, dy,
        kernel=_weights_kernel,
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(_num_programs(),),
        num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G),
        NUM_PROGRAMS=_num_programs(), BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip


def launch_weights_hopper(lhs, dy, group_sizes, *, out_dtype, tiles: WeightTiles):
    return call_weights(
        _windows(lhs), _windows(dy), group_sizes,
        source=weights_source(lhs.dtype, out_dtype, tiles), name="grouped_gemm_weights", step=STEP,
        contraction=lhs.shape[0], widths=(lhs.shape[1], dy.shape[1]), out_dtype=out_dtype, box=tiles.box,
    )  # fmt: skip


def call_weights(
    *operands, source: str, name: str, step: int, contraction: int, widths: tuple[int, int], out_dtype,
    box: int = 32,
):  # fmt: skip
    """[G, *widths] by a kernel of weight gradients in CUDA C++; the last of its `operands` are the groups' sizes.

    `box`: lines of the result that leave at once.
    """
    *others, group_sizes = operands
    G, out_dtype = group_sizes.shape[0], jnp.dtype(out_dtype)
    num_steps = _num_steps((128, 256, step), *widths, contraction)
    return cuda_call(
        *others, group_sizes.astype(jnp.int32),
        source=source, name=name, scalars=(*widths, G),
        out_type=jax.ShapeDtypeStruct((G, *widths), out_dtype), out_block=(1, box, 128 // out_dtype.itemsize),
        programs=_num_programs(num_steps) // 2 * 2, warps=12, shared=SHARED_BYTES,
    )  # fmt: skip


def weights_source(dtype, out_dtype, tiles: WeightTiles) -> str:
    """The kernel of weight gradients in CUDA C++ for operands of this type."""
    kind = WGMMA_TYPES[jnp.dtype(dtype).name]
    function = "template <> __device__ __forceinline__ void multiply<{}>"
    # Both operands lie along their columns, not along the contraction.
    instructions = "".join(
        wgmma(function.format(n), f"m64n{n}k16.f32.{kind}.{kind}", n // 2, "1, 1, 1, 1")
        for n in (128, 256)
    )
    return tiles.source("grouped_gemm_weights.cu", out_dtype, INSTRUCTIONS=instructions)


def _windows(x):
    """`x` [C, W] as a window of `STEP` rows from each row on: TMA loads no row beyond the window."""
    C, W = x.shape
    return launcher.TensorMap(x, x.dtype, (C - STEP + 1, STEP, W), (W, W, 1), (1, STEP, 64))


_descriptor = launcher.TensorMap.of


def _fit(tiles: Tiles, width: int, out_dtype) -> Tiles:
    """Narrow outputs take narrow tiles; float32 outputs leave less shared memory for stages."""
    if width <= 128:
        tiles = dataclasses.replace(tiles, n=128)
    if jnp.dtype(out_dtype).itemsize == 4 and tiles.n == 256:
        tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3), n=128)
    return tiles


def _num_programs(num_steps: int = 0) -> int:
    """One program per multiprocessor; among other devices up to four, one after the other, if each has work enough.

    Each has its share of the tiles from the start. If a collective holds its multiprocessor it begins late, and
    everything waits for it: the smaller the shares, the shorter. Without a GPU, as when compiling ahead of time, the
    multiprocessors are an H100's.

    Args:
      num_steps: of all tiles together, at most; see `_num_steps`.
    """
    gpu = _jax.local_gpu()
    cores = gpu.core_count if gpu else 132
    alone = jax.sharding.get_abstract_mesh().size <= 1
    turns = 1 if alone else num_steps // (cores * LEAST_STEPS)
    return cores * max(1, min(turns, MOST_TURNS))


def _num_steps(tiles, num_rows: int, num_columns: int, contraction: int) -> int:
    """Of tiles of so many rows and columns in all."""
    m, n, k = tiles
    return triton.cdiv(num_rows, m) * triton.cdiv(num_columns, n) * triton.cdiv(contraction, k)


def _capability() -> int:
    """Ten times that of the GPU; an H100's where there is none."""
    return round((_jax.compute_capability() or 9.0) * 10)
