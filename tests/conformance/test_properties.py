"""Properties of random routings, sizes, meshes and specs. Programs are drawn from few, so that few are compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from conformance.settings import assert_close
from ep.exchange_oracle import Exchange, axes_of, shards
from expertmesh.core import (
    grouped_gemm,
    padded_rows,
    permute,
    plan_permute,
    unpermute,
)
from expertmesh.core.testing import magnitudes
from expertmesh.ep import EpConfig, combine, dispatch, dispatch_weights, prepare

pytestmark = pytest.mark.any_device

# The same examples in every run; no search for a smaller one where one fails: each may compile.
few = settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])

NUM_EXPERTS, WIDTH = 8, 3
seeds = st.integers(0, 2**31)


@st.composite
def routings(draw, num_tokens, top_k, num_experts=NUM_EXPERTS):
    """int32[T, K]: uniform, Zipf's law, all to one expert, or none; some with choices that are not routed."""
    rng = np.random.default_rng(draw(seeds))
    shape = (num_tokens, top_k)
    kind = draw(st.sampled_from(["uniform", "zipf", "one", "none"]))
    law = 1 / np.arange(1, num_experts + 1)
    idx = {
        "uniform": lambda: rng.integers(0, num_experts, shape),
        "zipf": lambda: rng.choice(num_experts, shape, p=law / law.sum()),
        "one": lambda: np.full(shape, rng.integers(num_experts)),
        "none": lambda: np.full(shape, -1),
    }[kind]()
    holes = draw(st.sampled_from([0, 0.3]))
    return np.where(rng.random(shape) < holes, -1, idx).astype(np.int32)


def random_values(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(magnitudes(rng, shape) for shape in shapes)


def experts(rows, scale):
    """One number per row stands for its expert."""
    return jnp.sin(rows) * scale[..., None]


def exchange(idx, x, weights, scale, g, *, config):
    """combine(weights * experts(dispatch(x))), its gradients, and the counts."""
    handle = prepare(idx, config)
    live = (handle.source >= 0)[..., None]

    def forward(x, weights, scale):
        rows = dispatch(handle, x)
        weighted = dispatch_weights(handle, weights)[..., None] * experts(rows, scale)
        return combine(handle, jnp.where(live, weighted, jnp.nan))

    out, pull = jax.vjp(forward, x, weights, scale)
    back = combine(handle, dispatch(handle, x))
    counts = (handle.tokens_per_expert, handle.group_sizes, handle.total_recv, handle.num_dropped)
    return (out, *pull(g)), back, counts


# Mesh axes, the spec of the leading dimensions, the EP axes, tokens per shard and dimension, K, alignment, transport.
PROGRAMS = [
    ((("ep", 4), ("dp", 2)), (("ep", "dp"), None), ("ep", "dp"), (1, 2), 2, 2, "ring"),
    ((("dp", 2), ("ep", 4)), (("dp", "ep"),), ("ep",), (0,), 2, 4, "auto"),
    ((("dp", 2), ("ep", 2), ("cp", 2)), ("dp", ("cp", "ep")), ("ep",), (2, 3), 1, 4, "all_to_all"),
    ((("ep", 8),), ("ep",), ("ep",), (5,), 2, 1, "ring"),
    ((("dp", 2), ("ep", 4)), (("dp", "ep"),), ("ep",), (7,), 3, 16, "all_to_all"),
    ((("dp", 1), ("ep", 1)), (("dp", "ep"),), ("ep",), (13,), 5, 8, "auto"),
]
PROGRAMS = [p for p in PROGRAMS if np.prod([n for _, n in p[0]]) <= jax.device_count()]


class Program:
    """A layout, its compiled exchange, and the loops' view of a routing."""

    def __init__(self, mesh, spec, ep, local, top_k, alignment, transport):
        self.shape, self.spec, self.ep = dict(mesh), spec, ep
        self.sizes = tuple(
            n * int(np.prod([self.shape[a] for a in axes_of(entry)], dtype=int))
            for n, entry in zip(local, spec, strict=True)
        )
        self.num_tokens, self.top_k = int(np.prod(self.sizes)), top_k
        self.alignment = alignment
        self.ranks = int(np.prod([self.shape[a] for a in ep]))
        # Equal choices of one token are rows of their own, so that one rank may get all of the group's.
        most = self.num_tokens * top_k + NUM_EXPERTS * alignment
        self.capacity = padded_rows(most, NUM_EXPERTS, alignment)
        self.config = EpConfig(
            num_experts=NUM_EXPERTS,
            capacity=self.capacity,
            alignment=alignment,
            transport=transport,
            axis=ep,
        )
        names, counts = zip(*mesh, strict=True)
        devices = jax.devices()[: int(np.prod(counts))]
        self.mesh = jax.make_mesh(
            counts, names, axis_types=(AxisType.Explicit,) * len(names), devices=devices
        )
        self.function = jax.jit(functools.partial(exchange, config=self.config))

    def oracle(self, idx):
        blocks = list(shards(self.shape, self.spec, self.sizes, self.ep))
        return Exchange(idx, blocks, self.ranks, NUM_EXPERTS, self.capacity, self.alignment)

    def run(self, idx, x, weights, scale, g):
        outer = [a for entry in self.spec for a in axes_of(entry) if a not in self.ep]
        tokens, rows = PartitionSpec(*self.spec), PartitionSpec((*outer, *self.ep))
        lead = lambda a: a.reshape(*self.sizes, a.shape[-1])  # noqa: E731
        operands = (lead(idx), lead(x), lead(weights), scale, lead(g))
        specs = (tokens, tokens, tokens, rows, tokens)
        with jax.set_mesh(self.mesh):
            placed = [
                jax.device_put(a, NamedSharding(self.mesh, s))
                for a, s in zip(operands, specs, strict=True)
            ]
            return jax.tree.map(np.asarray, self.function(*placed))


@functools.cache
def program(i) -> Program:
    return Program(*PROGRAMS[i])


@covering("index", range(len(PROGRAMS)), covers=range(min(2, len(PROGRAMS))))
@settings(few, max_examples=6)
@given(data=st.data())
def test_exchange(index, data):
    """There and back is K times the token; the counts add up; gradients are the loops'."""
    p = program(index)
    idx = data.draw(routings(p.num_tokens, p.top_k))
    oracle = p.oracle(idx)
    tokens, choices, rows = (p.num_tokens, WIDTH), idx.shape, (oracle.P, oracle.C)
    x, weights, scale, g = random_values(data.draw(seeds), tokens, choices, rows, tokens)
    (out, d_x, d_weights, d_scale), back, counts = p.run(idx, x, weights, scale, g)

    routed = (idx >= 0).sum(axis=1, keepdims=True)
    assert_close(back.reshape(tokens), routed * x.astype(np.float64), 1e-6, "there and back")
    raw, sizes, total, dropped = counts
    assert raw.sum() == routed.sum() == len(list(oracle.live())) and not dropped.any()
    np.testing.assert_array_equal(sizes, -(-raw // p.alignment) * p.alignment)
    np.testing.assert_array_equal(total.ravel(), sizes.sum(axis=1))
    np.testing.assert_array_equal(raw, np.reshape(oracle.raw, raw.shape))

    wide = {n: a.astype(np.float64) for n, a in dict(x=x, w=weights, s=scale, g=g).items()}
    want = [np.zeros(a.shape) for a in (x, x, weights, scale)]
    for q, n, t, k in oracle.live():
        xs, w, s, gs = wide["x"][t], wide["w"][t, k], wide["s"][q, n], wide["g"][t]
        want[0][t] += w * s * np.sin(xs)
        want[1][t] += w * s * np.cos(xs) * gs
        want[2][t, k] = s * np.sin(xs) @ gs
        want[3][q, n] = w * np.sin(xs) @ gs
    names = ("out", "d_x", "d_weights", "d_scale")
    for name, got, expected in zip(names, (out, d_x, d_weights, d_scale), want, strict=True):
        assert_close(got.reshape(expected.shape), expected, 1e-5, name)


@functools.partial(jax.jit, static_argnames=("num_experts", "alignment"))
def permutation(idx, x, weights, g, *, num_experts, alignment):
    plan = plan_permute(idx, num_experts=num_experts, alignment=alignment)

    def forward(x, weights):
        return unpermute(jnp.sin(permute(x, plan)), plan, weights)

    out, pull = jax.vjp(forward, x, weights)
    return (out, *pull(g)), unpermute(permute(x, plan), plan), plan


@few
@given(st.data(), st.sampled_from([(0, 2, 3, 1), (1, 1, 1, 8), (13, 3, 5, 4), (31, 2, 7, 1)]))
def test_permutation(data, size):
    """There and back is K times the token, counts add up, and gradients are the closed form's."""
    num_tokens, top_k, num_experts, alignment = size
    idx = data.draw(routings(num_tokens, top_k, num_experts))
    tokens = (num_tokens, WIDTH)
    x, weights, g = random_values(data.draw(seeds), tokens, idx.shape, tokens)
    results, back, plan = jax.tree.map(
        np.asarray, permutation(idx, x, weights, g, num_experts=num_experts, alignment=alignment)
    )
    routed = idx >= 0
    wide_x, wide_g = x.astype(np.float64), g.astype(np.float64)
    assert_close(back, routed.sum(axis=1, keepdims=True) * wide_x, 1e-6, "there and back")
    np.testing.assert_array_equal(
        plan.tokens_per_expert, np.bincount(idx[routed], minlength=num_experts)
    )
    np.testing.assert_array_equal(
        plan.group_sizes, -(-plan.tokens_per_expert // alignment) * alignment
    )
    assert (np.sort(plan.source[plan.source >= 0]) == np.flatnonzero(routed)).all()
    total = np.where(routed, weights, 0).astype(np.float64).sum(axis=1, keepdims=True)
    dots = (np.sin(wide_x) * wide_g).sum(axis=1, keepdims=True)
    want = (total * np.sin(wide_x), total * np.cos(wide_x) * wide_g, np.where(routed, dots, 0))
    for name, got, expected in zip(("out", "d_x", "d_weights"), results, want, strict=True):
        assert_close(got, expected, 1e-5, name)


@jax.jit
def products(lhs, rhs, sizes, bias, dy):
    out, pull = jax.vjp(lambda a, b, c: grouped_gemm(a, b, sizes, c), lhs, rhs, bias)
    return out, *pull(dy)


@few
@given(st.sampled_from([(23, 4, 5, 7), (64, 1, 8, 3), (5, 7, 1, 1)]), st.data())
def test_groups_of_any_sizes(size, data):
    """Groups of any sizes, empty ones and padding rows among them."""
    rows, groups, k, n = size
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=groups, max_size=groups)))
    sizes = np.diff([0, *cuts]).astype(np.int32)
    shapes = (rows, k), (groups, k, n), (groups, n), (rows, n)
    lhs, rhs, bias, dy = random_values(data.draw(seeds), *shapes)
    lhs[cuts[-1] :] = dy[cuts[-1] :] = np.nan
    expert = np.repeat(np.arange(groups), sizes)
    want = [np.zeros(a.shape) for a in (dy, lhs, rhs, bias)]
    for r, e in enumerate(expert):
        x, w, b, d = (a.astype(np.float64) for a in (lhs[r], rhs[e], bias[e], dy[r]))
        want[0][r], want[1][r] = x @ w + b, w @ d
        want[2][e] += np.outer(x, d)
        want[3][e] += d
    for got, expected in zip(products(lhs, rhs, sizes, bias, dy), want, strict=True):
        assert_close(got, expected, 1e-5)
