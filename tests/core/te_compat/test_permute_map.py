"""plan_permute_map with permute, unpermute and move_values against loops over (expert, token)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering, full
from expertmesh.core import move_values, padded_rows, permute, plan_permute_map, unpermute
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import magnitudes, relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def routing_map(kind, T, E, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "zipf":
        return rng.random((T, E)) < 1 / np.arange(1, E + 1)
    return {
        "uniform": rng.random((T, E)) < 0.4,
        "one": np.broadcast_to(np.arange(E) == E - 1, (T, E)),
        "all": np.ones((T, E), bool),
        "none": np.zeros((T, E), bool),
    }[kind]


KINDS = ["uniform", "zipf", "one", "all", "none"]


def plan_oracle(routed, N, A, roll=0):
    """row[T, E], (token, expert) of each row or None, raw counts, sizes: a walk over experts and tokens."""
    T, E = routed.shape
    row, entries, raw, sizes, position = np.full((T, E), -1), [None] * N, [], [], 0
    for i in range(E):
        e, begin = (i + roll) % E, position
        for t in range(T):
            if routed[t, e]:
                if position < N:
                    row[t, e], entries[position] = position, (t, e)
                position += 1
        raw.append(position - begin)
        position += -(position - begin) % A
        sizes.append(min(position, N) - min(begin, N))
    return row, entries, raw, sizes


def assert_plan(plan, routed, A, roll=0):
    E, N = routed.shape[1], plan.source.shape[0]
    row, entries, raw, sizes = plan_oracle(routed, N, A, roll)
    source = [-1 if entry is None else entry[0] * E + entry[1] for entry in entries]
    np.testing.assert_array_equal(plan.row, row)
    np.testing.assert_array_equal(plan.source, source)
    np.testing.assert_array_equal(plan.token, [-1 if e is None else e[0] for e in entries])
    np.testing.assert_array_equal(plan.tokens_per_expert, raw)
    np.testing.assert_array_equal(plan.group_sizes, sizes)
    np.testing.assert_array_equal(plan.group_offsets, np.cumsum(sizes) - sizes)
    assert int(plan.num_dropped) == int(routed.sum()) - int((row >= 0).sum())
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(plan))


PLANS = [(13, 5, 1), (13, 5, 4), (257, 3, 16)]


@covering("kind, size", KINDS, PLANS, covers=list(zip(KINDS, PLANS * 2, strict=False))[1:4])
def test_plan(kind, size):
    T, E, A = size
    routed = routing_map(kind, T, E)
    plan = plan_permute_map(jnp.asarray(routed), alignment=A)
    assert plan.source.shape == (padded_rows(T * E, E, A),)
    assert_plan(plan, routed, A)


@pytest.mark.parametrize("num_rows", [1, 7, 16])
def test_rows_that_are_asked_to_drop(num_rows):
    routed = routing_map("uniform", 13, 5)
    plan = plan_permute_map(jnp.asarray(routed), num_rows=num_rows, alignment=4, drop=True)
    assert_plan(plan, routed, 4)
    assert int(plan.num_dropped) > 0


@pytest.mark.parametrize("roll", [1, 4, -3, 12])
def test_rolled_experts_keep_their_columns(roll):
    """The ring of experts, also with padding: the blocks match the rolled group sizes."""
    routed = routing_map("uniform", 13, 5)
    assert_plan(plan_permute_map(jnp.asarray(routed), alignment=4, roll=roll), routed, 4, roll)
    traced = jax.jit(lambda m, r: plan_permute_map(m, alignment=4, roll=r))
    assert_plan(traced(routed, roll), routed, 4, roll)


def test_groups_roll_on_their_own_and_integers_are_maps():
    maps = np.stack([routing_map(kind, 6, 3) for kind in KINDS])
    plan = plan_permute_map(
        jnp.asarray(maps * 3, jnp.int8), alignment=2, roll=jnp.arange(len(KINDS))
    )
    for p in range(len(KINDS)):
        assert_plan(jax.tree.map(lambda x, p=p: x[p], plan), maps[p], 2, p)


def test_top_k_sizes_the_rows_and_what_breaks_it_is_counted():
    routed = np.sort(np.ones((13, 5)) * (np.arange(5) < 2), axis=1).astype(bool)  # two experts each
    plan = plan_permute_map(jnp.asarray(routed), top_k=2)
    assert plan.source.shape == (26,) and int(plan.num_dropped) == 0
    assert_plan(plan, routed, 1)
    broken = plan_permute_map(jnp.asarray(routed), top_k=1)
    assert broken.source.shape == (13,) and int(broken.num_dropped) == 13


def oracle(routed, probs, x, y, d_rows, d_row_probs, d_out, N, A):
    """Results and gradients of permute, move_values and unpermute, entry by entry, in float64."""
    (T, E), D = routed.shape, x.shape[1]
    row = plan_oracle(routed, N, A)[0]
    rows, row_probs, out = np.zeros((N, D)), np.zeros(N), np.zeros((T, D))
    dx, dy, dp_rows, dp_out = np.zeros((T, D)), np.zeros((N, D)), np.zeros((T, E)), np.zeros((T, E))
    for t, e in zip(*np.nonzero(row >= 0), strict=True):
        n = row[t, e]
        rows[n], row_probs[n] = x[t], probs[t, e]
        out[t] += probs[t, e] * y[n]
        dx[t] += d_rows[n]
        dy[n] = probs[t, e] * d_out[t]
        dp_rows[t, e], dp_out[t, e] = d_row_probs[n], d_out[t] @ y[n]
    return (rows, row_probs, out), (dx, dp_rows, dy, dp_out)


def operands(kind, T, E, A, D=3, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    N = padded_rows(T * E, E, A)
    shapes = [(T, D), (N, D), (N, D), (N,), (T, D)]
    probs = rng.random((T, E)).astype(np.float32)
    probs[rng.random((T, E)) < 0.2] = 0
    values = [magnitudes(rng, s, "float32" if len(s) == 1 else dtype) for s in shapes]
    return routing_map(kind, T, E, seed), probs, values, N


@jax.jit
def _results(plan, probs, x, y, d_rows, d_row_probs, d_out):
    rows, pull_x = jax.vjp(lambda x: permute(x, plan), x)
    row_probs, pull_p = jax.vjp(lambda p: move_values(p, plan), probs)
    out, pull = jax.vjp(lambda y, p: unpermute(y, plan, p), y, probs)
    return (rows, row_probs, out), (*pull_x(d_rows), *pull_p(d_row_probs), *pull(d_out))


def f64(x):
    return np.asarray(x).astype(np.float64)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from([(0, 3, 1), (13, 11, 3)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_loops(kind, size, dtype, seed):
    T, E, A = size
    routed, probs, values, N = operands(kind, T, E, A, dtype=dtype, seed=seed)
    plan = plan_permute_map(jnp.asarray(routed), alignment=A)
    got = _results(plan, jnp.asarray(probs), *map(jnp.asarray, values))
    want = oracle(routed, f64(probs), *map(f64, values), N, A)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < (2e-6 if x.dtype == jnp.float32 else 1e-2)
    assert int(plan.tokens_per_expert.sum()) == int(routed.sum()) == int((plan.source >= 0).sum())
    (rows, row_probs, out), (_, dp_rows, dy, dp_out) = jax.tree.map(f64, got)
    assert not rows[plan.source < 0].any() and not row_probs[plan.source < 0].any()
    assert not dy[plan.source < 0].any() and not out[~routed.any(axis=1)].any()
    assert not dp_rows[~routed].any() and not dp_out[~routed].any()


def test_many_experts_are_a_loop_and_gradients_are_gathers():
    """As many terms as the fullest token has, not E; no scatter."""
    T, E, D = 9, 256, 4
    routed = np.zeros((T, E), bool)
    for t in range(T):
        routed[t, np.random.default_rng(t).permutation(E)[: 3 * t]] = True  # up to 24
    plan = plan_permute_map(jnp.asarray(routed), top_k=24)
    probs = jnp.asarray(np.random.default_rng(1).normal(size=(T, E)), jnp.float32)
    x = jnp.asarray(magnitudes(np.random.default_rng(2), (T, D)))

    def loss(x, probs):
        return jnp.sum(jnp.sin(unpermute(permute(x, plan), plan, probs)))

    grad = jax.grad(loss, argnums=(0, 1))
    text = str(jax.make_jaxpr(grad)(x, probs))
    assert "scatter" not in text and text.count("gather[") < 60
    dx, dp = jax.jit(grad)(x, probs)
    total = np.where(routed, probs, 0).sum(axis=1, keepdims=True)
    g = np.cos(f64(x) * total)
    assert relative_error(dx, g * total) < 1e-5
    assert relative_error(dp, np.where(routed, (g * f64(x)).sum(1, keepdims=True), 0)) < 1e-5


def sharded_case(P=8, T=13, E=12, D=3):
    routed = np.stack([routing_map("uniform", T, E, seed=p) for p in range(P)])
    rng = np.random.default_rng(0)
    return routed, magnitudes(rng, (P, T, D)), rng.normal(size=(P, T, E)).astype(np.float32)


def run_sharded(routed, x, probs):
    def function(x, probs):
        plan = plan_permute_map(routed, alignment=4)
        return unpermute(jnp.sin(permute(x, plan)), plan, probs), plan

    out, pull, plan = jax.vjp(function, x, probs, has_aux=True)
    return out, *pull(jnp.cos(x)), plan


@functools.cache
def unsharded():
    return jax.jit(run_sharded)(*sharded_case())


@pytest.mark.parametrize(
    "kind, layout",
    [
        full(AxisType.Explicit, "dp"),
        full(AxisType.Auto, ("dp", "tp")),
        full(AxisType.Explicit, "experts"),
        full(AxisType.Auto, "experts"),
        full(AxisType.Auto, "dp"),
        full(AxisType.Explicit, ("dp", "tp")),
    ],
    ids=str,
)
def test_sharding_changes_no_value(kind, layout):
    """No collective over groups; a map that is sharded over its experts is gathered."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    tokens = PartitionSpec("dp" if layout == "experts" else layout)
    maps = PartitionSpec("dp", None, "tp") if layout == "experts" else tokens
    operands = sharded_case()
    specs = (maps, tokens, tokens)
    placed = [
        jax.device_put(o, NamedSharding(mesh, s)) for o, s in zip(operands, specs, strict=True)
    ]
    compiled = jax.jit(run_sharded).lower(*placed).compile()
    got, want = compiled(*placed), unsharded()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < (1e-6 if a.dtype == jnp.float32 else 1e-30)
    for p, routed in enumerate(operands[0]):
        assert_plan(jax.tree.map(lambda a, p=p: np.asarray(a)[p], got[3]), routed, 4)
    found = {collective.kind for collective in collectives(compiled.as_text())}
    assert found == ({"all-gather"} if layout == "experts" else set())


def test_scales_move_with_fp8_rows():
    """float8 data and its scales, also those that have no zero, with one plan."""
    routed = routing_map("uniform", 13, 5)
    plan = plan_permute_map(jnp.asarray(routed), alignment=4)
    token = np.asarray(plan.token)
    rng = np.random.default_rng(0)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint8", "bfloat16"):
        x = jnp.asarray(2.0 ** rng.integers(0, 4, (13, 8)), dtype)
        rows = permute(x, plan)
        assert rows.dtype == x.dtype
        np.testing.assert_array_equal(f64(rows)[token >= 0], f64(x)[token[token >= 0]])
        empty = f64(rows)[token < 0]
        np.testing.assert_array_equal(empty, 2.0**-127 if dtype == "float8_e8m0fnu" else 0)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda m: plan_permute_map(m * 1.0), TypeError, "dtype=float32"),
        (lambda m: plan_permute_map(m[0]), ValueError, "shape=(5,)"),
        (lambda m: plan_permute_map(m[:, :0]), ValueError, "routing_map.shape=(13, 0)"),
        (lambda m: plan_permute_map(m, top_k=0), ValueError, "top_k=0"),
        (lambda m: plan_permute_map(m, alignment=0), ValueError, "alignment=0"),
        (lambda m: plan_permute_map(m, num_rows=0), ValueError, "num_rows=0"),
        (lambda m: plan_permute_map(m, num_rows=64), ValueError, "at least 65, .* num_rows=64"),
        (lambda m: plan_permute_map(m, top_k=2, num_rows=25), ValueError, "26, .* num_rows=25"),
        (lambda m: plan_permute_map(m, roll=0.5), TypeError, "roll .* dtype=float32"),
        (lambda m: plan_permute_map(m, roll=jnp.arange(2)), ValueError, "roll.shape=(2,)"),
        (
            lambda m: jax.eval_shape(
                plan_permute_map, jax.ShapeDtypeStruct((2**20, 2**11), jnp.bool_)
            ),
            ValueError,
            "int32; got 2147483648 choices",
        ),
    ],
)
def test_errors(call, error, words):
    words = words.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(error, match=words):
        call(jnp.ones((13, 5), bool))


def test_more_features_than_int32_counts():
    """P * N * D beyond 2^31 needs no wide index; only rows and choices are counted."""
    routed, x = (
        jax.ShapeDtypeStruct((4, 2**16, 8), jnp.bool_),
        jax.ShapeDtypeStruct((4, 2**16, 2**14), jnp.bfloat16),
    )

    def run(routed, x):
        plan = plan_permute_map(routed, top_k=2)
        return permute(x, plan)

    assert jax.eval_shape(run, routed, x).shape == (4, 2**17, 2**14)
    sizes = re.findall(r"(\d+)(?=x)", jax.jit(run).lower(routed, x).as_text())
    assert 2**17 <= max(map(int, sizes)) < 2**31  # nothing is flattened
