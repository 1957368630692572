"""The gradient of a bias per group, for NVIDIA GPUs: the sum of the rows of each group, times their weights if given,
in a fixed order.

Every group is cut into as many parts as keep the GPU busy, whatever the sizes are; the parts' sums are added last.
Dimension key as in `linear/grouped_gemm.py`, for one participant.
"""

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of a step and columns of a program, its warps, and how many programs there should be."""

    rows: int
    columns: int
    warps: int
    programs: int


@triton.jit
def _sums_kernel(
    dy, group_sizes, weights, out,
    N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, PARTS: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[g, s] = sum of the rows of part s of group g; a part is whole steps of BC rows."""
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile_n = tl.program_id(0) % NUM_N
    part = tl.program_id(0) // NUM_N % PARTS
    group = tl.program_id(0) // (NUM_N * PARTS)
    index_G = tl.arange(0, G_POW2)
    size_G = tl.load(group_sizes + index_G, mask=index_G < G, other=0)
    first = tl.sum(tl.where(index_G < group, size_G, 0))
    size = tl.sum(tl.where(index_G == group, size_G, 0))
    steps = (size + BC - 1) // BC
    each = (steps + PARTS - 1) // PARTS
    columns = tile_n * BN + tl.arange(0, BN)
    inside = columns < N
    total = tl.zeros((BC, BN), tl.float32)
    for step in tl.range(part * each, min((part + 1) * each, steps)):
        within = step * BC + tl.arange(0, BC)
        at = (first + within).to(tl.int64)[:, None] * N + columns[None, :]
        live = (within < size)[:, None] & inside[None, :]
        value = tl.load(dy + at, mask=live, other=0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + first + within, mask=within < size, other=0)[:, None]
        total += value
    where = out + (group * PARTS + part) * N + columns
    tl.store(where, tl.sum(total, 0), mask=inside)


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
TILES = Tiles(rows=32, columns=128, warps=8, programs=2048)


def group_bias_grad(dy, group_sizes, weights, *, num_experts, out_dtype, tiles: Tiles = TILES):
    """[1, C, *N], int32[1, G], float32[1, C] or None -> [G, *N]."""
    G, N = num_experts, prod(dy.shape[2:])
    num_n = triton.cdiv(N, tiles.columns)
    parts = max(1, tiles.programs // (G * num_n))
    sums = launcher.triton_call(
        dy, group_sizes.astype(jnp.int32), weights,
        kernel=_sums_kernel, out_type=jax.ShapeDtypeStruct((G, parts, N), jnp.float32),
        grid=(G * parts * num_n,), num_warps=tiles.warps,
        N=N, G=G, G_POW2=triton.next_power_of_2(G), PARTS=parts,
        BC=tiles.rows, BN=tiles.columns,
    )  # fmt: skip
    return jnp.sum(sums, axis=1).astype(out_dtype).reshape(G, *dy.shape[2:])
