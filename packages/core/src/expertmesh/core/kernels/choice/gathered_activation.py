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

    registers: tuple[int, int, int] = (40, 200, 72)
    stages: int = 4
    # Shared memory of barriers, of results on their way and of stages.
    taken: int = 1024 + 128 * 256 + 4 * 48 * 1024


TILES = Tiles()
MAX_GROUPS = (SHARED_BYTES - 1024 - TILES.taken) // 4  # whose ends fit beside the rest


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
        and p.groups <= MAX_GROUPS
        and p.rows // ROWS_AT_ONCE * (p.width // COLUMNS) < 2**23  # tiles, which it divides
        and p.tokens * p.contraction < 2**35  # which it finds by 32 bits of 8 numbers
        and jnp.dtype(p.dtype).itemsize == 2
        and p.function in FUNCTIONS
    )
