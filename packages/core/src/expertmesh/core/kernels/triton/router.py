"""The router on NVIDIA GPUs: a program holds all scores of some tokens in registers and takes the greatest K times.

Dimension key as in `router/route.py`; R tokens of a program.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.language.extra import libdevice

from expertmesh.core.kernels import launcher

LEAST = tl.constexpr(-(2**31))  # below every key
EPSILON = tl.constexpr(1e-20)  # of router/scores.py


@triton.jit
def _sigmoid(x):
    """To the bit as XLA computes it: scores that are equal there must be equal here."""
    return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))


@triton.jit
def _key(x):
    """int32 in the order of float32 x: 0.0 and -0.0 are equal, NaN of either sign comes after all others."""
    x = tl.where(x == 0, 0.0, x)
    x = tl.where(x != x, float("nan"), x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The number whose key it is."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _keep_groups(key, G: tl.constexpr, GROUP_TOPK: tl.constexpr, BEST: tl.constexpr):
    """The keys [R, E] of the best groups; LEAST elsewhere."""
    R: tl.constexpr = key.shape[0]
    SIZE: tl.constexpr = key.shape[1] // G
    key_RGS = key.reshape(R, G, SIZE)
    rest = key_RGS
    s = tl.arange(0, SIZE)[None, None, :]
    total = tl.zeros((R, G), tl.float32)
    for _ in tl.static_range(BEST):
        most = tl.max(rest, 2)
        at = tl.min(tl.where(rest == most[:, :, None], s, SIZE), 2)
        rest = tl.where(s == at[:, :, None], LEAST, rest)
        total += _value(most)
    group = _key(total)
    g = tl.arange(0, G)[None, :]
    kept = tl.zeros((R, G), tl.int32)
    for _ in tl.static_range(GROUP_TOPK):
        most = tl.max(group, 1)
        at = tl.min(tl.where(group == most[:, None], g, G), 1)
        group = tl.where(g == at[:, None], LEAST, group)
        kept = tl.where(g == at[:, None], 1, kept)
    key_RGS = tl.where(kept[:, :, None] != 0, key_RGS, LEAST)
    return key_RGS.reshape(R, G * SIZE)


@triton.jit
def _choose_exactly(key, K: tl.constexpr, K_POW2: tl.constexpr):
    """The indices of the K greatest keys [R, E] in descending order, of equal ones the lower first: [R, K_POW2]."""
    R: tl.constexpr = key.shape[0]
    E: tl.constexpr = key.shape[1]
    e = tl.arange(0, E)[None, :]
    k = tl.arange(0, K_POW2)[None, :]
    chosen = tl.zeros((R, K_POW2), tl.int32)
    for i in tl.static_range(K):
        most = tl.max(key, 1)
        at = tl.min(tl.where(key == most[:, None], e, E), 1)
        key = tl.where(e == at[:, None], LEAST, key)
        chosen = tl.where(k == i, at[:, None], chosen)
    return chosen


@triton.jit
def _choose_fast(key, K: tl.constexpr, K_POW2: tl.constexpr):
    """The same from the keys' upper bits, with the index in the lower; and whether the lower bits may matter."""
    R: tl.constexpr = key.shape[0]
    E: tl.constexpr = key.shape[1]
    LOW: tl.constexpr = E - 1
    packed = (key & ~LOW) | (LOW - tl.arange(0, E)[None, :])
    k = tl.arange(0, K_POW2)[None, :]
    chosen = tl.zeros((R, K_POW2), tl.int32)
    last = tl.full((R,), 2**31 - 1, tl.int32)
    doubtful = tl.zeros((R,), tl.int32)
    for i in tl.static_range(K + 1):
        most = tl.max(packed, 1)
        packed = tl.where(packed == most[:, None], LEAST, packed)
        doubtful |= ((most ^ last) & ~LOW) == 0
        last = most
        chosen = tl.where(k == i, LOW - (most & LOW)[:, None], chosen)
    return chosen, tl.max(doubtful, 0) != 0


@triton.jit
def _choose_kernel(
    logits, bias, mask, topk_idx, weights,
    T: tl.constexpr, E: tl.constexpr, E_POW2: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    SCORE: tl.constexpr, PRE: tl.constexpr, DIVIDES: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr,
    G: tl.constexpr, GROUP_TOPK: tl.constexpr, BEST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    e = tl.arange(0, E_POW2)[None, :]
    k = tl.arange(0, K_POW2)[None, :]
    inside = (t < T)[:, None] & (e < E)
    x = tl.load(logits + t[:, None] * E + e, mask=inside, other=float("-inf")).to(tl.float32)
    score = x
    if PRE:
        shift = tl.max(x, 1)[:, None]
        total = tl.sum(libdevice.exp(x - shift), 1)[:, None]
        score = tl.div_rn(libdevice.exp(x - shift), total)
    elif SCORE != "softmax":
        score = _sigmoid(x)
    if BIASED:
        score += tl.load(bias + e, mask=e < E, other=0).to(tl.float32)
    key = tl.where(e < E, _key(score), LEAST)
    if GROUP_TOPK:
        key = _keep_groups(key, G, GROUP_TOPK, BEST)

    chosen, doubtful = _choose_fast(key, K, K_POW2)
    if doubtful:
        chosen = _choose_exactly(key, K, K_POW2)

    # The logits at the indices are read again: that is cheaper than K more selections.
    live = (t < T)[:, None] & (k < K)
    picked = tl.load(logits + t[:, None] * E + chosen, mask=live, other=float("-inf"))
    picked = picked.to(tl.float32)
    if PRE:
        weight = tl.div_rn(libdevice.exp(picked - shift), total)
    elif SCORE == "softmax":
        shifted = libdevice.exp(picked - tl.max(picked, 1)[:, None])
        weight = tl.div_rn(shifted, tl.sum(shifted, 1)[:, None])
    else:
        weight = tl.where(live, _sigmoid(picked), 0.0)
        if DIVIDES:
            weight = tl.div_rn(weight, (tl.sum(weight, 1) + EPSILON)[:, None])
    if MASKED:
        routed = tl.load(mask + t, mask=t < T, other=0)[:, None] != 0
        chosen = tl.where(routed, chosen, -1)
        weight = tl.where(routed, weight, 0.0)
    tl.store(topk_idx + t[:, None] * K + k, chosen, mask=live)
    tl.store(weights + t[:, None] * K + k, weight, mask=live)


@triton.jit
def _grad_kernel(
    logits, topk_idx, weights, d_weights, d_logits,
    T: tl.constexpr, E: tl.constexpr, E_POW2: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    SCORE: tl.constexpr, PRE: tl.constexpr, DIVIDES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    e = tl.arange(0, E_POW2)[None, :]
    k = tl.arange(0, K_POW2)[None, :]
    at = t[:, None] * K + k
    live = (t < T)[:, None] & (k < K)
    chosen = tl.load(topk_idx + at, mask=live, other=-1)
    routed = chosen >= 0
    weight = tl.load(weights + at, mask=live, other=0)
    d_weight = tl.load(d_weights + at, mask=routed, other=0)
    mean = tl.sum(d_weight * weight, 1)[:, None]
    if PRE:
        d_chosen = d_weight
    elif SCORE == "softmax":
        d_chosen = weight * (d_weight - mean)
    else:
        picked = tl.load(logits + t[:, None] * E + chosen, mask=routed, other=0).to(tl.float32)
        s = _sigmoid(picked)
        slope = s * _sigmoid(-picked)
        if DIVIDES:
            total = tl.sum(tl.where(routed, s, 0.0), 1)[:, None]
            d_chosen = (d_weight - mean) * (slope / (total + EPSILON))
        else:
            d_chosen = d_weight * slope
    d_chosen = tl.where(routed, d_chosen, 0.0)

    inside = (t < T)[:, None] & (e < E)
    if PRE:
        grad = tl.zeros((R, E_POW2), tl.float32)
        for i in tl.static_range(K):
            index = tl.sum(tl.where(k == i, chosen, 0), 1)[:, None]
            grad += tl.where(e == index, tl.sum(tl.where(k == i, d_chosen, 0.0), 1)[:, None], 0.0)
        x = tl.load(logits + t[:, None] * E + e, mask=inside, other=float("-inf")).to(tl.float32)
        p = libdevice.exp(x - tl.max(x, 1)[:, None])
        grad = p / tl.sum(p, 1)[:, None] * (grad - mean)
        grad = tl.where(tl.max(chosen, 1)[:, None] >= 0, grad, 0.0)
        tl.store(d_logits + t[:, None] * E + e, grad, mask=inside)
    else:
        tl.store(d_logits + t[:, None] * E + e, tl.zeros((R, E_POW2), tl.float32), mask=inside)
        # Choices that repeat, as replayed ones may, all store their sum.
        same = chosen[:, :, None] == chosen[:, None, :]
        total = tl.sum(tl.where(same, d_chosen[:, None, :], 0.0), 2)
        tl.debug_barrier()  # the zeros are there
        tl.store(d_logits + t[:, None] * E + chosen, total, mask=routed)


# NVIDIA H200, 2026-11-21: docs/dev/kernels.md says what was measured.
TOKENS = 4  # of a program, one warp; fewer where they have more than 256 experts


def choose(logits, bias, mask, topk_idx=None, *, config):
    """[..., E] -> int32 and float32 [..., K]; bias: float[E] or None, mask: bool[...] or None; no choices are given."""
    del topk_idx
    *leading, E = logits.shape
    T, K, constants = logits.size // E, config.top_k, _constants(E, config)
    idx, weights = launcher.triton_call(
        # What is not given is not read.
        logits, logits if bias is None else bias, logits if mask is None else mask.astype(jnp.uint8),
        kernel=_choose_kernel,
        out_type=(
            jax.ShapeDtypeStruct((T, K), jnp.int32),
            jax.ShapeDtypeStruct((T, K), jnp.float32),
        ),
        grid=(triton.cdiv(T, constants["R"]),),
        num_warps=1,
        T=T, BIASED=bias is not None, MASKED=mask is not None,
        G=config.num_groups or 1, GROUP_TOPK=config.group_topk or 0, BEST=config.best_of_group,
        **constants,
    )  # fmt: skip
    return idx.reshape(*leading, K), weights.reshape(*leading, K)


def weigh_grad(logits, topk_idx, weights, d_weights, *, config):
    """The cotangent of the logits, float32[..., E]."""
    E = logits.shape[-1]
    T, constants = logits.size // E, _constants(E, config)
    out = launcher.triton_call(
        logits, topk_idx, weights, d_weights,
        kernel=_grad_kernel,
        out_type=jax.ShapeDtypeStruct((T, E), jnp.float32),
        grid=(triton.cdiv(T, constants["R"]),),
        num_warps=1,
        T=T, **constants,
    )  # fmt: skip
    return out.reshape(logits.shape)


def _constants(E, config) -> dict:
    E_POW2, K = triton.next_power_of_2(E), config.top_k
    return {
        "E": E, "E_POW2": E_POW2, "K": K, "K_POW2": triton.next_power_of_2(K),
        "SCORE": config.score_function, "PRE": config.use_pre_softmax, "DIVIDES": config.divides,
        "R": max(TOKENS * 256 // max(E_POW2, 256), 1),
    }  # fmt: skip
