"""Whether one kernel projects rows and activates them, or does so with the gradients of both.

Dimension key as in `linear/gathered_activation.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config
from expertmesh.core.kernels.device import Device
from expertmesh.core.ops.activate_rows import ROWS_AT_ONCE, activates_at_once

LINE, COLUMNS = 128, 256  # bytes of the contraction; of a tile
FUNCTIONS = "silu", "quick_gelu", "gelu", "relu", "squared_relu"


@dataclasses.dataclass(frozen=True)
class Projection:
    """[tokens, contraction], of which there are rows in groups, x [groups, contraction, 2, width], then `function`.

    `dtype`: of operands, of 16 bits, or of 8 with scales of groups; `splits`: products of 128 of the contraction are
    to be added in float32.
    """

    rows: int
    tokens: int
    contraction: int
    width: int
    groups: int
    dtype: Any
    function: str
    device: Device
    splits: bool = False


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel runs: registers of the producer, of consumers, and of what comes behind; stages.

    `later`: steps of the next tile after which the second part of the last one is handed over; None: there is room for
    both parts, and products of 128 of the contraction are added in float32.
    """

    registers: tuple[int, int, int]
    later: int | None
    stages: int = 4

    @property
    def splits(self) -> bool:
        """Whether products of 128 of the contraction are added in float32."""
        return self.later is None

    @property
    def max_groups(self) -> int:
        """So many ends of groups fit beside barriers, results on their way and stages."""
        rooms = 2 if self.splits else 1
        return (SHARED_BYTES - 2 * 1024 - rooms * 32 * 1024 - self.stages * 48 * 1024) // 4


TILES = Tiles(registers=(40, 200, 72), later=4)
GRAD_TILES = Tiles(registers=(32, 184, 112), later=10)  # of the gradient
GRAD_TILES_OF_8_BITS = Tiles(registers=(40, 176, 112), later=None, stages=3)


# F from which it is faster than a GEMM of gathered rows and an activation, whatever the contraction. NVIDIA H100,
# 2026-11-26, contraction of 4096: with F of 512 it took 7085 us, the two 6708; with 2048 the block's forward 0.965 of
# its time with two.
WIDE = 1024


def choose(projection: Projection) -> Config | None:
    """The launch of the one kernel; None: a GEMM and an activation."""
    of = projection
    wide = of.width >= WIDE and of.rows >= ROWS_AT_ONCE * of.groups
    at_once = wide or activates_at_once(of.rows, of.contraction, of.width, of.groups)
    return _config(of.device) if at_once and _fits(of, TILES, 2 * of.width) else None


def choose_grad(projection: Projection) -> Config | None:
    """As `choose`, of the gradient: rows x [groups, width, contraction]^T."""
    of = projection
    if not _fits(of, GRAD_TILES, of.width) or of.rows < ROWS_AT_ONCE * of.groups:
        return None
    return _config(of.device)


def choose_quantized(projection: Projection, dtype) -> Config | None:
    """As `choose`, of rows of 8 bits side by side, for h of `dtype`; None: two kernels."""
    return _of_quantized(projection, dtype, TILES, 2 * projection.width)


def choose_quantized_grad(projection: Projection, dtype) -> Config | None:
    """As `choose_grad`, of rows of 8 bits side by side, for h of `dtype`; None: two kernels."""
    return _of_quantized(projection, dtype, GRAD_TILES_OF_8_BITS, projection.width)


# NVIDIA H100, 2026-11-28: at 40960 x 768 (F 256 to 1024), 24576 x 1536 (256), 32768 x 4096 (512) the one kernel takes
# 0.74 to 0.89 of the time of two, its gradient 0.72 to 0.79.
def _of_quantized(of: Projection, dtype, tiles: Tiles, columns: int) -> Config | None:
    wide_results = jnp.dtype(dtype).itemsize != 2
    if wide_results or not _fits(of, tiles, columns) or of.rows < ROWS_AT_ONCE * of.groups:
        return None
    return _config(of.device)


def _config(device: Device) -> Config:
    """Clusters of two."""
    return Config("cuda", programs=device.multiprocessors // 2 * 2)


def _fits(p: Projection, tiles: Tiles, columns: int) -> bool:
    """Whether a kernel with these columns can take it."""
    return (
        p.device.runs_cuda
        and tiles.splits >= p.splits
        and p.contraction * jnp.dtype(p.dtype).itemsize % LINE == 0
        and columns % COLUMNS == 0
        and p.groups <= tiles.max_groups
        and p.rows // ROWS_AT_ONCE * (columns // COLUMNS) < 2**23  # tiles, which it divides
        and p.tokens * p.contraction < 2**35  # which it finds by 32 bits of 8 numbers
        and jnp.dtype(p.dtype).itemsize <= 2
        and p.function in FUNCTIONS
    )
