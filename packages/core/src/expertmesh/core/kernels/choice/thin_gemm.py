"""Tiles of grouped GEMMs with a thin operand, such as those of an adapter: they wait for the wide one's rows alone."""

import dataclasses

from expertmesh.core.kernels.device import Device

MAX_COLUMNS = 128
MIN_COLUMNS = 16  # what one instruction of tensor cores takes
WIDE = 64  # columns beyond which four warps spill, as on later GPUs some kernels do: tests/aot


@dataclasses.dataclass(frozen=True)
class ThinTiles:
    """m x n of a result, k of the contraction a step; warps, and steps under way."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Slabs:
    """Of a kernel that reads rows once for two results.

    Attributes:
      rows: of a group that one program reads, one step after the other; each makes a part of the weight's gradient.
      columns: of the rows that one program reads; each makes a part of the rows' result.
      step, warps, stages: rows a step, warps, and steps under way.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def choose_rows(T: int) -> ThinTiles:
    """Of [C, D] x [G, D, T]."""
    wide = T > WIDE
    return ThinTiles(m=128, n=columns_of(T), k=64 if wide else 128, warps=_warps(T), stages=3)


def choose_gathered(T: int) -> ThinTiles | None:
    """The same, rows read where they are; None where the result is no longer thin."""
    if T > MAX_COLUMNS:
        return None
    return ThinTiles(m=128, n=columns_of(T), k=64, warps=_warps(T), stages=4)


def choose_weights(T: int, device: Device) -> ThinTiles:
    """Of [C, T]^T [C, D] in groups."""
    warps = _warps(T) if device.capability < 100 else 8
    return ThinTiles(m=columns_of(T), n=128, k=64, warps=warps, stages=3)


def choose_both(T: int, device: Device) -> Slabs | None:
    """Of [C, D] x [G, T, D]^T and [C, T]^T [C, D] in groups; None: two GEMMs read the rows."""
    if T > WIDE or not device.reads_shared:
        return None
    return Slabs(rows=2048, columns=256 if T <= 32 else 128, step=64, warps=4, stages=4)


def _warps(T: int) -> int:
    """As many as hold a tile of 128 by T."""
    return 8 if T > WIDE else 4


def columns_of(T: int) -> int:
    """Of a tile that holds them all, or as many as it may."""
    return min(max(1 << (T - 1).bit_length(), MIN_COLUMNS), MAX_COLUMNS)
