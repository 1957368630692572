"""Tiles of grouped GEMMs of 8-bit rows and a thin plain operand, which wait for the rows alone."""

import dataclasses

MOST_COLUMNS = 128
FEWEST_COLUMNS = 16  # what one instruction of tensor cores takes


@dataclasses.dataclass(frozen=True)
class ThinTiles:
    """m x n of a result, k of the contraction a step; warps, and steps under way."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def choose_rows(T: int) -> ThinTiles:
    """Of [C, D] x [G, D, T]."""
    return ThinTiles(m=128, n=_columns(T), k=128, warps=4, stages=3)


def choose_weights(T: int) -> ThinTiles:
    """Of [C, T]^T [C, D] in groups."""
    return ThinTiles(m=_columns(T), n=128, k=64, warps=4, stages=3)


def _columns(T: int) -> int:
    return min(max(1 << (T - 1).bit_length(), FEWEST_COLUMNS), MOST_COLUMNS)
