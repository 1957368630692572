"""Whether one kernel projects rows that are read where their tokens are and activates them.

Dimension key as in `linear/gathered_activation.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config
from expertmesh.core.kernels.device import Device
from expertmesh.core.ops.activate_rows import ROWS_AT_ONCE, activates_at_once

STEP, COLUMNS = 64, 128  # of the contraction; of a half of h in a tile
FUNCTIONS = "silu", "quick_gelu", "gelu", "relu", "squared_relu"


@dataclasses.dataclass(frozen=True)
class Projection:
    """[tokens, contraction], of which there are rows in groups, x [groups, contraction, 2, width], then `function`."""

    rows: int
    tokens: int
    contraction: int
    width: int
    groups: int
    dtype: Any
    function: str
    device: Device


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel runs: registers of the producer, of consumers, and of what stores results; stages."""

    registers: tuple[int, int, int]
    stages: int

    @property
    def max_groups(self) -> int:
        """So many ends of groups fit beside barriers, results on their way and stages."""
        return (SHARED_BYTES - 2 * 1024 - 32 * 1024 - self.stages * 48 * 1024) // 4


TILES = Tiles(registers=(40, 200, 72), stages=4)


def choose(projection: Projection) -> Config | None:
    """The launch of the one kernel; None: a GEMM and an activation."""
    of = projection
    if not _fits(of) or not activates_at_once(of.rows, of.contraction, of.groups):
        return None
    return Config("cuda", TILES, projection.device.multiprocessors // 2 * 2)


def _fits(p: Projection) -> bool:
    """Whether the kernel can take it."""
    return (
        p.device.runs_cuda
        and p.contraction % STEP == 0
        and p.width % COLUMNS == 0
        and p.groups <= TILES.max_groups
        and p.rows // ROWS_AT_ONCE * (p.width // COLUMNS) < 2**23  # tiles, which it divides
        and p.tokens * p.contraction < 2**35  # which it finds by 32 bits of 8 numbers
        and jnp.dtype(p.dtype).itemsize == 2
        and p.function in FUNCTIONS
    )
