"""Grouped GEMM for Hopper in CUDA C++: clusters of two blocks that share what they load.

As `triton/grouped_gemm.py`; per-tensor FP8 rows, one scale per group, too.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.grouped_gemm import (
    ROWS_HOPPER,
    SHARED_BYTES,
    STEP,
    Config,
    RowTiles,
    WeightTiles,
)  # fmt: skip
from expertmesh.core.kernels.cuda import weight_gradients
from expertmesh.core.kernels.cuda.cluster_order import cluster_order
from expertmesh.core.kernels.cuda.cuda_call import WGMMA_TYPES, cuda_call, source_text, wgmma
from expertmesh.core.kernels.low_rank import LowRank


def launch_rows(
    lhs, rhs, group_sizes, scales=(), *,
    config: Config, out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None = None,
):  # fmt: skip
    """[C, K] x [G, K, N], or [G, N, K] if `transposed`, -> [C, N].

    `scales`: of lhs and of rhs, [G] each, if they have 8 bits; then rhs is transposed. `low_rank`, in the dtype of
    operands of 16 bits, is added.
    """
    (C, K), G, tiles = lhs.shape, group_sizes.shape[0], config.tiles
    N = rhs.shape[1] if transposed else rhs.shape[2]
    line = 128 // lhs.dtype.itemsize
    # Tiles of a queue go where there is room.
    places = () if tiles.waves else cluster_order(config.programs, SHARED_BYTES)
    dtypes, term = (lhs.dtype, rhs.dtype), low_rank.u.dtype.name if low_rank else ""
    more = (np.int32(-(-low_rank.rank // 64)),) if low_rank else ()
    return cuda_call(
        launcher.TensorMap.of(lhs, (tiles.box, line)), launcher.TensorMap.of(rhs, (1, 64, line)),
        group_sizes.astype(jnp.int32), *scales, *low_rank_maps(low_rank, tiles.box, 64), *more,
        source=rows_source(dtypes, out_dtype, transposed, tiles, places, term), name="grouped_gemm_rows",
        scalars=(C * clear_padding, -(-K // line), N, G, tiles.parts),
        out_type=jax.ShapeDtypeStruct((C, N), out_dtype),
        programs=config.programs, warps=12, shared=SHARED_BYTES, queue=bool(tiles.waves),
    )  # fmt: skip


def low_rank_maps(
    low_rank: LowRank | None, rows: int, columns: int
) -> tuple[launcher.TensorMap, ...]:
    """How a kernel loads a term: lines of 64 of the rank, or of the columns."""
    if low_rank is None:
        return ()
    box = launcher.TensorMap.of
    return box(low_rank.u, (rows, 64)), box(low_rank.b, (1, columns, 64))


def low_rank_instructions(function: str, dtype: str, widths: Iterable[int]) -> str:
    """What multiplies a term's operands, along the rank, 64 x each width; `function`: a name with a place for it."""
    kind = WGMMA_TYPES[dtype]
    return "".join(
        wgmma(function.format(n), f"m64n{n}k16.f32.{kind}.{kind}", n // 2, "1, 1, 0, 0")
        for n in widths
    )


def rows_source(
    dtypes, out_dtype, transposed: bool, tiles: RowTiles = ROWS_HOPPER, places: tuple[int, ...] = (),
    term: str = "",
) -> str:  # fmt: skip
    """The kernel in CUDA C++ for lhs and rhs of `dtypes`.

    `places`: of its clusters, else as they are launched; `term`: the dtype of a term of low rank, if one is added.
    """
    (lhs, rhs), out_dtype = map(jnp.dtype, dtypes), jnp.dtype(out_dtype)
    scaled = lhs.itemsize == 1
    # Low tiles, of which there are few, take the instructions of the next multiple of 16 rows.
    least, most = tiles.rows
    heights = {
        rows: max(rows, -(-min(rows, least) // 16) * 16)
        for rows in range(tiles.grain, most + 1, tiles.grain)
    }
    defined: dict[str, object] = dict(
        SCALED=int(scaled), LOW_RANK=int(bool(term)), TRANSPOSED=int(transposed),
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16),
        BOXES=tiles.boxes, MIN_ROWS=tiles.rows[0], MAX_ROWS=tiles.rows[1], GRAIN=tiles.grain, TILE_COST=tiles.cost,
        BAND=tiles.band, BOX_ROWS=tiles.box, SHARED=SHARED_BYTES, WAVES=tiles.waves,
        REGISTERS_PRODUCER=tiles.registers[0], REGISTERS_CONSUMER=tiles.registers[1],
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
    if scaled and term:
        function = "template <> __device__ __forceinline__ void multiply_low_rank<{}>"
        instructions += low_rank_instructions(function, term, sorted({*heights.values()}))
    cases = "".join(
        f"case {rows // tiles.grain}: multiply_tile<{height}>(d, ring, result, scales, steps); break;\n"
        for rows, height in heights.items()
    )
    return source_text(
        "hopper.cuh", "grouped_gemm.cu", defined=defined, INSTRUCTIONS=instructions, CASES=cases
    )


# Operands of a weight gradient whose rows may be found by an index, as the kernel has them.
GATHERS = {"": 0, "lhs": 1, "dy": 2}


def launch_weights(lhs, dy, group_sizes, *, config: Config, out_dtype, index=None, gathers=""):
    """[C, K] x [C, N] -> [G, K, N].

    Rows of the operand `gathers`, "lhs" or "dy", are its rows at the index, int32[C], zeros where that is negative.
    """
    operands = {"lhs": lhs, "dy": dy}
    others = [operands.pop(gathers), index] if gathers else []
    return weight_gradients.launch(
        *map(_windows, operands.values()), *others, group_sizes,
        source=weights_source(lhs.dtype, out_dtype, config.tiles, gathers), name="grouped_gemm_weights",
        config=config, widths=(lhs.shape[1], dy.shape[1]), out_dtype=out_dtype,
    )  # fmt: skip


def weights_source(dtype, out_dtype, tiles: WeightTiles, gathers: str = "") -> str:
    """The kernel of weight gradients in CUDA C++ for operands of this type; `gathers`: as of `launch_weights`."""
    kind = WGMMA_TYPES[jnp.dtype(dtype).name]
    function = "template <> __device__ __forceinline__ void multiply<{}>"
    # Both operands lie along their columns, not along the contraction.
    instructions = "".join(
        wgmma(function.format(n), f"m64n{n}k16.f32.{kind}.{kind}", n // 2, "1, 1, 1, 1")
        for n in (128, 256)
    )
    return weight_gradients.source(
        "grouped_gemm_weights.cu", out_dtype, tiles, {"GATHERS": GATHERS[gathers]}, INSTRUCTIONS=instructions
    )  # fmt: skip


def _windows(x):
    """`x` [C, W] as a window of `STEP` rows from each row on: TMA loads no row beyond the window."""
    C, W = x.shape
    return launcher.TensorMap(x, x.dtype, (C - STEP + 1, STEP, W), (W, W, 1), (1, STEP, 64))
