"""At least one OpCase per public op of core."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from core import quantize_oracle
from core.router import router_oracle
from expertmesh.core import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    RouterConfig,
    dense,
    dequantize,
    expert_counts,
    from_routing_map,
    gated_activation,
    gemm,
    grouped_dense,
    grouped_gemm,
    grouped_quantize,
    load_balance_loss,
    permute,
    plan_permute,
    plan_permute_map,
    probs_to_topk_weights,
    quantize,
    required_bias_histogram,
    route,
    router_statistics,
    router_z_loss,
    sequence_balance_loss,
    sort_chunks,
    to_routing_map,
    topk_weights_to_probs,
    unpermute,
)
from expertmesh.core.testing import OpCase, magnitudes


def _gemm_operands(rng, size, dtype):
    batch, seq, k, n = {"regular": (8, 8, 16, 16), "odd": (8, 8, 16, 24), "empty": (0, 8, 16, 8)}[
        size
    ]
    x, w, bias = (
        magnitudes(rng, (batch, seq, k), dtype),
        magnitudes(rng, (k, n), dtype),
        rng.normal(size=n),
    )
    return x, w, bias.astype(x.dtype)


def _gemm_oracle(x, w, bias):
    return np.einsum("bsk,kn->bsn", x, w) + bias


GEMM = OpCase(
    name="gemm",
    function=gemm,
    operands=_gemm_operands,
    oracle=_gemm_oracle,
    wrt=(0, 1, 2),
    layouts={
        "one": (P("b"), P("b"), P()),
        "several": (P("a", "b"), P(None, "a"), P("b")),
        "tuple": (P(("a", "b")), P(("a", "b")), P()),
    },
)

GEMM_TOKENS = OpCase(
    name="gemm_replicated_weight",
    function=gemm,
    operands=_gemm_operands,
    oracle=_gemm_oracle,
    wrt=(0, 1, 2),
    layouts={
        "one": (P("a"), P(), P()),
        "several": (P("a", "b"), P(), P()),
        "tuple": (P(("a", "b")), P(), P()),
    },
    independent={"one": (P("a"),), "several": (P("a", "b"),), "tuple": (P(("a", "b")),)},
)


def _grouped_operands(rng, size, dtype):
    participants, rows, k, n, groups = (
        8,
        *{"regular": (24, 16, 16, 4), "odd": (37, 11, 13, 3), "empty": (0, 16, 8, 2)}[size],
    )
    live = rng.integers(0, rows + 1, size=participants)
    sizes = np.stack([rng.multinomial(m, [1 / groups] * groups) for m in live]).astype(np.int32)
    sizes[0, :] = 0  # a participant without rows
    sizes[:, 1] = 0  # a group without rows
    lhs = magnitudes(rng, (participants, rows, k), dtype)
    rhs = magnitudes(rng, (groups, k, 2, n), dtype)
    return lhs, rhs, sizes, rng.normal(size=(groups, 2, n)).astype(lhs.dtype)


def _grouped_oracle(lhs, rhs, sizes, bias):
    out = np.zeros((*lhs.shape[:2], *rhs.shape[2:]))
    for p in range(lhs.shape[0]):
        experts = np.repeat(np.arange(sizes.shape[1]), sizes[p])
        for row, expert in enumerate(experts):
            out[p, row] = np.tensordot(lhs[p, row], rhs[expert], 1) + bias[expert]
    return out


_PARTICIPANTS = {"one": (P("b"),), "several": (P("a"),), "tuple": (P(("a", "b")),)}


def _grouped_poison(lhs, rhs, sizes, bias):
    lhs = lhs.copy()
    for p in range(lhs.shape[0]):
        lhs[p, sizes[p].sum() :] = np.nan
    return lhs, rhs, sizes, bias


GROUPED_GEMM = OpCase(
    name="grouped_gemm",
    function=grouped_gemm,
    operands=_grouped_operands,
    oracle=_grouped_oracle,
    wrt=(0, 1, 3),
    layouts={
        "one": (P("b"), P(), P("b"), P()),
        "several": (P("a"), P(), P("a"), P()),
        "tuple": (P(("a", "b")), P(), P(("a", "b")), P()),
    },
    independent=_PARTICIPANTS,
    poison=_grouped_poison,
)


def _grouped_ep_operands(rng, size, dtype):
    """The weights of 8 participants' experts: E = 8 G."""
    lhs, rhs, sizes, bias = _grouped_operands(rng, size, dtype)
    rhs = magnitudes(rng, (8 * sizes.shape[1], *rhs.shape[1:]), dtype)
    return lhs, rhs, sizes, rng.normal(size=(rhs.shape[0], *bias.shape[1:])).astype(lhs.dtype)


def _grouped_ep_oracle(lhs, rhs, sizes, bias):
    parts = [
        _grouped_oracle(lhs[p : p + 1], r, sizes[p : p + 1], b)
        for p, (r, b) in enumerate(zip(np.split(rhs, 8), np.split(bias, 8), strict=True))
    ]
    return np.concatenate(parts)


GROUPED_GEMM_EP = OpCase(
    name="grouped_gemm_expert_sharded",
    function=grouped_gemm,
    operands=_grouped_ep_operands,
    oracle=_grouped_ep_oracle,
    wrt=(0, 1, 3),
    layouts={
        "one": (P("b"), P("b"), P("b"), P("b")),
        "several": (P(("a", "b")), P("b"), P(("a", "b")), P("b")),
        "tuple": (P(("a", "b")), P(("a", "b")), P(("a", "b")), P(("a", "b"))),
    },
    independent={"one": (P("b"),), "tuple": (P(("a", "b")),)},
    poison=_grouped_poison,
)


def _exact(rng, shape, dtype):
    """Integers times powers of 2 (one per row), which 8 bits and a scale that is a power of 2 hold exactly."""
    scale = 2.0 ** rng.integers(-3, 4, size=(*shape[:-1], 1))
    return (rng.integers(-8, 9, size=shape) * scale).astype(jnp.dtype(dtype))


def _dense_operands(rng, size, dtype):
    batch, seq, k, n = {
        "regular": (8, 8, 256, 32),
        "odd": (8, 8, 256, 48),
        "empty": (0, 8, 256, 16),
    }[size]
    w = _exact(rng, (n, k), dtype).T  # a scale per column: blocks lie along K
    return _exact(rng, (batch, seq, k), dtype), w, rng.normal(size=n).astype(dtype)


DENSE = OpCase(
    name="dense",
    function=partial(dense, recipe="mxfp8"),
    operands=_dense_operands,
    oracle=_gemm_oracle,
    layouts=GEMM.layouts,
)


def _grouped_dense_operands(rng, size, dtype):
    lhs, rhs, sizes, bias = _grouped_operands(rng, size, dtype)
    n = 16 if size == "empty" else 32
    lhs = _exact(rng, (*lhs.shape[:2], 256), dtype)
    rhs = np.moveaxis(_exact(rng, (rhs.shape[0], 2, n, 256), dtype), -1, 1)
    return lhs, rhs, sizes, rng.normal(size=(rhs.shape[0], 2, n)).astype(lhs.dtype)


GROUPED_DENSE = OpCase(
    name="grouped_dense",
    function=partial(grouped_dense, recipe="mxfp8"),
    operands=_grouped_dense_operands,
    oracle=_grouped_oracle,
    layouts=GROUPED_GEMM.layouts,
    independent=GROUPED_GEMM.independent,
    poison=_grouped_poison,
)

NUM_EXPERTS, ALIGNMENT = 5, 4


def _tokens(size):
    """Groups, tokens, choices, width."""
    return {"regular": (8, 16, 2, 16), "odd": (8, 13, 3, 24), "empty": (8, 0, 2, 8)}[size]


def _choices(rng, groups, tokens, top_k):
    """Expert ids, some of them -1 and some out of range: neither is routed."""
    return rng.integers(-1, NUM_EXPERTS + 1, size=(groups, tokens, top_k)).astype(np.int32)


def _rows_of(idx, num_rows):
    """[P, N] choice of each row, -1 for padding: experts, then tokens, then k."""
    source = np.full((idx.shape[0], num_rows), -1)
    for p in range(idx.shape[0]):
        row = 0
        for expert in range(NUM_EXPERTS):
            chosen = np.flatnonzero(idx[p].ravel() == expert)
            source[p, row : row + len(chosen)] = chosen
            row += -(-len(chosen) // ALIGNMENT) * ALIGNMENT
    return source


def _plan(idx):
    return plan_permute(idx, num_experts=NUM_EXPERTS, alignment=ALIGNMENT)


def _num_rows(idx):
    choices = idx.shape[1] * idx.shape[2]
    return (choices + NUM_EXPERTS * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def _permute_operands(rng, size, dtype):
    groups, tokens, top_k, width = _tokens(size)
    return magnitudes(rng, (groups, tokens, width), dtype), _choices(rng, groups, tokens, top_k)


def _permute_oracle(x, idx):
    source = _rows_of(idx, _num_rows(idx))
    out = np.zeros((*source.shape, x.shape[2]))
    for p, n in zip(*np.nonzero(source >= 0), strict=True):
        out[p, n] = x[p, source[p, n] // idx.shape[2]]
    return out


_BY_GROUP = {
    "one": (P("b"), P("b"), P("b")),
    "several": (P("a"), P("a"), P("a")),
    "tuple": (P(("a", "b")),) * 3,
}

PERMUTE = OpCase(
    name="permute",
    function=lambda x, idx: permute(x, _plan(idx)),
    operands=_permute_operands,
    oracle=_permute_oracle,
    wrt=(0,),
    layouts={
        **{name: specs[:2] for name, specs in _BY_GROUP.items()},
        "several": (P("a", None, "b"), P("a")),
    },
    independent={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
)


def _unpermute_operands(rng, size, dtype):
    groups, tokens, top_k, width = _tokens(size)
    idx = _choices(rng, groups, tokens, top_k)
    weights = rng.normal(size=idx.shape).astype(np.float32)
    return magnitudes(rng, (groups, _num_rows(idx), width), dtype), idx, weights


def _unpermute_oracle(y, idx, weights):
    source = _rows_of(idx, y.shape[1])
    out = np.zeros((*idx.shape[:2], y.shape[2]))
    for p, n in zip(*np.nonzero(source >= 0), strict=True):
        token, k = divmod(source[p, n], idx.shape[2])
        out[p, token] += weights[p, token, k] * y[p, n]
    return out


def _unpermute_poison(y, idx, weights):
    y, weights = y.copy(), weights.copy()
    y[_rows_of(idx, y.shape[1]) < 0] = np.nan
    weights[(idx < 0) | (idx >= NUM_EXPERTS)] = np.nan
    return y, idx, weights


UNPERMUTE = OpCase(
    name="unpermute",
    function=lambda y, idx, weights: unpermute(y, _plan(idx), weights),
    operands=_unpermute_operands,
    oracle=_unpermute_oracle,
    wrt=(0, 2),
    layouts=_BY_GROUP,
    independent={name: (specs[0],) for name, specs in _BY_GROUP.items()},
    poison=_unpermute_poison,
)


def _map(rng, groups, tokens):
    """Any number of experts for each token, none and all too."""
    return rng.random((groups, tokens, NUM_EXPERTS)) < rng.random((groups, tokens, 1))


def _entries_of(routed):
    """Each row's (group, row, token, expert); padding has none."""
    for p in range(routed.shape[0]):
        row = 0
        for expert in range(NUM_EXPERTS):
            chosen = np.flatnonzero(routed[p, :, expert])
            for i, token in enumerate(chosen):
                yield p, row + i, token, expert
            row += -(-len(chosen) // ALIGNMENT) * ALIGNMENT


def _permute_map_operands(rng, size, dtype):
    groups, tokens, _, width = _tokens(size)
    return magnitudes(rng, (groups, tokens, width), dtype), _map(rng, groups, tokens)


def _permute_map_oracle(x, routed):
    out = np.zeros((x.shape[0], _num_rows(routed), x.shape[2]))
    for p, n, token, _ in _entries_of(routed):
        out[p, n] = x[p, token]
    return out


def _plan_map(routed):
    return plan_permute_map(routed, alignment=ALIGNMENT)


PERMUTE_MAP = OpCase(
    name="permute_map",
    function=lambda x, routed: permute(x, _plan_map(routed)),
    operands=_permute_map_operands,
    oracle=_permute_map_oracle,
    wrt=(0,),
    layouts={
        **{name: specs[:2] for name, specs in _BY_GROUP.items()},
        "several": (P("a", None, "b"), P("a")),
    },
    independent={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
)


def _unpermute_map_operands(rng, size, dtype):
    groups, tokens, _, width = _tokens(size)
    routed = _map(rng, groups, tokens)
    probs = rng.normal(size=routed.shape).astype(np.float32)
    return magnitudes(rng, (groups, _num_rows(routed), width), dtype), routed, probs


def _unpermute_map_oracle(y, routed, probs):
    out = np.zeros((*routed.shape[:2], y.shape[2]))
    for p, n, token, expert in _entries_of(routed):
        out[p, token] += probs[p, token, expert] * y[p, n]
    return out


def _unpermute_map_poison(y, routed, probs):
    poisoned = np.full_like(y, np.nan)
    for p, n, _, _ in _entries_of(routed):
        poisoned[p, n] = y[p, n]
    return poisoned, routed, np.where(routed, probs, np.float32("nan"))


UNPERMUTE_MAP = OpCase(
    name="unpermute_map",
    function=lambda y, routed, probs: unpermute(y, _plan_map(routed), probs),
    operands=_unpermute_map_operands,
    oracle=_unpermute_map_oracle,
    wrt=(0, 2),
    layouts=_BY_GROUP,
    independent={name: (specs[0],) for name, specs in _BY_GROUP.items()},
    poison=_unpermute_map_poison,
)


def _chunk_operands(rng, size, dtype):
    groups, rows, width = {"regular": (8, 24, 16), "odd": (8, 37, 24), "empty": (8, 0, 8)}[size]
    sizes = np.stack([rng.multinomial(rows, [1 / 6] * 6) for _ in range(groups)])
    orders = rng.permuted(np.broadcast_to(np.arange(5), (groups, 5)), axis=1)
    x = magnitudes(rng, (groups, rows, width), dtype)
    return x, sizes[:, :5].astype(np.int32), orders.astype(np.int32)  # the sixth: beyond the chunks


def _chunk_oracle(x, sizes, orders):
    out = x.copy()
    for p in range(x.shape[0]):
        parts = np.split(x[p], np.cumsum(sizes[p]))
        out[p] = np.concatenate([*(parts[c] for c in orders[p]), parts[-1]])
    return out


SORT_CHUNKS = OpCase(
    name="sort_chunks",
    function=sort_chunks,
    operands=_chunk_operands,
    oracle=_chunk_oracle,
    wrt=(0,),
    layouts={**_BY_GROUP, "several": (P("a", None, "b"), P("a"), P("a"))},
    independent={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
)


def _map_weights(probs, routed):
    """Weights of the first two experts of each token, doubled on the way back to all experts."""
    idx = from_routing_map(routed, NUM_EXPERTS, 2)
    weights = probs_to_topk_weights(probs, idx)
    return topk_weights_to_probs(weights + weights, idx, num_experts=NUM_EXPERTS)


def _map_weights_operands(rng, size, dtype):
    groups, tokens, *_ = _tokens(size)
    return magnitudes(rng, (groups, tokens, NUM_EXPERTS), dtype), _map(rng, groups, tokens)


def _map_weights_poison(probs, routed):
    kept = routed & (np.cumsum(routed, axis=-1) <= 2)
    return np.where(kept, probs, np.asarray(np.nan, probs.dtype)), routed


MAP_WEIGHTS = OpCase(
    name="routing_map_weights",
    function=_map_weights,
    operands=_map_weights_operands,
    oracle=lambda probs, routed: 2 * probs * (routed & (np.cumsum(routed, axis=-1) <= 2)),
    wrt=(0,),
    layouts={name: specs[:2] for name, specs in _BY_GROUP.items()},
    independent={name: specs[:1] for name, specs in _BY_GROUP.items()},
    poison=_map_weights_poison,
)

_LEADING = {"one": P("b"), "several": P("a", "b"), "tuple": P(("a", "b"))}


def _logits(rng, size, dtype):
    """Distinct within a token, also in bfloat16, so that a small step changes no choice; tokens differ in scale."""
    batch, seq, experts = {"regular": (8, 8, 16), "odd": (8, 8, 11), "empty": (8, 0, 8)}[size]
    ranks = rng.permuted(np.broadcast_to(np.arange(experts), (batch, seq, experts)), axis=-1)
    scale = 2.0 ** rng.integers(-4, 0, size=(batch, seq, 1))
    return np.asarray((ranks - experts // 2) * scale).astype(jnp.dtype(dtype))


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _route_case(name, use_pre_softmax):
    config = RouterConfig(top_k=3, use_pre_softmax=use_pre_softmax)

    def oracle(logits):
        idx = np.argsort(-logits, axis=-1, kind="stable")[..., :3]
        scores = _softmax(logits) if use_pre_softmax else logits
        chosen = np.take_along_axis(scores, idx, axis=-1)
        return chosen if use_pre_softmax else _softmax(chosen)

    return OpCase(
        name=name,
        function=lambda logits: route(logits, config).topk_weights,
        operands=lambda rng, size, dtype: (_logits(rng, size, dtype),),
        oracle=oracle,
        wrt=(0,),
        layouts={name: (spec,) for name, spec in _LEADING.items()},
        independent={name: (spec,) for name, spec in _LEADING.items()},
    )


ROUTE_CHOICES = OpCase(
    name="route_choices",
    function=lambda logits: route(logits, RouterConfig(top_k=3)).topk_idx,
    operands=lambda rng, size, dtype: (_logits(rng, size, dtype),),
    oracle=lambda logits: router_oracle.route(logits, RouterConfig(top_k=3))[0],
    layouts={name: (spec,) for name, spec in _LEADING.items()},
    independent={name: (spec,) for name, spec in _LEADING.items()},
)


def _balance_operands(rng, size, dtype):
    logits = _logits(rng, size, dtype)
    idx = rng.integers(-1, logits.shape[-1], size=(*logits.shape[:-1], 2)).astype(np.int32)
    return logits, idx


def _balance_oracle(logits, idx):
    tokens, experts = max(logits[..., 0].size, 1), logits.shape[-1]
    probs = _softmax(logits).reshape(-1, experts) if logits.size else np.zeros((1, experts))
    counts = np.array([(idx == e).sum() for e in range(experts)])
    return np.float64(0.5 * experts / (2 * tokens**2) * (probs.sum(0) * counts).sum())


LOAD_BALANCE = OpCase(
    name="load_balance_loss",
    function=lambda logits, idx: load_balance_loss(logits, idx, coeff=0.5),
    operands=_balance_operands,
    oracle=_balance_oracle,
    wrt=(0,),
    layouts={name: (spec, spec) for name, spec in _LEADING.items()},
)


COUNTS = OpCase(
    name="expert_counts",
    function=lambda idx: expert_counts(idx, num_experts=8),
    operands=lambda rng, size, dtype: _balance_operands(rng, size, dtype)[1:],
    oracle=lambda idx: np.array([(idx == e).sum() for e in range(8)], np.int32),
    layouts={name: (spec,) for name, spec in _LEADING.items()},
)


def _z_oracle(logits):
    if not logits.size:
        return np.float64(0)
    top = logits.max(axis=-1)
    lse = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))
    return 0.5 * np.mean(lse**2)


Z_LOSS = OpCase(
    name="router_z_loss",
    function=lambda logits: router_z_loss(logits, coeff=0.5),
    operands=lambda rng, size, dtype: (_logits(rng, size, dtype),),
    oracle=_z_oracle,
    wrt=(0,),
    layouts={name: (spec,) for name, spec in _LEADING.items()},
)


def _pairs(rng, size, dtype):
    groups, rows, width = {"regular": (8, 8, 16), "odd": (8, 7, 11), "empty": (8, 0, 8)}[size]
    return (np.asarray(rng.normal(size=(groups, rows, 2, width)) * 2).astype(dtype),)


ACTIVATION = OpCase(
    name="gated_activation",
    function=lambda h: gated_activation(h, activation="silu"),
    operands=_pairs,
    oracle=lambda h: h[..., 0, :] / (1 + np.exp(-h[..., 0, :])) * h[..., 1, :],
    wrt=(0,),
    layouts={"one": (P("b"),), "several": (P("a", None, None),), "tuple": (P(("a", "b")),)},
    independent={"one": (P("b"),), "several": (P("a"),), "tuple": (P(("a", "b")),)},
)


def _distinct(rng, size, dtype):
    """Logits whose scores (and sums of scores) stay apart under a small step and under rounding."""
    batch, seq, experts = {"regular": (8, 8, 16), "odd": (8, 8, 12), "empty": (8, 0, 8)}[size]
    ranks = rng.permuted(np.broadcast_to(np.arange(experts), (batch, seq, experts)), axis=-1)
    return np.asarray((ranks - experts // 2) * 0.5).astype(jnp.dtype(dtype))


def _bias_of(logits):
    return np.linspace(-0.03, 0.03, logits.shape[-1]).astype(np.float32)


def _mask_of(rng, logits):
    return rng.random(logits.shape[:-1]) < 0.7


_SIGMOID = RouterConfig(top_k=3, score_function="sigmoid", scaling_factor=2.5)
_GROUPS = RouterConfig(top_k=4, score_function="sqrtsoftplus", num_groups=4, group_topk=2)


def _route_operands(rng, size, dtype):
    logits = _distinct(rng, size, dtype)
    return logits, _bias_of(logits), _mask_of(rng, logits)


def _route_mask_poison(logits, bias, mask):
    return np.where(mask[..., None], logits, np.nan).astype(logits.dtype), bias, mask


def _three(first, *rest):
    """Layouts by name: the tokens of the first operand, then the other operands' own."""
    return {name: (spec, *(r if r is not None else spec for r in rest)) for name, spec in first}


def _biased_case(name, config):
    return OpCase(
        name=name,
        function=lambda logits, bias, mask: (
            route(logits, config, expert_bias=bias, token_mask=mask).topk_weights
        ),
        operands=_route_operands,
        oracle=lambda logits, bias, mask: router_oracle.route(logits, config, bias, mask)[1],
        wrt=(0,),
        layouts=_three(_LEADING.items(), P(), None),
        independent={name: (spec,) for name, spec in _LEADING.items()},
        poison=_route_mask_poison,
    )


def _replay_operands(rng, size, dtype):
    logits = _distinct(rng, size, dtype)
    shape = (*logits.shape[:-1], 3)
    return logits, rng.integers(-1, logits.shape[-1] + 1, size=shape).astype(np.int32)


_REPLAY = RouterConfig(top_k=3)
ROUTE_REPLAY = OpCase(
    name="route_replay",
    function=lambda logits, idx: route(logits, _REPLAY, topk_idx=idx).topk_weights,
    operands=_replay_operands,
    oracle=lambda logits, idx: router_oracle.route(logits, _REPLAY, forced=idx)[1],
    wrt=(0,),
    layouts=_three(_LEADING.items(), None),
    independent={name: (spec,) for name, spec in _LEADING.items()},
)


def _map_operands(rng, size, dtype):
    return _replay_operands(rng, size, dtype)[1:]


ROUTING_MAP = OpCase(
    name="routing_map",
    function=lambda idx: to_routing_map(idx, 12, "bitmap"),
    operands=_map_operands,
    oracle=lambda idx: np.packbits(
        (idx[..., None] == np.arange(12)).any(axis=-2), axis=-1, bitorder="little"
    ),
    layouts={name: (spec,) for name, spec in _LEADING.items()},
    independent={name: (spec,) for name, spec in _LEADING.items()},
)


def _from_map_oracle(routing_map):
    out = np.full((*routing_map.shape[:-1], 3), -1, np.int32)
    for t in np.ndindex(*routing_map.shape[:-1]):
        chosen = np.flatnonzero(routing_map[t])[:3]
        out[t][: len(chosen)] = chosen
    return out


FROM_ROUTING_MAP = OpCase(
    name="from_routing_map",
    function=lambda flags: from_routing_map(flags, flags.shape[-1], 3),
    operands=lambda rng, size, dtype: (rng.random(_distinct(rng, size, dtype).shape) < 0.2,),
    oracle=_from_map_oracle,
    layouts={name: (spec,) for name, spec in _LEADING.items()},
    independent={name: (spec,) for name, spec in _LEADING.items()},
)


def _masked_operands(rng, size, dtype):
    logits, idx = _balance_operands(rng, size, dtype)
    return logits, idx, _mask_of(rng, logits)


def _masked_poison(logits, idx, mask):
    return np.where(mask[..., None], logits, np.nan).astype(logits.dtype), idx, mask


def _masked_loss(name, loss, oracle):
    return OpCase(
        name=name,
        function=lambda logits, idx, mask: loss(
            logits, idx, coeff=0.5, score_function="sigmoid", token_mask=mask
        ),
        operands=_masked_operands,
        oracle=lambda logits, idx, mask: oracle(logits, idx, 0.5, "sigmoid", mask),
        wrt=(0,),
        layouts=_three(_LEADING.items(), None, None),
        poison=_masked_poison,
    )


def _masked_z_oracle(logits, mask):
    return _z_oracle(logits[mask])


MASKED_Z_LOSS = OpCase(
    name="router_z_loss_masked",
    function=lambda logits, mask: router_z_loss(logits, coeff=0.5, token_mask=mask),
    operands=lambda rng, size, dtype: _masked_operands(rng, size, dtype)[::2],
    oracle=_masked_z_oracle,
    wrt=(0,),
    layouts=_three(_LEADING.items(), None),
    poison=lambda logits, mask: (_masked_poison(logits, None, mask)[0], mask),
)

SEQUENCE_BALANCE = OpCase(
    name="sequence_balance_loss",
    function=lambda logits, idx: sequence_balance_loss(logits, idx, coeff=0.5),
    operands=_balance_operands,
    oracle=lambda logits, idx: router_oracle.sequence_balance(logits, idx, 0.5),
    wrt=(0,),
    layouts=_three(_LEADING.items(), None),
)


def _statistics_oracle(logits, idx):
    experts = logits.shape[-1]
    counts = np.array([(idx == e).sum() for e in range(experts)], np.int32)
    live = (idx >= 0).any(axis=-1)
    probs = [router_oracle.softmax(x) for x in logits[live]]
    entropy = sum(-(p @ np.log(p)) for p in probs) / max(len(probs), 1)
    load = counts.max() / counts.mean() if counts.any() else 0.0
    return counts, np.float64(load), np.float64(entropy), np.int32((~live).sum())


STATISTICS = OpCase(
    name="router_statistics",
    function=lambda logits, idx: tuple(router_statistics(logits, idx)),
    operands=_balance_operands,
    oracle=_statistics_oracle,
    layouts=_three(_LEADING.items(), None),
)


HISTOGRAM = OpCase(
    name="required_bias_histogram",
    function=lambda logits, bias, mask: required_bias_histogram(
        logits, bias, _SIGMOID, num_bins=7, bias_range=(-0.51, 0.52), token_mask=mask
    ),
    operands=_route_operands,
    oracle=lambda logits, bias, mask: router_oracle.histogram(
        logits, bias, _SIGMOID, 7, (-0.51, 0.52), mask
    ),
    layouts=_three(_LEADING.items(), P(), None),
)

_MX = MXFP8BlockScaling().formats().x
_CURRENT = Float8CurrentScaling().formats().x


def _quantize_operands(rng, size, dtype):
    batch, seq = {"regular": (8, 4), "odd": (8, 3), "empty": (0, 4)}[size]
    return (magnitudes(rng, (batch, seq, 128), dtype),)


def _quantize_oracle(x):
    block = (1, 1, 32)
    return quantize_oracle.dequantize(quantize_oracle.quantize(x, _MX, block), block)


QUANTIZE = OpCase(
    name="quantize",
    function=lambda x: dequantize(quantize(x, _MX)),
    operands=_quantize_operands,
    oracle=_quantize_oracle,
    layouts={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
    independent={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
)


def _grouped_quantize_operands(rng, size, dtype):
    lhs, _, sizes, _ = _grouped_operands(rng, size, dtype)
    return lhs, sizes


def _grouped_quantize_oracle(x, sizes):
    out = np.zeros(x.shape)
    for p, g in np.ndindex(*sizes.shape):
        end = sizes[p, : g + 1].sum()
        rows = slice(end - sizes[p, g], end)
        out[p, rows] = quantize_oracle.dequantize(
            quantize_oracle.quantize(x[p, rows], _CURRENT), ()
        )
    return out


GROUPED_QUANTIZE = OpCase(
    name="grouped_quantize",
    function=lambda x, sizes: dequantize(grouped_quantize(x, sizes, _CURRENT)),
    operands=_grouped_quantize_operands,
    oracle=_grouped_quantize_oracle,
    layouts={layout: (spec, spec) for layout, (spec,) in _PARTICIPANTS.items()},
    independent=_PARTICIPANTS,
    poison=lambda x, sizes: _grouped_poison(x, None, sizes, None)[::2],
)

CASES = [
    GEMM,
    GEMM_TOKENS,
    DENSE,
    GROUPED_GEMM,
    GROUPED_GEMM_EP,
    GROUPED_DENSE,
    PERMUTE,
    UNPERMUTE,
    PERMUTE_MAP,
    UNPERMUTE_MAP,
    SORT_CHUNKS,
    MAP_WEIGHTS,
    _route_case("route", use_pre_softmax=False),
    _route_case("route_pre_softmax", use_pre_softmax=True),
    ROUTE_CHOICES,
    LOAD_BALANCE,
    COUNTS,
    Z_LOSS,
    ACTIVATION,
    _biased_case("route_sigmoid", _SIGMOID),
    _biased_case("route_groups", _GROUPS),
    ROUTE_REPLAY,
    ROUTING_MAP,
    FROM_ROUTING_MAP,
    _masked_loss("load_balance_loss_masked", load_balance_loss, router_oracle.balance),
    _masked_loss(
        "sequence_balance_loss_masked", sequence_balance_loss, router_oracle.sequence_balance
    ),
    MASKED_Z_LOSS,
    SEQUENCE_BALANCE,
    STATISTICS,
    HISTOGRAM,
    QUANTIZE,
    GROUPED_QUANTIZE,
]
