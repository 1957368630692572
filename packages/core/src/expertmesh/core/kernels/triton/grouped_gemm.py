"""Grouped GEMM for NVIDIA GPUs from compute capability 8.0: persistent, group sizes read on the device.

Forward and input gradient are one kernel: C rows in G groups times each group's weight. The weight gradient contracts
over the rows of a group. Every byte of the outputs is written, but for padding rows without `clear_padding`.
Dimension key as in `linear/grouped_gemm.py`.

Where a launch says so by its tiles, operands are TMA descriptors, parameters of the launch; elsewhere pointers. One
that the device makes needs scratch memory, and a launch that allocates it cannot be part of a captured loop.
"""

import jax
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import Config, Tiles
from expertmesh.core.kernels.low_rank import LowRank


@triton.jit
def group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM: tl.constexpr):
    """The group of the tile_m-th tile of rows, its first row, and the end of its group."""
    group = tl.sum((last_tile_G <= tile_m).to(tl.int32))
    mine_G = index_G == group
    end = tl.sum(tl.where(mine_G, end_G, 0))
    size = tl.sum(tl.where(mine_G, size_G, 0))
    first_tile = tl.sum(tl.where(mine_G, last_tile_G - tiles_G, 0))
    return group, end - size + (tile_m - first_tile) * BM, end


@triton.jit
def tiles_of_groups(group_sizes, G: tl.constexpr, G_POW2: tl.constexpr, BM: tl.constexpr):
    """Of each group its index, its rows, where they end, its tiles of up to BM rows, and where those end."""
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    tiles_G = (size_G + BM - 1) // BM
    return index_G, size_G, end_G, tiles_G, tl.cumsum(tiles_G, 0)


@triton.jit
def steps_of(D: tl.constexpr, BK: tl.constexpr, num_m):
    """The steps of a contraction, where there are tiles of rows.

    Of one step that the compiler knows of it makes no loop, and Triton 3.8 then no `tl.dot_scaled` for sm_100.
    """
    if D > BK:
        return (D + BK - 1) // BK
    else:
        return tl.minimum(num_m, 1)


@triton.jit
def banded_tile(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: those that run together share rows and columns, so that both stay in L2."""
    band = tile // (GROUP_M * num_n)
    band_m = min(num_m - band * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * num_n)
    return band * GROUP_M + within % band_m, within // band_m


@triton.jit
def store_zero_rows(
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
def loaded(at, mask):
    """What pointers to numbers of 8 bits or more point to, zeros outside of the mask, None: everywhere."""
    if at.dtype.element_ty.primitive_bitwidth == 8:
        bits = _loaded(at.to(tl.pointer_type(tl.uint8), bitcast=True), mask)
        return bits.to(at.dtype.element_ty, bitcast=True)
    else:
        return _loaded(at, mask)


@triton.jit
def _loaded(at, mask):
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def matrix_tile(
    matrix, row, column, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BEYOND: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """[ROWS, COLUMNS] of a matrix [..., WIDTH] from a place on, or [COLUMNS, ROWS] if TRANSPOSED; COLUMNS divides the
    column. A descriptor's, or by pointers: rows from `end` on are then "zeros", "any" rows, or there are "none", as
    BEYOND says."""
    if isinstance(matrix, tl.tensor_descriptor):
        tile = matrix.load([row, column])
        return tile.T if TRANSPOSED else tile
    else:
        rows = tl.arange(0, ROWS)[None, :] if TRANSPOSED else tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[:, None] if TRANSPOSED else tl.arange(0, COLUMNS)[None, :]
        # A step moves one pointer; the offsets, of 32 bits, stay. Transposed by pointers, loads stay in flight.
        first = matrix + ((tl.zeros((), tl.int64) + row) * WIDTH + column)
        there = tl.minimum(rows, end - 1 - row) if BEYOND == "any" else rows
        at = first + (there * WIDTH + columns)
        live = rows < end - row
        inside = columns < WIDTH - column
        if BEYOND == "zeros":
            return loaded(at, live if WIDTH % COLUMNS == 0 else live & inside)
        else:
            return loaded(at, None if WIDTH % COLUMNS == 0 else inside)


@triton.jit
def rows_of(matrix, rows, live, columns, WIDTH: tl.constexpr):
    """Columns of the rows of a matrix [..., WIDTH] that are live; zeros in the others, and beyond the width."""
    where = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return loaded(matrix + where, live[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def weight_tile(
    rhs, group, k, tile_n, D: tl.constexpr, W: tl.constexpr,
    TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The k-th BK of the contraction D by the tile_n-th BN of the width W of a group's weight: [G, D, W], [G, W, D] if
    TRANSPOSED."""
    if isinstance(rhs, tl.tensor_descriptor):
        if TRANSPOSED:
            return rhs.load([group, tile_n * BN, k * BK]).reshape(BN, BK).T
        else:
            return rhs.load([group, k * BK, tile_n * BN]).reshape(BK, BN)
    else:
        weight = rhs + group.to(tl.int64) * (D * W)
        if TRANSPOSED:
            of_width: tl.constexpr = "none" if W % BN == 0 else "any"
            return matrix_tile(weight, tile_n * BN, k * BK, W, D, BN, BK, of_width, True)
        else:
            of_depth: tl.constexpr = "none" if D % BK == 0 else "zeros"
            return matrix_tile(weight, k * BK, tile_n * BN, D, W, BK, BN, of_depth)


@triton.jit
def add_low_rank(
    acc, u, b, rows, end, columns, group,
    R: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """acc + u[rows] @ b[group], BR of R at a time, rows up to `end`: u [C, R], b [G, R, W], or [G, W, R] if TRANSPOSED.

    acc itself if u is None.
    """
    if u is None:
        return acc
    else:
        # Loads without masks, of some row or column beyond the last one, take fewer registers.
        of_rows = u + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * R
        of_group = b + group.to(tl.int64) * (R * W)
        of_rank: tl.constexpr = 1 if TRANSPOSED else W
        of_columns = tl.minimum(columns, W - 1)[None, :] * (R if TRANSPOSED else 1)
        for first in tl.range(0, R, BR, num_stages=2):
            ranks = first + tl.arange(0, BR)
            inside = ranks < R
            x = loaded(of_rows + ranks[None, :], None if R % BR == 0 else inside[None, :])
            at = of_group + (ranks[:, None] * of_rank + of_columns)
            y = loaded(at, None if R % BR == 0 else inside[:, None])
            acc = tl.dot(x, y, acc)
        return acc


@triton.jit
def _rows_kernel(
    lhs, rhs, group_sizes, u, b, out,
    C: tl.constexpr, ZEROS_END: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, TRANSPOSED: tl.constexpr, FLATTEN: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[r] = lhs[r] @ rhs[group of r] (rhs [G, K, N], or [G, N, K] if TRANSPOSED) and `add_low_rank`'s; zeros in
    padding rows up to ZEROS_END."""
    index_G, size_G, end_G, tiles_G, last_tile_G = tiles_of_groups(group_sizes, G, G_POW2, BM)
    num_live = tl.sum(size_G)
    num_m = tl.sum(tiles_G)
    num_n: tl.constexpr = (N + BN - 1) // BN

    # Flattened with the loop over K: the next tile's loads run while this tile is stored.
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = banded_tile(tile, num_m, num_n, GROUP_M)
        group, row, end = group_of_tile(tile_m, size_G, end_G, tiles_G, last_tile_G, index_G, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (K + BK - 1) // BK):
            a = matrix_tile(lhs, row, k * BK, C, K, BM, BK, "any")
            w = weight_tile(rhs, group, k, tile_n, K, N, TRANSPOSED, BN, BK)
            acc = tl.dot(a, w, acc)
        rows = row + tl.arange(0, BM)  # from `end` on they belong to the next group
        columns = tile_n * BN + tl.arange(0, BN)
        acc = add_low_rank(acc, u, b, rows, end, columns, group, R, N, TRANSPOSED, BR)
        where = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        live = (rows < end)[:, None] & (columns < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=live, eviction_policy="evict_first")

    store_zero_rows(out, num_live, ZEROS_END, N, BN, NUM_PROGRAMS)


@triton.jit
def _store_weight(
    acc, out, group, row, column,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A tile of out[group] from a row and a column on; HALVES: one after the other, in half the shared memory."""
    if HALVES:
        left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _store_weight(left, out, group, row, column, K, N, BM, BN // 2, False)
        _store_weight(right, out, group, row, column + BN // 2, K, N, BM, BN // 2, False)
    else:
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        where = out + (group.to(tl.int64) * K + rows)[:, None] * N + columns[None, :]
        inside = (rows < K)[:, None] & (columns < N)[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def tile_of_weights(tile, size_G, end_G, index_G, NUM_M: tl.constexpr, NUM_N: tl.constexpr):
    """The group of a tile of weight gradients, where the tile is in the group's, and the group's first row and end."""
    group = tile // (NUM_M * NUM_N)
    within = tile % (NUM_M * NUM_N)
    end = tl.sum(tl.where(index_G == group, end_G, 0))
    size = tl.sum(tl.where(index_G == group, size_G, 0))
    return group, within % NUM_M, within // NUM_M, end - size, end


@triton.jit
def _weights_kernel(
    lhs_tiles, dy_tiles, group_sizes, lhs, dy, out,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of lhs[r]^T dy[r] over the rows r of group g; tiles of BM x BN, BK rows at a time.

    Whole steps are read by `lhs_tiles` and `dy_tiles`, which are descriptors or the same pointers.
    """
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    num_m: tl.constexpr = (K + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), G * num_m * num_n, NUM_PROGRAMS):
        group, tile_m, tile_n, first, end = tile_of_weights(
            tile, size_G, end_G, index_G, num_m, num_n
        )
        size = end - first
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, size // BK):
            row = first + step * BK
            a = matrix_tile(lhs_tiles, row, tile_m * BM, end, K, BK, BM, "none", True)
            b = matrix_tile(dy_tiles, row, tile_n * BN, end, N, BK, BN, "none")
            acc = tl.dot(a, b, acc)
        if size % BK != 0:  # rows of the next group are not loaded: they may hold NaN
            row = first + size // BK * BK
            a = matrix_tile(lhs, row, tile_m * BM, end, K, BK, BM, "zeros", True)
            b = matrix_tile(dy, row, tile_n * BN, end, N, BK, BN, "zeros")
            acc = tl.dot(a, b, acc)
        _store_weight(acc, out, group, tile_m * BM, tile_n * BN, K, N, BM, BN, False)


@triton.jit
def _tiles_before(tile, NUM_PROGRAMS: tl.constexpr):
    """How many of the tiles before a tile are this program's."""
    return (tile + NUM_PROGRAMS - 1 - tl.program_id(0)) // NUM_PROGRAMS


@triton.jit
def _flat_weights_kernel(
    lhs, dy, group_sizes, out,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As `_weights_kernel`, by pointers, in one loop over the steps of all of a program's tiles.

    The next tile's loads run while this one is stored. Triton flattens no loops whose inner length varies.
    """
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    end_G = tl.cumsum(size_G, 0)
    steps_G = tl.maximum((size_G + BK - 1) // BK, 1)  # an empty group has one, of zeros
    num_m: tl.constexpr = (K + BM - 1) // BM
    num_n: tl.constexpr = (N + BN - 1) // BN
    num_tiles: tl.constexpr = num_m * num_n  # of a group
    tiles_G = _tiles_before((index_G + 1) * num_tiles, NUM_PROGRAMS)
    tiles_G -= _tiles_before(index_G * num_tiles, NUM_PROGRAMS)
    total = tl.sum(tl.where(index_G < G, tiles_G * steps_G, 0))

    # A tile's place, which its first step finds.
    tile = tl.program_id(0) - NUM_PROGRAMS
    step, steps = -1, 1
    group, row, column, first, end = 0, 0, 0, 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, total):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += NUM_PROGRAMS
            group = tile // num_tiles
            tile_m, tile_n = banded_tile(tile % num_tiles, num_m, num_n, GROUP_M)
            row, column = tile_m * BM, tile_n * BN
            end = tl.sum(tl.where(index_G == group, end_G, 0))
            first = end - tl.sum(tl.where(index_G == group, size_G, 0))
            steps = tl.sum(tl.where(index_G == group, steps_G, 0))
        a = matrix_tile(lhs, first + step * BK, row, end, K, BK, BM, "zeros", True)
        b = matrix_tile(dy, first + step * BK, column, end, N, BK, BN, "zeros")
        acc = tl.dot(a, b, acc)
        if step == steps - 1:
            _store_weight(acc, out, group, row, column, K, N, BM, BN, True)
            acc = tl.zeros((BM, BN), tl.float32)


def tiled(x, box: tuple[int, ...], tiles: Tiles):
    """An operand that is read in boxes: a descriptor, or the array itself, as its tiles say."""
    return launcher.TensorMap.of(x, box) if tiles.descriptors else x


# What `add_low_rank` contracts at a time: more takes registers that some GPUs do not have.
RANK_STEP = 16


def launch_rows(
    lhs, rhs, group_sizes, *,
    config: Config, out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None = None,
):  # fmt: skip
    """[C, K] x [G, K, N], or [G, N, K] if `transposed`, -> [C, N]; to which `low_rank` is added."""
    (C, K), G, tiles = lhs.shape, group_sizes.shape[0], config.tiles
    N = rhs.shape[1] if transposed else rhs.shape[2]
    rhs_block = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    return launcher.triton_call(
        tiled(lhs, (tiles.m, tiles.k), tiles), tiled(rhs, rhs_block, tiles), group_sizes,
        *(low_rank or (None, None)),
        kernel=_rows_kernel,
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        grid=(config.programs,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        C=C, ZEROS_END=C * clear_padding, K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G), TRANSPOSED=transposed,
        R=low_rank.rank if low_rank else 0, BR=RANK_STEP, FLATTEN=tiles.flat and low_rank is None,
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group_m,
    )  # fmt: skip


def launch_weights(lhs, dy, group_sizes, *, config: Config, out_dtype):
    """[C, K] x [C, N] -> [G, K, N]."""
    K, N, G, tiles = lhs.shape[1], dy.shape[1], group_sizes.shape[0], config.tiles
    options = dict(
        out_type=jax.ShapeDtypeStruct((G, K, N), out_dtype),
        grid=(config.programs,),
        num_warps=tiles.warps, num_stages=tiles.stages,
        K=K, N=N, G=G, G_POW2=triton.next_power_of_2(G),
        NUM_PROGRAMS=config.programs, BM=tiles.m, BN=tiles.n, BK=tiles.k,
    )  # fmt: skip
    if tiles.flat and not tiles.descriptors:
        options |= dict(kernel=_flat_weights_kernel, GROUP_M=tiles.group_m)
        return launcher.triton_call(lhs, dy, group_sizes, **options)
    boxes = tiled(lhs, (tiles.k, tiles.m), tiles), tiled(dy, (tiles.k, tiles.n), tiles)
    return launcher.triton_call(*boxes, group_sizes, lhs, dy, kernel=_weights_kernel, **options)
