"""The Triton kernels of the permutation on a GPU, against loops over choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.ops.permute import permute, plan_permute, plan_rows, unpermute
from expertmesh.core.testing import relative_error

# Groups, tokens, choices, experts, alignment, rows (None: as many as any routing needs).
PLANS = [
    (1, 5, 2, 3, 1, None),
    (2, 333, 3, 7, 4, None),
    (1, 128, 8, 32, 8, None),
    (1, 1000, 8, 256, 16, None),
    (2, 777, 6, 64, 8, 2000),
    (1, 3000, 2, 500, 1, 7000),
]


def _choices(P, T, K, E):
    """Skewed, some not routed, some experts twice in a token."""
    rng = np.random.default_rng(T)
    return np.minimum(rng.integers(-1, E + 1, (P, T, K)), rng.integers(0, E + 1, (P, T, K)))


def _plan_oracle(idx, E, N, A):
    """Each expert's choices appended in order."""
    row, source = np.full(idx.shape, -1), np.full(N, -1)
    counts, sizes, position = [], [], 0
    for e in range(E):
        begin = position
        for t, k in np.argwhere(idx == e):
            if position < N:
                row[t, k], source[position] = position, t * idx.shape[1] + k
            position += 1
        counts.append(position - begin)
        position = -(-position // A) * A
        sizes.append(min(position, N) - min(begin, N))
    return row, source, np.array(counts), np.array(sizes)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_plan_equals_loops(sizes):
    P, T, K, E, A, N = sizes
    idx = _choices(P, T, K, E)
    plan = jax.jit(
        lambda i: plan_permute(i, num_experts=E, num_rows=N, alignment=A, drop=N is not None)
    )(jnp.asarray(idx, jnp.int32))
    for p in range(P):
        want = _plan_oracle(idx[p], E, plan.source.shape[1], A)
        for got, expected in zip(
            (plan.row, plan.source, plan.tokens_per_expert, plan.group_sizes), want, strict=True
        ):
            np.testing.assert_array_equal(got[p], expected)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    "T, K, E, alignment, capacity, num_ranks",
    [
        (999, 3, 12, 4, 3100, 4),
        (333, 2, 8, 1, 200, 2),
        (500, 8, 256, 16, 2600, 8),
        (7, 2, 3, 1, 5, 3),
    ],
)
def test_rows_of_each_rank_equal_loops(T, K, E, alignment, capacity, num_ranks):
    """Every rank numbers all choices alike, and tells its own experts'."""
    idx, L = _choices(1, T, K, E)[0], E // num_ranks
    run = jax.jit(
        lambda idx, rank: plan_rows(
            idx,
            num_experts=E,
            capacity=capacity,
            alignment=alignment,
            num_ranks=num_ranks,
            rank=rank,
        )
    )
    want = [
        _plan_oracle(
            np.where((idx >= r * L) & (idx < r * L + L), idx - r * L, -1), L, capacity, alignment
        )
        for r in range(num_ranks)
    ]
    rows = np.max([row for row, *_ in want], axis=0)
    for r, (_, source, counts, sizes) in enumerate(want):
        plan = run(jnp.asarray(idx, jnp.int32), jnp.int32(r))
        np.testing.assert_array_equal(plan.row_TK, rows)
        np.testing.assert_array_equal(plan.source_C, source)
        np.testing.assert_array_equal(plan.tokens_per_expert_e, counts)
        np.testing.assert_array_equal(plan.group_sizes_e, sizes)
        assert plan.total == (-(-counts // alignment) * alignment).sum()
        assert plan.num_dropped == counts.sum() - (source >= 0).sum()


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "sizes",
    [(2, 33, 3, 5, 4, 300, None), (1, 200, 8, 16, 16, 1032, None), (2, 64, 6, 8, 8, 264, 200)],
)
def test_rows_and_gradients_equal_loops_and_repeat_bitwise(sizes, dtype):
    P, T, K, E, A, D, N = sizes
    plan = plan_permute(
        jnp.asarray(_choices(P, T, K, E), jnp.int32),
        num_experts=E, num_rows=N, alignment=A, drop=N is not None,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    scale = 2.0 ** rng.integers(-5, 5, (P, T, 1))
    x, dout = (jnp.asarray(rng.normal(size=(P, T, D)) * scale, dtype) for _ in range(2))
    rows = rng.normal(size=(*plan.source.shape, D))
    y = jnp.where(plan.source[..., None] < 0, jnp.nan, rows).astype(dtype)
    weights = jnp.where(plan.row < 0, jnp.nan, rng.normal(size=plan.row.shape)).astype(jnp.float32)
    drows = jnp.where(plan.source[..., None] < 0, jnp.nan, rng.normal(size=y.shape)).astype(dtype)

    @jax.jit
    def run(x, y, weights, dout, drows):
        out, pull = jax.vjp(lambda x: permute(x, plan), x)
        back, pull_back = jax.vjp(lambda y, w: unpermute(y, plan, w), y, weights)
        _, pull_plain = jax.vjp(lambda y: unpermute(y, plan), y)
        return out, *pull(drows), back, *pull_back(dout), *pull_plain(dout)

    got = run(x, y, weights, dout, drows)
    for one, again in zip(got, run(x, y, weights, dout, drows), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(again))
    wide = [np.asarray(a, np.float64) for a in (x, y, weights, dout, drows)]
    want = _loops(np.asarray(plan.row), *wide)
    eps = float(jnp.finfo(dtype).eps)
    tolerances = (
        0,
        eps,
        eps,
        eps,
        1e-5,
        0,
    )  # the copies are exact, the weights' gradient is float32
    for one, expected, tolerance in zip(got, want, tolerances, strict=True):
        assert relative_error(one, expected) <= tolerance
    padding = np.asarray(plan.source) < 0
    for one in (got[0], got[3], got[5]):
        assert not np.asarray(one, np.float64)[padding].any()
    assert not np.asarray(got[4])[np.asarray(plan.row) < 0].any()


def _loops(row, x, y, weights, dout, drows):
    """Rows, dx, the weighted sum, dy, dweights, and dy where there are no weights."""
    out, dy, dy_plain = (np.zeros(y.shape) for _ in range(3))
    dx, back = np.zeros(x.shape), np.zeros(x.shape)
    dweights = np.zeros(row.shape)
    for p, t, k in np.ndindex(row.shape):
        n = row[p, t, k]
        if n >= 0:
            out[p, n], dy_plain[p, n] = x[p, t], dout[p, t]
            dx[p, t] += drows[p, n]
            back[p, t] += weights[p, t, k] * y[p, n]
            dy[p, n] = weights[p, t, k] * dout[p, t]
            dweights[p, t, k] = dout[p, t] @ y[p, n]
    return out, dx, back, dy, dweights, dy_plain
