"""OpCases of the router, the load-balance losses and the gated activation, and a few settings of each mode."""

import itertools
import math
import random

import numpy as np
from jax.sharding import PartitionSpec as P

from expertmesh.core.ops.activation import gated_activation
from expertmesh.core.ops.load_balance import expert_counts, load_balance_loss, router_z_loss
from expertmesh.core.ops.router import RouterConfig, route
from expertmesh.core.testing import FACTORS, OpCase, Setting, is_valid, magnitudes

TOP_K = 3
TOKENS = {"regular": (8, 8), "odd": (8, 7 * 8), "empty": (0, 8)}
EXPERTS = {"regular": 8, "odd": 12, "empty": 8}


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    return x / x.sum(axis=-1, keepdims=True)


def distinct_logits(rng, size, dtype):
    """float[..., E] without near ties, so that no choice hangs on rounding: multiples of 1/4 in random order."""
    E = EXPERTS[size]
    steps = np.broadcast_to(np.arange(E) - E // 2, (*TOKENS[size], E))
    scale = rng.choice([0.25, 0.5, 1.0], size=(*TOKENS[size], 1))
    return (rng.permuted(steps, axis=-1) * scale).astype(dtype)


def choose(logits):
    """Sorted by (-logit, expert), one token at a time; not top_k, not argsort."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows = [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:TOP_K] for row in flat]
    return np.array(rows, np.int32).reshape(*logits.shape[:-1], TOP_K)


def post_weights(logits):
    return softmax(np.take_along_axis(logits, choose(logits), -1))


def pre_weights(logits):
    return np.take_along_axis(softmax(logits), choose(logits), -1)


def some_indices(rng, size):
    """int32[..., K] with choices that are not routed."""
    return rng.integers(-2, EXPERTS[size] + 2, size=(*TOKENS[size], TOP_K)).astype(np.int32)


def count_oracle(topk_idx, num_experts):
    return np.array([np.sum(topk_idx == e) for e in range(num_experts)], np.int32)


def load_balance_oracle(logits, topk_idx):
    T, E = math.prod(logits.shape[:-1]), logits.shape[-1]
    if T == 0:
        return np.float64(0)
    mean_prob = softmax(logits).reshape(T, E).mean(axis=0)
    share = count_oracle(topk_idx, E) / (T * TOP_K)
    return 0.5 * E * np.sum(mean_prob * share)


def z_oracle(logits):
    T = math.prod(logits.shape[:-1])
    if T == 0:
        return np.float64(0)
    peak = logits.max(axis=-1)
    return 0.5 * np.mean((peak + np.log(np.exp(logits - peak[..., None]).sum(axis=-1))) ** 2)


def silu_oracle(h):
    return h[..., 0, :] / (1 + np.exp(-h[..., 0, :])) * h[..., 1, :]


def logits_and_indices(rng, size, dtype):
    return magnitudes(rng, (*TOKENS[size], EXPERTS[size]), dtype), some_indices(rng, size)


def gate_and_up(rng, size, dtype):
    return (magnitudes(rng, (*TOKENS[size], 2, {"odd": 24}.get(size, 16)), dtype),)


# How the tokens of an operand with two leading dimensions may be split.
SPLITS = {"one": P("b"), "several": P("a", "b"), "tuple": P(("a", "b"))}


def route_case(name, use_pre_softmax, oracle):
    config = RouterConfig(top_k=TOP_K, use_pre_softmax=use_pre_softmax)
    return OpCase(
        name=name,
        function=lambda logits: route(logits, config).topk_weights,
        operands=lambda rng, size, dtype: (distinct_logits(rng, size, dtype),),
        oracle=oracle,
        wrt=(0,),
        layouts={name: (split,) for name, split in SPLITS.items()},
        independent={name: (split,) for name, split in SPLITS.items()},
    )


ROUTE_POST = route_case("route_post_softmax", False, post_weights)
ROUTE_PRE = route_case("route_pre_softmax", True, pre_weights)
ROUTE_CHOICES = OpCase(
    name="route_choices",
    function=lambda logits: route(logits, RouterConfig(top_k=TOP_K)).topk_idx,
    operands=lambda rng, size, dtype: (distinct_logits(rng, size, dtype),),
    oracle=choose,
    # Experts that are split are gathered first.
    layouts={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(None, ("a", "b")),)},
    independent={"one": (P("b"),), "tuple": (P(None, ("a", "b")),)},
)
LOAD_BALANCE = OpCase(
    name="load_balance_loss",
    function=lambda logits, idx: load_balance_loss(logits, idx, coeff=0.5),
    operands=logits_and_indices,
    oracle=load_balance_oracle,
    wrt=(0,),
    layouts={name: (split, split) for name, split in SPLITS.items()},
)
Z_LOSS = OpCase(
    name="router_z_loss",
    function=lambda logits: router_z_loss(logits, coeff=0.5),
    operands=lambda rng, size, dtype: logits_and_indices(rng, size, dtype)[:1],
    oracle=z_oracle,
    wrt=(0,),
    layouts={name: (split,) for name, split in SPLITS.items()},
)
COUNTS = OpCase(
    name="expert_counts",
    function=lambda idx: expert_counts(idx, num_experts=8),
    operands=lambda rng, size, dtype: (some_indices(rng, size),),
    oracle=lambda idx: count_oracle(idx, 8),
    layouts={name: (split,) for name, split in SPLITS.items()},
)
ACTIVATION = OpCase(
    name="gated_activation",
    function=lambda h: gated_activation(h, activation="silu"),
    operands=gate_and_up,
    oracle=silu_oracle,
    wrt=(0,),
    layouts={"one": (P("b"),), "several": (P("a", None, None, "b"),), "tuple": (P(("a", "b")),)},
    independent={"one": (P("b"),), "several": (P("a", None, "b"),), "tuple": (P(("a", "b")),)},
)

CASES = [ROUTE_POST, ROUTE_PRE, ROUTE_CHOICES, LOAD_BALANCE, Z_LOSS, COUNTS, ACTIVATION]


def few_settings(case: OpCase, seed: int = 0) -> list[Setting]:
    """One setting of each mode on the largest mesh; the other factors are drawn so that they differ."""
    rng = random.Random(f"{case.name} {seed}")
    values = {
        name: itertools.cycle(rng.sample(list(FACTORS[name]), len(FACTORS[name])))
        for name in ("layout", "transform", "dtype", "size")
    }
    chosen = []
    for mode in FACTORS["mode"]:
        mesh = (1, 1) if mode == "single" else (2, 4)
        wanted = [(mode, mesh, *map(next, values.values())) for _ in range(12)]
        valid = [s for s in itertools.starmap(Setting, wanted) if is_valid(case, s)]
        chosen += [s for s in valid if not _breaks_xla(s)][:1]
    return chosen


def _breaks_xla(setting):
    """XLA's lowering of a shard_map in a loop fails where all its operands are empty, hence constants."""
    return (setting.transform, setting.size) == ("scan", "empty") and setting.mode != "single"


def contract(*cases: OpCase) -> list[tuple[OpCase, Setting]]:
    """Arguments for `pytest.mark.parametrize`."""
    return [(case, setting) for case in cases for setting in few_settings(case)]


def label(value) -> str:
    return str(getattr(value, "name", value))
