"""plan_permute, permute, unpermute against loops in float64, in every mesh mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.ops.permute import (
    padded_rows,
    padded_rows_sharded,
    permute,
    plan_permute,
    plan_rows,
    shard_rows,
    unpermute,
)
from expertmesh.core.ops.row_map import move_values

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}


def routing(kind, T, K, E, seed=0):
    """int32[T, K]; some choices are not routed, some experts repeat in a token."""
    rng = np.random.default_rng(seed)
    idx = rng.integers(0, E, (T, K))
    if kind == "skewed":
        idx = np.minimum(idx, rng.integers(0, E, (T, K)))
    elif kind == "one":
        idx = np.full((T, K), E - 1)
    elif kind == "none":
        idx = np.full((T, K), -1)
    elif kind == "holes":
        idx = np.where(rng.random((T, K)) < 0.3, rng.choice([-1, -7, E, E + 3], (T, K)), idx)
    return idx.astype(np.int32)


def plan_oracle(idx, E, N, A):
    """Experts one after the other, each choice appended in order: no sort, no prefix sum."""
    T, K = idx.shape
    row, source, raw, sizes = np.full((T, K), -1), np.full(N, -1), [], []
    position = 0
    for e in range(E):
        begin = position
        for t in range(T):
            for k in range(K):
                if idx[t, k] == e:
                    if position < N:
                        row[t, k], source[position] = position, t * K + k
                    position += 1
        raw.append(position - begin)
        while (position - begin) % A:
            position += 1
        sizes.append(min(position, N) - min(begin, N))
    return row, source, np.array(raw), np.array(sizes)


def assert_plan(plan, idx, E, N, A):
    expected = plan_oracle(idx, E, N, A)
    for actual, want in zip(
        (plan.row, plan.source, plan.tokens_per_expert, plan.group_sizes), expected, strict=True
    ):
        assert actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, want)


KINDS = ["uniform", "skewed", "one", "none", "holes"]


PLANS = [(1, 1, 1, 1), (13, 3, 5, 1), (13, 3, 5, 4), (7, 6, 4, 16), (257, 2, 8, 3)]


@covering(
    "kind, size",
    KINDS,
    PLANS,
    covers=[("uniform", PLANS[3]), ("one", PLANS[4]), ("holes", PLANS[2]), ("none", PLANS[1])],
)
def test_plan(kind, size):
    T, K, E, A = size
    idx = routing(kind, T, K, E)
    plan = plan_permute(jnp.asarray(idx), num_experts=E, alignment=A)
    assert plan.source.shape == (padded_rows(T * K, E, A),)
    assert_plan(plan, idx, E, plan.source.shape[0], A)
    assert int(plan.tokens_per_expert.sum()) == int(((idx >= 0) & (idx < E)).sum())


@covering("num_rows, A", [1, 5, 16, 31, 200], [1, 4], covers=[(1, 4), (16, 4), (200, 1)])
def test_plan_drops_the_last_rows(num_rows, A):
    idx = routing("holes", 13, 3, 5)
    plan = plan_permute(
        jnp.asarray(idx)[None], num_experts=5, num_rows=num_rows, alignment=A, drop=True
    )
    assert_plan(jax.tree.map(lambda x: x[0], plan), idx, 5, num_rows, A)


def test_plan_worst_case_is_reached():
    """Every expert one row short of its alignment: no spare row in the default number of rows."""
    idx = np.repeat(np.arange(4), 5)[:, None].astype(np.int32)  # 5 = 1 mod 4
    plan = plan_permute(jnp.asarray(idx), num_experts=4, alignment=4)
    assert plan.source.shape == (32,) and int(plan.group_sizes.sum()) == 32
    assert int((plan.row >= 0).sum()) == 20


def test_plan_groups_are_separate_and_wide_integers_do_not_wrap():
    idx = np.stack([routing(kind, 6, 2, 3, seed=s) for s, kind in enumerate(KINDS)])
    plan = plan_permute(jnp.asarray(idx), num_experts=3, alignment=2)
    for p in range(len(KINDS)):
        assert_plan(jax.tree.map(lambda x, p=p: x[p], plan), idx[p], 3, plan.source.shape[1], 2)
    with jax.enable_x64(True):
        wide = jnp.asarray([[2**32, 0], [-(2**32), 1]], jnp.int64)
        assert plan_permute(wide, num_experts=2).row.tolist() == [[-1, 0], [-1, 1]]
    assert plan_permute(jnp.asarray([[255, 1]], jnp.uint8), num_experts=2).row.tolist() == [[-1, 0]]


def test_plan_offsets_and_dropped_rows_of_each_group():
    """Raw counts, aligned sizes and offsets are those of the group's own tokens."""
    idx = np.stack([routing(kind, 13, 3, 5) for kind in KINDS])
    plan = plan_permute(jnp.asarray(idx), num_experts=5, num_rows=20, alignment=4, drop=True)
    for p in range(len(KINDS)):
        row, _, raw, sizes = plan_oracle(idx[p], 5, 20, 4)
        np.testing.assert_array_equal(plan.group_offsets[p], [sum(sizes[:e]) for e in range(5)])
        assert int(plan.num_dropped[p]) == raw.sum() - (row >= 0).sum()
    assert plan.num_dropped.any() and not plan.num_dropped[3]


@covering("alignment, roll", [1, 4], [0, 1, 4, -2, 7], covers=[(1, 1), (4, -2)])
def test_roll_is_the_plan_of_rolled_ids(roll, alignment):
    """The ring of experts: blocks match the rolled group sizes, also with padding."""
    idx = routing("holes", 13, 3, 5)
    routed = (idx >= 0) & (idx < 5)
    want = np.where(routed, (idx - roll) % 5, -1)
    N = padded_rows(39, 5, alignment)
    plan = plan_permute(jnp.asarray(idx), num_experts=5, alignment=alignment, roll=roll)
    assert_plan(plan, want, 5, N, alignment)
    groups = jax.jit(
        lambda r: plan_permute(jnp.stack([idx, idx]), num_experts=5, alignment=alignment, roll=r)
    )(jnp.asarray([roll, 0]))
    assert_plan(jax.tree.map(lambda x: x[0], groups), want, 5, N, alignment)
    assert_plan(jax.tree.map(lambda x: x[1], groups), idx, 5, N, alignment)


def test_sizes_of_shards():
    """The worst routing of every shard fits, and no smaller number does."""
    for T, K, E, A, shards in [(5, 2, 3, 4, 1), (7, 3, 5, 8, 4), (0, 2, 3, 1, 2), (1, 1, 7, 16, 8)]:
        local = padded_rows(T * K, E, A)
        assert padded_rows_sharded(T * K, E, shards, A) == shards * local
        assert shard_rows(shards * local, T * K, E, shards, A) == local
        assert shard_rows(shards * (local + A), T * K, E, shards, A) == local + A
        assert shard_rows(shards, T * K, E, shards, A, drop=True) == 1
        if local:
            with pytest.raises(
                ValueError, match=f"at least {shards * local}, .*={shards * local - shards};"
            ):
                shard_rows(shards * local - shards, T * K, E, shards, A)
    with pytest.raises(ValueError, match="num_rows=41, num_shards=4"):
        shard_rows(41, 10, 3, 4)
    with pytest.raises(ValueError, match="num_shards=0"):
        padded_rows_sharded(10, 3, 0)


def test_exactly_one_row_too_few_is_an_error():
    idx = jnp.zeros((13, 3), jnp.int32)
    assert plan_permute(idx, num_experts=5, num_rows=52, alignment=4).source.shape == (52,)
    with pytest.raises(ValueError, match="at least 52, .* num_rows=51; .* drop=True"):
        plan_permute(idx, num_experts=5, num_rows=51, alignment=4)
    assert plan_permute(idx, num_experts=5, num_rows=51, drop=True).source.shape == (51,)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 0, 2), (0, 3, 2)])
def test_plan_empty(shape):
    plan = plan_permute(jnp.zeros(shape, jnp.int32), num_experts=3)
    x = jnp.ones((*shape[:-1], 4))
    rows = permute(x, plan)
    assert rows.shape == (*shape[:-2], shape[-2] * shape[-1], 4)
    out = unpermute(rows, plan, jnp.ones(shape))
    np.testing.assert_array_equal(out, np.zeros_like(x))
    assert plan.tokens_per_expert.shape == (*shape[:-2], 3) and not plan.tokens_per_expert.any()


def test_plan_rows_of_several_ranks():
    """Each rank has its own offsets and its own capacity: an independent plan over its own experts."""
    idx, E, R, C, A = routing("holes", 21, 3, 6), 6, 3, 12, 4
    e = E // R
    rows = np.full(idx.shape, -1)
    for r in range(R):
        mine = np.where((idx >= r * e) & (idx < (r + 1) * e), idx - r * e, -1)
        row, source, raw, sizes = plan_oracle(mine, e, C, A)
        plan = jax.jit(
            lambda i, r: plan_rows(i, num_experts=E, num_ranks=R, rank=r, capacity=C, alignment=A)
        )(idx, r)
        np.testing.assert_array_equal(plan.source_C, source)
        np.testing.assert_array_equal(plan.tokens_per_expert_e, raw)
        np.testing.assert_array_equal(plan.group_sizes_e, sizes)
        assert int(plan.total) == (-(-raw // A) * A).sum()
        assert int(plan.num_dropped) == raw.sum() - (row >= 0).sum()
        rows = np.where(row >= 0, row, rows)
    np.testing.assert_array_equal(plan.row_TK, rows)
    assert (rows < 0).sum() > ((idx < 0) | (idx >= E)).sum()  # something was dropped


def case(P=2, T=13, K=3, E=5, A=4, D=7, dtype="float32", num_rows=None, kind="holes"):
    rng = np.random.default_rng(5)
    idx = np.stack([routing(kind, T, K, E, seed=p) for p in range(P)])
    plan = plan_permute(
        jnp.asarray(idx), num_experts=E, alignment=A, num_rows=num_rows, drop=num_rows is not None
    )
    N = plan.source.shape[1]
    x = jnp.asarray(rng.normal(size=(P, T, D)) * 2.0 ** rng.integers(-9, 9, (P, T, 1)), dtype)
    y = jnp.asarray(rng.normal(size=(P, N, D)) * 2.0 ** rng.integers(-9, 9, (P, N, 1)), dtype)
    w = jnp.asarray(rng.normal(size=(P, T, K)), jnp.float32)
    return idx, plan, x, y, w


def permute_oracle(x, plan, N):
    """Row by row, by the choices' rows."""
    out = np.zeros((x.shape[0], N, x.shape[2]))
    for p, t, k in np.ndindex(plan.row.shape):
        if plan.row[p, t, k] >= 0:
            out[p, plan.row[p, t, k]] = x[p, t]
    return out


def unpermute_oracle(y, plan, w):
    out = np.zeros((*plan.row.shape[:2], y.shape[2]))
    for p, t, k in np.ndindex(plan.row.shape):
        if plan.row[p, t, k] >= 0:
            out[p, t] += w[p, t, k] * y[p, plan.row[p, t, k]]
    return out


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def f64(x):
    return np.asarray(x, np.float64)


def as_numpy(plan):
    return jax.tree.map(np.asarray, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [None, 17])
def test_permute_unpermute_equal_loops(num_rows, dtype):
    _, plan, x, y, w = case(dtype=dtype, num_rows=num_rows)
    rows = permute(x, plan)
    assert rows.dtype == x.dtype
    np.testing.assert_array_equal(f64(rows), permute_oracle(f64(x), as_numpy(plan), y.shape[1]))
    for weights in (w, w.astype(jnp.bfloat16), None):
        out = unpermute(y, plan, weights)
        want = unpermute_oracle(
            f64(y), as_numpy(plan), np.ones(w.shape) if weights is None else f64(weights)
        )
        assert out.dtype == y.dtype and relative(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [None, 17])
def test_gradients_equal_closed_form(num_rows, dtype):
    """d_x[t] = sum of its rows' cotangents; d_y[n] = w * g[t]; d_w = <g[t], y[row]>."""
    _, plan, x, y, w = case(dtype=dtype, num_rows=num_rows)
    host, N = as_numpy(plan), y.shape[1]
    g_rows = case(dtype=dtype, num_rows=num_rows)[3]
    g_out = jnp.asarray(np.random.default_rng(8).normal(size=x.shape), dtype)
    (dx,) = jax.vjp(lambda x: permute(x, plan), x)[1](g_rows)
    assert dx.dtype == x.dtype
    assert relative(dx, unpermute_oracle(f64(g_rows), host, np.ones(w.shape))) < TOLERANCE[dtype]
    dy, dw = jax.vjp(lambda y, w: unpermute(y, plan, w), y, w)[1](g_out)
    assert dy.dtype == y.dtype and dw.dtype == w.dtype
    want_dy, want_dw = np.zeros(y.shape), np.zeros(w.shape)
    for p, t, k in np.ndindex(host.row.shape):
        n = host.row[p, t, k]
        if n >= 0:
            want_dy[p, n] = f64(w)[p, t, k] * f64(g_out)[p, t]
            want_dw[p, t, k] = f64(g_out)[p, t] @ f64(y)[p, n]
    assert relative(dy, want_dy) < TOLERANCE[dtype]
    assert relative(dw, want_dw) < TOLERANCE["float32"]  # in float32 whatever the rows are
    np.testing.assert_array_equal(np.asarray(dw)[host.row < 0], 0)
    np.testing.assert_array_equal(f64(dy)[host.source < 0], 0)
    (dy,) = jax.vjp(lambda y: unpermute(y, plan), y)[1](g_out)
    np.testing.assert_array_equal(f64(dy), permute_oracle(f64(g_out), host, N))


def test_gradients_are_gathers():
    """A scatter is an atomic or a serial loop."""
    _, plan, x, y, w = case()
    loss = jax.grad(
        lambda x, w: jnp.sum(unpermute(jnp.sin(permute(x, plan)), plan, w) ** 2), argnums=(0, 1)
    )
    assert "scatter" not in str(jax.make_jaxpr(loss)(x, w))


def test_nan_stays_in_its_token_and_padding_is_zero():
    _, plan, x, y, w = case()
    host = as_numpy(plan)
    rows = permute(x.at[0, 0].set(jnp.nan), plan)
    mine = np.isin(np.arange(y.shape[1]), host.row[0, 0])
    assert np.isnan(rows[0, mine]).all() and not np.isnan(np.asarray(rows)[0, ~mine]).any()
    np.testing.assert_array_equal(np.asarray(rows)[host.source < 0], 0)
    # Poison what no token owns: padding rows, and weights without a row.
    y_bad = jnp.where(plan.source[..., None] < 0, jnp.nan, y)
    w_bad = jnp.where(plan.row < 0, jnp.nan, w)
    run = jax.value_and_grad(lambda y, w: jnp.sum(jnp.sin(unpermute(y, plan, w))), argnums=(0, 1))
    clean, poisoned = jax.jit(run)(y, w), jax.jit(run)(y_bad, w_bad)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


def test_values_of_choices():
    _, plan, _, _, w = case()
    host = as_numpy(plan)
    want = np.zeros(plan.source.shape, np.float32)
    for p, t, k in np.ndindex(host.row.shape):
        if host.row[p, t, k] >= 0:
            want[p, host.row[p, t, k]] = w[p, t, k]
    out, pull = jax.vjp(lambda w: move_values(w, plan), w)
    np.testing.assert_array_equal(out, want)
    cotangent = jnp.asarray(np.random.default_rng(3).normal(size=out.shape), jnp.float32)
    (dw,) = pull(cotangent)
    np.testing.assert_array_equal(dw, move_values(cotangent, plan.inverse))
    take = np.stack(
        [np.append(c, 0)[r] for c, r in zip(np.asarray(cotangent), host.row, strict=True)]
    )
    np.testing.assert_array_equal(dw, take)
    (dc,) = jax.vjp(lambda c: move_values(c, plan.inverse), cotangent)[1](w)
    np.testing.assert_array_equal(dc, want)
    one = jax.tree.map(lambda x: x[0], plan)
    np.testing.assert_array_equal(move_values(w[0], one), want[0])
    np.testing.assert_array_equal(move_values(cotangent[0], one.inverse), take[0])


def pipeline(idx, x, w, cotangent, alignment=4):
    """Everything public in one differentiated function."""

    def forward(x, w):
        plan = plan_permute(idx, num_experts=5, alignment=alignment)
        rows = permute(x, plan) * jnp.exp2(jnp.round(move_values(w, plan)))[..., None]
        return unpermute(jnp.where(plan.source[..., None] < 0, 0, rows + 1), plan, w)

    out, pull = jax.vjp(forward, x, w)
    return out, *pull(cotangent)


def pipeline_case(P):
    idx, _, x, _, w = case(P=P, T=12, D=8)
    return (
        jnp.asarray(idx),
        x,
        w,
        jnp.asarray(np.random.default_rng(4).normal(size=x.shape), x.dtype),
    )


def test_without_groups_is_one_group():
    operands = pipeline_case(1)
    flat = pipeline(*(o[0] for o in operands))
    jax.tree.map(lambda f, g: np.testing.assert_array_equal(f, g[0]), flat, pipeline(*operands))


@pytest.mark.full
@pytest.mark.parametrize("transform", ["vmap", "scan", "remat"])
def test_transforms_equal_loop(transform):
    stack = [pipeline_case(2), tuple(o[::-1] for o in pipeline_case(2))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *stack)
    function = jax.checkpoint(pipeline) if transform == "remat" else pipeline
    if transform == "vmap":
        out = jax.jit(jax.vmap(function))(*stacked)
    else:
        _, out = jax.jit(functools.partial(jax.lax.scan, lambda c, o: (c, function(*o)), 0))(
            stacked
        )
    alone = jax.jit(pipeline)
    for i, operands in enumerate(stack):
        for actual, want in zip(out, alone(*operands), strict=True):
            assert relative(actual[i], want) < TOLERANCE["float32"]


LAYOUTS = [("dp", None), (("dp", "tp"), None), (("tp", "dp"), None), ("dp", "tp")]


@functools.cache
def unsharded():
    return jax.jit(pipeline)(*pipeline_case(8))


MODES = ["explicit", "auto", "resource", "manual"]


@covering("layout, mode", LAYOUTS, MODES, covers=[])
def test_sharding_changes_no_value_and_adds_no_collective(layout, mode):
    groups, features = layout
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    operands = pipeline_case(8)
    token, choice = PartitionSpec(groups, None, features), PartitionSpec(groups)
    if mode in ("resource", "manual"):
        token = choice
    specs = (choice, token, choice, token)
    function, roles = pipeline, None
    if mode == "resource":
        roles = MeshResource(dp_resource=groups)
    if mode == "manual":
        function = jax.shard_map(
            pipeline, mesh=mesh, in_specs=specs, out_specs=(token, token, choice)
        )
    placed = [
        jax.device_put(o, NamedSharding(mesh, s)) for o, s in zip(operands, specs, strict=True)
    ]
    with global_shard_guard(roles):
        compiled = jax.jit(function).lower(*placed).compile()
    for actual, want in zip(compiled(*placed), unsharded(), strict=True):
        assert relative(actual, want) < TOLERANCE["float32"]
    # Weights' cotangents are dots over the features.
    assert {found.kind for found in collectives(compiled.as_text())} <= (
        {"all-reduce"} if token[-1:] == ("tp",) else set()
    )


def test_second_call_does_not_trace_again():
    operands, traced = pipeline_case(2), []

    @jax.jit
    def function(*operands):
        traced.append(1)
        return pipeline(*operands)

    function(*operands)
    function(*operands)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda i, x, p: plan_permute(x, num_experts=5), TypeError, "dtype=float32"),
        (lambda i, x, p: plan_permute(i[0, 0], num_experts=5), ValueError, "shape=(3,)"),
        (lambda i, x, p: plan_permute(i, num_experts=0), ValueError, "num_experts=0"),
        (lambda i, x, p: plan_permute(i, num_experts=5, alignment=0), ValueError, "alignment=0"),
        (lambda i, x, p: plan_permute(i, num_experts=5, num_rows=0), ValueError, "num_rows=0"),
        (lambda i, x, p: plan_permute(i, num_experts=5, alignment=2**30), ValueError, "int32"),
        (lambda i, x, p: plan_permute(i, num_experts=2.5), TypeError, "float"),
        (lambda i, x, p: plan_permute(i, num_experts=5, num_rows=2**31), ValueError, "int32"),
        (lambda i, x, p: plan_permute(i, num_experts=5, roll=1.5), TypeError, "dtype=float32"),
        (
            lambda i, x, p: plan_permute(i, num_experts=5, roll=i[0]),
            ValueError,
            "roll.shape=(13, 3)",
        ),
        (lambda i, x, p: permute(x[:, :-1], p), ValueError, "x.shape=(2, 12, 7)"),
        (lambda i, x, p: permute(x[0], p), ValueError, "x.shape=(13, 7)"),
        (lambda i, x, p: unpermute(x, p), ValueError, "y.shape=(2, 13, 7)"),
        (lambda i, x, p: unpermute(permute(x, p), p, i), TypeError, "dtype=int32"),
        (
            lambda i, x, p: unpermute(permute(x.astype(jnp.int32), p), p),
            TypeError,
            "y must be an array of floats of at least 16 bits; got dtype=int32",
        ),
        (lambda i, x, p: unpermute(permute(x, p), p, x), ValueError, "map: (2, 13, 3)"),
        (lambda i, x, p: move_values(x, p), ValueError, "map: (2, 13, 3)"),
        (lambda i, x, p: move_values(x, p.inverse), ValueError, "map: (2, 52)"),
    ],
)
def test_errors(call, error, words):
    idx, plan, x, _, _ = case()
    with pytest.raises(error) as caught:
        call(jnp.asarray(idx), x, plan)
    assert words in str(caught.value)


def test_integers_of_one_choice_come_back():
    """Nothing is added up, so they are not rounded."""
    idx = jnp.asarray([[1], [0], [1]])
    x = jnp.asarray([[2**24 + 1], [-7], [2**31 - 1]], jnp.int32)
    plan = plan_permute(idx, num_experts=2)
    np.testing.assert_array_equal(unpermute(permute(x, plan), plan), x)


@pytest.mark.parametrize(
    "roll", [2**31, 2**40 + 3, -(2**33), np.uint32(2**31 + 2), np.uint8(200), np.int8(-128)]
)
def test_roll_of_any_width(roll):
    """By its remainder: none of its bits are lost first."""
    idx = jnp.asarray([[0], [1], [2], [0]])
    got = plan_permute(
        idx, num_experts=3, roll=roll if isinstance(roll, int) else jnp.asarray(roll)
    )
    want = plan_permute((idx - int(roll) % 3) % 3, num_experts=3)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)
