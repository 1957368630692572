"""Sums over tokens on NVIDIA GPUs: each program adds up the rows of some tokens, then XLA adds up the programs' sums.

Each order of additions is fixed. Dimension key as in `router/balance.py`; R tokens of a program at a time.
"""

from math import prod

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.triton.permute import count
from expertmesh.core.kernels.triton.router import EPSILON
from expertmesh.core.operands import of_live, wide_ids


@triton.jit
def _load_rows(
    logits, first, T: tl.constexpr, E: tl.constexpr, R: tl.constexpr, E_POW2: tl.constexpr
):
    """Rows [R, E_POW2] in float32, -inf beyond E; and which of them there are."""
    t = first + tl.arange(0, R)
    e = tl.arange(0, E_POW2)
    live = t < T
    where = t.to(tl.int64)[:, None] * E + e[None, :]
    x = tl.load(logits + where, mask=live[:, None] & (e < E)[None, :], other=float("-inf"))
    return x.to(tl.float32), t, live


@triton.jit
def _probs_kernel(
    logits, token_mask, sums,
    T: tl.constexpr, E: tl.constexpr, SIGMOID: tl.constexpr, MASKED: tl.constexpr,
    PROGRAMS: tl.constexpr, R: tl.constexpr, E_POW2: tl.constexpr,
):  # fmt: skip
    """sums[program, e] = the sum of q over this program's tokens, by select where they are masked."""
    total = tl.zeros((R, E_POW2), tl.float32)
    for first in tl.range(tl.program_id(0) * R, T, PROGRAMS * R):
        x, t, live = _load_rows(logits, first, T, E, R, E_POW2)
        if SIGMOID:
            s = 1.0 / (1.0 + tl.exp(-x))  # 0 at -inf
            q = s / (tl.sum(s, 1) + EPSILON)[:, None]
        else:
            s = tl.exp(x - tl.max(x, 1)[:, None])
            q = s / tl.sum(s, 1)[:, None]
        if MASKED:
            live = live & (tl.load(token_mask + t, mask=live, other=0) != 0)
        total += tl.where(live[:, None], q, 0.0)
    e = tl.arange(0, E_POW2)
    tl.store(sums + tl.program_id(0) * E + e, tl.sum(total, 0), mask=e < E)


@triton.jit
def _z_kernel(
    logits, token_mask, sums,
    T: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
    PROGRAMS: tl.constexpr, R: tl.constexpr, E_POW2: tl.constexpr,
):  # fmt: skip
    """sums[program] = the sum of logsumexp(logits)^2 over this program's tokens."""
    total = tl.zeros((R,), tl.float32)
    for first in tl.range(tl.program_id(0) * R, T, PROGRAMS * R):
        x, t, live = _load_rows(logits, first, T, E, R, E_POW2)
        most = tl.max(x, 1)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        lse = most + tl.log(tl.sum(tl.exp(x - most[:, None]), 1))
        if MASKED:
            live = live & (tl.load(token_mask + t, mask=live, other=0) != 0)
        total += tl.where(live, lse * lse, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


MAX_PROGRAMS = 1056  # eight for each multiprocessor of an H200
ELEMENTS = 2048  # of a program's rows at a time


def weighted_sum(logits, weight, token_mask=None, *, quantity):
    """<w, the sum of f over tokens>, float32[]."""
    return (sums(logits, token_mask, quantity=quantity) * weight).sum()


def sums(logits, token_mask=None, *, quantity):
    """The sum of f over tokens, float32[F]."""
    E = logits.shape[-1]
    T, E_POW2 = logits.size // E, triton.next_power_of_2(E)
    R = max(ELEMENTS // E_POW2, 1)
    programs = min(triton.cdiv(T, R), MAX_PROGRAMS)
    score_function = getattr(quantity, "score_function", None)  # the squared logsumexp has none
    scores = score_function is not None
    rows = logits.reshape(T, E)
    return launcher.triton_call(
        # What is not given is not read.
        rows, rows if token_mask is None else token_mask.reshape(T).astype(jnp.uint8),
        kernel=_probs_kernel if scores else _z_kernel,
        out_type=jax.ShapeDtypeStruct((programs, E if scores else 1), jnp.float32),
        grid=(programs,),
        num_warps=4,
        T=T, E=E, E_POW2=E_POW2, R=R, PROGRAMS=programs, MASKED=token_mask is not None,
        **(dict(SIGMOID=score_function == "sigmoid") if scores else {}),
    ).sum(0)  # fmt: skip


COUNTED = 1024  # choices of a program


def counts(topk_idx, token_mask=None, *, num_experts, sequence_dims):
    """n of each sequence, int32[..., E]."""
    sequences = topk_idx.shape[:sequence_dims]
    rows = of_live(wide_ids(topk_idx), token_mask, -1).reshape(prod(sequences), -1)
    per_block = count(rows, num_experts, COUNTED)
    return per_block.sum(1, dtype=jnp.int32).reshape(*sequences, num_experts)
