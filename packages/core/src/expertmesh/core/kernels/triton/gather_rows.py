"""Gathers of rows on NVIDIA GPUs: one program for each output row, which reads its terms where they are.

A row is read in pieces of `Tiles.columns`; all terms of a piece are under way at once. Dimension key as in
`ops/gather_rows.py`.
"""

import dataclasses

import jax
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.quantization.quantized import bits_of, of_bits


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of a row that a program holds at once, and its warps."""

    columns: int
    warps: int


@triton.jit
def _gather_kernel(
    src, index, weight, out,
    S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[n] = sum over k of weight[n, k] * src[index[n, k]], in float32 and in the order of k."""
    n = tl.program_id(0).to(tl.int64)  # over the groups too
    src += n // N * S * D
    for start in tl.range(0, D, BD):
        columns = start + tl.arange(0, BD)
        inside = columns < D
        if K == 1 and not WEIGHTED:
            row = tl.load(index + n).to(tl.int64)
            exists = (row >= 0) & (row < S)
            acc = tl.load(src + row * D + columns, mask=inside & exists, other=0)
        else:
            acc = tl.zeros((BD,), tl.float32)
            for k in tl.static_range(K):
                row = tl.load(index + n * K + k).to(tl.int64)
                exists = (row >= 0) & (row < S)
                part = tl.load(src + row * D + columns, mask=inside & exists, other=0)
                if WEIGHTED:  # a weight without a row may be NaN
                    scale = tl.load(weight + n * K + k, mask=exists, other=0).to(tl.float32)
                    acc += scale * part.to(tl.float32)
                else:
                    acc += part.to(tl.float32)
        tl.store(out + n * D + columns, acc.to(out.dtype.element_ty), mask=inside)


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
COPY = Tiles(columns=4096, warps=4)
SUM = Tiles(columns=2048, warps=4)


def gather(src, index, weight=None, *, tiles: Tiles | None = None):
    """[P, S, D] at [P, N, K] -> [P, N, D]."""
    (P, S, D), (_, N, K) = src.shape, index.shape
    tiles = fit(tiles or (COPY if K == 1 and weight is None else SUM), D)
    words = bits_of(src)
    out = launcher.triton_call(
        words, index, index if weight is None else weight,
        kernel=_gather_kernel,
        out_type=jax.ShapeDtypeStruct((P, N, D), words.dtype),
        grid=(P * N,),
        num_warps=tiles.warps,
        S=S, N=N, K=K, D=D, WEIGHTED=weight is not None, BD=tiles.columns,
    )  # fmt: skip
    return of_bits(out, src.dtype)


def fit(tiles: Tiles, width: int) -> Tiles:
    """The most columns, up to those of the tiles, that waste less than an eighth of the lanes."""
    columns = min(tiles.columns, triton.next_power_of_2(width))
    while columns > 256 and -width % columns * 8 >= width:
        columns //= 2
    return Tiles(columns, min(tiles.warps, max(columns // 256, 1)))
