"""Whether one kernel projects rows of 8 bits, activates and quantizes them.

Dimension key as in `linear/quantized_activation.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from expertmesh.core.kernels.choice import quantized_grouped_gemm as gemm
from expertmesh.core.kernels.choice.gathered_activation import FUNCTIONS
from expertmesh.core.kernels.choice.grouped_gemm import Config, fits_cuda
from expertmesh.core.kernels.choice.quantized_grouped_gemm import BLOCK, ROWS_BLOCKS
from expertmesh.core.kernels.device import Device

WARPS = 8  # of consumers
# What a tile's first stage says to each warp; the largest magnitudes of each warp's columns, of two tiles; and each
# consumer's multipliers.
SCRATCH = WARPS * 16 + 2 * WARPS * BLOCK * 2 + 2 * BLOCK * 4
# With 40 and 232 registers the producers, whose weight comes in two boxes, spill.
TILES = dataclasses.replace(ROWS_BLOCKS, registers=(56, 224), scratch=SCRATCH)
MIN_STAGES = 3
# NVIDIA H100, 2026-11-27: the longest contraction measured; of 768 to that both passes take 0.97 to 1.02 of the time.
LONGEST_CONTRACTION = 4096


@dataclasses.dataclass(frozen=True)
class Projection:
    """Rows [_, contraction] in groups x [groups, contraction, 2, width], then `function`, of `dtype`.

    `blocks`: the lengths of those of the tokens, and of the result in either direction.
    """

    rows: int
    contraction: int
    width: int
    groups: int
    dtype: Any
    blocks: tuple[int, int]
    function: str
    device: Device


def choose(projection: Projection) -> Config | None:
    """The launch of the one kernel; None: a GEMM and what activates and quantizes."""
    of = projection
    if of.contraction > LONGEST_CONTRACTION or not fits(of):
        return None
    return Config("cuda", _tiles(of), _gemm(of).programs((128, 256, BLOCK)))


def fits(projection: Projection) -> bool:
    """Whether the one kernel can take it."""
    of = projection
    return (
        fits_cuda(_gemm(of))
        and of.blocks == (BLOCK, BLOCK)
        and of.width % BLOCK == 0
        and of.rows % 16 == 0  # of the copy along the rows, whose lines have whole words
        and jnp.dtype(of.dtype).itemsize == 2
        and of.function in FUNCTIONS
        and _tiles(of).stages >= MIN_STAGES
    )


def _gemm(of: Projection) -> gemm.Rows:
    return gemm.Rows(
        of.rows, of.contraction, 2 * of.width, of.groups, jnp.float8_e4m3fn, of.dtype, of.device,
        of.blocks[0],
    )  # fmt: skip


def _tiles(of: Projection) -> gemm.BlockTiles:
    return TILES.fit(of.groups, of.dtype)
