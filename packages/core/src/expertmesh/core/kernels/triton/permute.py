"""Permutation on NVIDIA GPUs: rows move in the order of tokens, so that a token is read once and not once a row.

The plan of rows is a stable counting sort: choices of each expert in each block, their sums over the blocks before, and
the rank within the block. Of few blocks one kernel does all three, each of its programs the first two. Integers only.
Dimension key as in `ops/permute.py`; B blocks of choices.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.triton.gather_rows import Tiles, fit
from expertmesh.core.operands import wide_ids
from expertmesh.core.quantization.quantized import bits_of, of_bits


@triton.jit
def _clear_rows(
    block, source, out, ROWS_IN_ALL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Zeros in those rows of a block that have no source."""
    rows = block * BR + tl.arange(0, BR)
    choices = tl.load(source + rows, mask=rows < ROWS_IN_ALL, other=0)
    if tl.min(choices) < 0:
        for n in tl.range(block * BR, min(block * BR + BR, ROWS_IN_ALL)):
            if tl.load(source + n) < 0:
                for start in tl.range(0, D, BD):
                    columns = start + tl.arange(0, BD)
                    zeros = tl.zeros((BD,), out.dtype.element_ty)
                    tl.store(out + tl.cast(n, tl.int64) * D + columns, zeros, mask=columns < D)


@triton.jit
def _spread_kernel(
    x, row, source, out,
    P: tl.constexpr, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[row[t, k]] = x[t]; zeros in the rows without a source."""
    num_clear: tl.constexpr = (P * N + BR - 1) // BR
    if tl.program_id(0) < num_clear:
        _clear_rows(tl.program_id(0), source, out, P * N, D, BD, BR)
    else:
        t = (tl.program_id(0) - num_clear).to(tl.int64)  # over the groups too
        out += t // T * N * D
        for start in tl.range(0, D, BD):
            columns = start + tl.arange(0, BD)
            values = tl.load(x + t * D + columns, mask=columns < D, other=0)
            for k in tl.static_range(K):
                n = tl.load(row + t * K + k).to(tl.int64)
                exists = (n >= 0) & (n < N)
                tl.store(out + n * D + columns, values, mask=(columns < D) & exists)


@triton.jit
def _unpermute_grad_kernel(
    dout, y, weight, row, source, dy, dweight,
    P: tl.constexpr, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dy[row[t, k]] = weight[t, k] * dout[t] and dweight[t, k] = <dout[t], y[row[t, k]]>; zeros where there is none."""
    num_clear: tl.constexpr = (P * N + BR - 1) // BR
    if tl.program_id(0) < num_clear:
        _clear_rows(tl.program_id(0), source, dy, P * N, D, BD, BR)
    else:
        t = (tl.program_id(0) - num_clear).to(tl.int64)  # over the groups too
        y += t // T * N * D
        dy += t // T * N * D
        k = tl.arange(0, K_POW2)
        n = tl.load(row + t * K + k, mask=k < K, other=-1).to(tl.int64)
        exists = (n >= 0) & (n < N)
        scale = tl.load(weight + t * K + k, mask=exists, other=0).to(tl.float32)
        products = tl.zeros((K_POW2, BD), tl.float32)
        for start in tl.range(0, D, BD):
            columns = start + tl.arange(0, BD)
            where = n[:, None] * D + columns[None, :]
            live = exists[:, None] & (columns < D)[None, :]
            grad = tl.load(dout + t * D + columns, mask=columns < D, other=0).to(tl.float32)
            products += grad[None, :] * tl.load(y + where, mask=live, other=0).to(tl.float32)
            grads = scale[:, None] * grad[None, :]
            tl.store(dy + where, grads.to(dy.dtype.element_ty), mask=live)
        dots = tl.where(exists, tl.sum(products, 1), 0.0)
        tl.store(dweight + t * K + k, dots.to(dweight.dtype.element_ty), mask=k < K)


@triton.jit
def _count_of_block(
    ids, p, block, M: tl.constexpr, E: tl.constexpr, E_POW2: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """[E_POW2]: choices of each expert in a block of BM."""
    choice = block * BM + tl.arange(0, BM)
    expert = tl.load(ids + p * M + choice, mask=choice < M, other=-1)
    routed = (expert >= 0) & (expert < E)
    return tl.histogram(tl.where(routed, expert, 0).to(tl.int32), E_POW2, mask=routed)


@triton.jit
def _count_kernel(
    ids, counts, M: tl.constexpr, B: tl.constexpr, E: tl.constexpr, E_POW2: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """counts[p, b, e]: choices of expert e in block b of BM."""
    block = tl.program_id(0)
    p = tl.program_id(1).to(tl.int64)
    count = _count_of_block(ids, p, block, M, E, E_POW2, BM)
    e = tl.arange(0, E_POW2)
    tl.store(counts + (p * B + block) * E + e, count, mask=e < E)


@triton.jit
def _scan_kernel(
    counts, before, total, B: tl.constexpr, E: tl.constexpr, BB: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """before[p, b, e]: the counts of e summed over the blocks before b; total[p, e]: over all."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    p = tl.program_id(1).to(tl.int64)
    carry = tl.zeros((BE,), tl.int32)
    for start in tl.range(0, B, BB):
        b = start + tl.arange(0, BB)
        at = (p * B + b)[:, None] * E + e[None, :]
        live = (b < B)[:, None] & (e < E)[None, :]
        count = tl.load(counts + at, mask=live, other=0)
        tl.store(before + at, tl.cumsum(count, 0) - count + carry[None, :], mask=live)
        carry += tl.sum(count, 0)
    tl.store(total + p * E + e, carry, mask=e < E)


@triton.jit
def _place_kernel(
    ids, rank, before, total, row, source, sizes, tokens,
    M: tl.constexpr, B: tl.constexpr, E: tl.constexpr, E_POW2: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
    ALIGNMENT: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The rows of a block's choices; then, for the L experts of `rank`, what rows without a choice hold, and sizes.

    `tokens` is [P, E]. Without `before` and `total` each program counts for itself.
    """
    program = tl.program_id(0)
    p = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, E_POW2)
    if total is None:
        before_E = tl.zeros((E_POW2,), tl.int32)
        count_E = tl.zeros((E_POW2,), tl.int32)
        for block in tl.static_range(B):
            count = _count_of_block(ids, p, block, M, E, E_POW2, BM)
            before_E += tl.where(block < program, count, 0)
            count_E += count
    else:
        count_E = tl.load(total + p * E + e, mask=e < E, other=0)
    tl.store(tokens + p * E + e, count_E, mask=(e < E) & (program == 0))
    size_E = (count_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    end_E = tl.cumsum(size_E, 0)
    if L < E:  # rows are numbered anew at each rank
        first_E = e // L * L
        end_E -= tl.where(first_E > 0, tl.gather(end_E, tl.maximum(first_E - 1, 0), 0), 0)
    offset_E = end_E - size_E
    here = tl.load(rank + p) * L
    here_E = (e >= here) & (e < here + L)
    source += p * N
    if program < B:
        choice = program * BM + tl.arange(0, BM)
        expert = tl.load(ids + p * M + choice, mask=choice < M, other=-1)
        routed = (expert >= 0) & (expert < E)
        expert = tl.where(routed, expert, 0).to(tl.int32)
        place = tl.zeros((BM,), tl.int32)
        for start in tl.static_range(0, BM, BJ):
            other = program * BM + start + tl.arange(0, BJ)
            others = tl.load(ids + p * M + other, mask=other < M, other=-1)
            # The choices lie along the lanes, so that no lane asks another.
            earlier = (others[:, None] == expert[None, :]) & (other[:, None] < choice[None, :])
            place += tl.sum(earlier.to(tl.int32), 0)
        if before is None:
            first = tl.gather(before_E, expert, 0)
        else:
            first = tl.load(before + (p * B + program) * E + expert)
        n = tl.gather(offset_E, expert, 0) + first + place
        exists = routed & (n < N)
        tl.store(row + p * M + choice, tl.where(exists, n, -1), mask=choice < M)
        tl.store(source + n, choice, mask=exists & (expert >= here) & (expert < here + L))
    elif program < B + L:  # the padding of one expert
        mine = here + program - B
        end = min(tl.sum(tl.where(e == mine, end_E, 0)), N)
        start = tl.sum(tl.where(e == mine, offset_E + count_E, 0))
        for n in tl.range(start, end, BN):
            rows = n + tl.arange(0, BN)
            tl.store(source + rows, tl.full((BN,), -1, tl.int32), mask=rows < end)
        if program == B:
            held = tl.minimum(end_E, N) - tl.minimum(offset_E, N)
            tl.store(sizes + p * L + e - here, held, mask=here_E)
    else:  # padding rows
        rows = (program - B - L) * BN + tl.arange(0, BN)
        free = (rows >= tl.sum(tl.where(here_E, size_E, 0))) & (rows < N)
        tl.store(source + rows, tl.full((BN,), -1, tl.int32), mask=free)


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
SPREAD = Tiles(columns=4096, warps=4)
GRAD = Tiles(columns=1024, warps=4)
CLEAR = 64  # rows that a program looks at
BLOCK = 256  # choices whose ranks a program counts
FEW = 4  # blocks that each program counts for itself
ROWS = 1024  # rows that a program marks as padding


def spread(x, row, source, *, tiles: Tiles = SPREAD):
    """[P, T, D] -> [P, N, D]: each token at its rows."""
    (P, T, D), N, K = x.shape, source.shape[1], row.shape[2]
    tiles, words = fit(tiles, D), bits_of(x)
    out = launcher.triton_call(
        words, row, source,
        kernel=_spread_kernel,
        out_type=jax.ShapeDtypeStruct((P, N, D), words.dtype),
        grid=(triton.cdiv(P * N, CLEAR) + P * T,),
        num_warps=tiles.warps,
        P=P, T=T, N=N, K=K, D=D, BD=tiles.columns, BR=CLEAR,
    )  # fmt: skip
    return of_bits(out, x.dtype)


def unpermute_grad(dout, y, weight, row, source, *, tiles: Tiles = GRAD):
    """The cotangents of the rows, [P, N, D], and of the weights, float32[P, T, K]."""
    (P, T, D), N, K = dout.shape, y.shape[1], row.shape[2]
    K_POW2 = triton.next_power_of_2(K)
    # The products of all terms are held at once.
    columns = fit(Tiles(max(tiles.columns * 8 // max(8, K_POW2), 256), 1), D).columns
    warps = max(min(K_POW2 * columns // 1024, tiles.warps), 1)
    return launcher.triton_call(
        dout, y, weight, row, source,
        kernel=_unpermute_grad_kernel,
        out_type=(
            jax.ShapeDtypeStruct((P, N, D), y.dtype),
            jax.ShapeDtypeStruct((P, T, K), jnp.float32),
        ),
        grid=(triton.cdiv(P * N, CLEAR) + P * T,),
        num_warps=warps,
        P=P, T=T, N=N, K=K, K_POW2=K_POW2, D=D, BD=columns, BR=CLEAR,
    )  # fmt: skip


def count(ids, num_experts: int, block: int):
    """int[P, M] -> int32[P, B, E]: choices of each expert in blocks of so many."""
    (P, M), E = ids.shape, num_experts
    B = triton.cdiv(M, block)
    return launcher.triton_call(
        ids,
        kernel=_count_kernel, out_type=jax.ShapeDtypeStruct((P, B, E), jnp.int32), grid=(B, P), num_warps=4,
        M=M, B=B, E=E, E_POW2=triton.next_power_of_2(E), BM=block,
    )  # fmt: skip


def plan(topk_idx, rank, *, num_experts, num_rows, alignment, num_ranks):
    """int[P, T, K] -> row [P, T, K], source [P, N], and of the rank's experts tokens_per_expert, group_sizes, total and
    dropped."""
    topk_idx = wide_ids(topk_idx)
    (P, T, K), E, N = topk_idx.shape, num_experts, num_rows
    M, B, L, E_POW2 = T * K, triton.cdiv(T * K, BLOCK), E // num_ranks, triton.next_power_of_2(E)
    per_block, per_expert = (jax.ShapeDtypeStruct((P, *of, E), jnp.int32) for of in ((B,), ()))
    before = total = None
    if B > FEW:
        before, total = launcher.triton_call(
            count(topk_idx.reshape(P, M), E, BLOCK),
            kernel=_scan_kernel,
            out_type=(per_block, per_expert),
            grid=(triton.cdiv(E, 8), P), num_warps=8,
            B=B, E=E, BB=min(1024, triton.next_power_of_2(B)), BE=8,
        )  # fmt: skip
    row, source, sizes, tokens = launcher.triton_call(
        topk_idx, rank, before, total,
        kernel=_place_kernel,
        out_type=(
            jax.ShapeDtypeStruct((P, T, K), jnp.int32),
            jax.ShapeDtypeStruct((P, N), jnp.int32),
            jax.ShapeDtypeStruct((P, L), jnp.int32),
            per_expert,
        ),
        grid=(B + L + triton.cdiv(N, ROWS), P), num_warps=BLOCK // 128,
        M=M, B=B, E=E, E_POW2=E_POW2, L=L, N=N, ALIGNMENT=alignment, BM=BLOCK, BJ=32, BN=ROWS,
    )  # fmt: skip
    if num_ranks > 1:
        of_rank = jax.vmap(lambda x, r: jax.lax.dynamic_slice_in_dim(x, r * L, L))
        tokens = of_rank(tokens, rank)
    total = jnp.sum(-(-tokens // alignment) * alignment, axis=1, dtype=jnp.int32)
    # The first to be cut from a zone is its padding.
    dropped = jnp.sum(tokens - jnp.minimum(sizes, tokens), axis=1, dtype=jnp.int32)
    return row, source, tokens, sizes, total, dropped
