"""Rows times a thin operand, and a thin operand's gradient with them, of one read; compute capability 9.0 to 10.3.

    v = x b^T       db = sum of u^T x over the rows of a group

A program reads some columns of the rows of one slab, and makes their part of both. Parts are added in one order.
Dimension key: C rows, D their width, T the thin operands', G groups.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.thin_gemm import Slabs, columns_of
from expertmesh.core.kernels.triton.grouped_gemm import group_of_tile, rows_of, tiles_of_groups

ADDED = 2048  # numbers of a result that one program adds up


@triton.jit
def _parts_kernel(
    x, b, u, group_sizes, v, db,
    C: tl.constexpr, D: tl.constexpr, T: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, SLAB: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """v [D / BD, C, T] and db [slabs, T, D]: of BD columns, and of up to SLAB rows of a group."""
    chunk, slab = tl.program_id(0), tl.program_id(1)
    index_G, size_G, end_G, slabs_G, last_G = tiles_of_groups(group_sizes, G, G_POW2, SLAB)
    if slab < tl.sum(slabs_G):
        group, row, end = group_of_tile(slab, size_G, end_G, slabs_G, last_G, index_G, SLAB)
        end = tl.minimum(end, row + SLAB)
        columns, thin = chunk * BD + tl.arange(0, BD), tl.arange(0, BT)
        of_weight = (group.to(tl.int64) * T + thin)[None, :] * D + columns[:, None]
        inside = (thin < T)[None, :] & (columns < D)[:, None]
        weight = tl.load(b + of_weight, mask=inside, other=0)
        acc = tl.zeros((BD, BT), tl.float32)
        for step in tl.range(0, (end - row + BR - 1) // BR):
            rows = row + step * BR + tl.arange(0, BR)
            live = rows < end  # the others may hold NaN
            wide = rows_of(x, rows, live, columns, D)
            acc = tl.dot(wide.T, rows_of(u, rows, live, thin, T), acc)
            where = v + (chunk.to(tl.int64) * C + rows)[:, None] * T + thin[None, :]
            tl.store(where, tl.dot(wide, weight), mask=live[:, None] & (thin < T)[None, :])
        where = db + (slab.to(tl.int64) * T + thin)[None, :] * D + columns[:, None]
        tl.store(where, acc, mask=inside)


@triton.jit
def _sum_kernel(
    parts, group_sizes, out,
    SIZE: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, SLAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[G, SIZE], of the parts of each group's slabs, [slabs, SIZE]."""
    group = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index_G, _, _, slabs_G, last_G = tiles_of_groups(group_sizes, G, G_POW2, SLAB)
    last = tl.sum(tl.where(index_G == group, last_G, 0))
    first = last - tl.sum(tl.where(index_G == group, slabs_G, 0))
    acc = tl.zeros((BLOCK,), tl.float32)
    for slab in tl.range(first, last):
        acc += tl.load(parts + slab.to(tl.int64) * SIZE + at, mask=at < SIZE, other=0)
    tl.store(out + group.to(tl.int64) * SIZE + at, acc, mask=at < SIZE)


def launch(x, b, u, group_sizes, *, slabs: Slabs):
    """[C, D], [G, T, D] and [C, T] -> float32 [C, T] and [G, T, D]."""
    (C, D), (G, T, _) = x.shape, b.shape
    num_slabs, chunks = C // slabs.rows + G, triton.cdiv(D, slabs.columns)
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((chunks, C, T), (num_slabs, T, D))
    ]
    of_groups = dict(G=G, G_POW2=triton.next_power_of_2(G), SLAB=slabs.rows)
    v, parts = launcher.triton_call(
        x, b, u, group_sizes,
        kernel=_parts_kernel, out_type=types, grid=(chunks, num_slabs), num_warps=slabs.warps, num_stages=slabs.stages,
        C=C, D=D, T=T, BD=slabs.columns, BT=columns_of(T), BR=slabs.step, **of_groups,
    )  # fmt: skip
    db = launcher.triton_call(
        parts, group_sizes,
        kernel=_sum_kernel, out_type=jax.ShapeDtypeStruct((G, T, D), jnp.float32), grid=(G, triton.cdiv(T * D, ADDED)),
        SIZE=T * D, BLOCK=ADDED, **of_groups,
    )  # fmt: skip
    return v.sum(axis=0), db
