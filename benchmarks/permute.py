"""permute, unpermute, their gradients and sort_chunks against a copy of the rows; the plan against its reference.

A rate counts the bytes that must move: each token once and each row once, read or written. Higher ratios are better.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.ops import permute as ops
from expertmesh.core.te_compat.sort_chunks import sort_chunks
from expertmesh.core.testing import relative_error

# tokens, width, choices, experts
GPU, CPU = (32768, 4096, 8, 256), (256, 64, 4, 16)
WIDE = (32768, 7168, 2, 256)


def operands(tokens, width, choices, experts):
    """Choices, tokens, rows and weights."""
    keys = jax.random.split(jax.random.key(0), 4)
    scores = jax.random.normal(keys[0], (tokens, experts))
    topk_idx = jax.lax.top_k(scores, choices)[1].astype(jnp.int32)
    x = jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)
    rows = jax.random.normal(keys[2], (tokens * choices, width), jnp.bfloat16)
    return topk_idx, x, rows, jax.random.uniform(keys[3], (tokens, choices))


def passes(plan, x, rows, weights):
    """pass -> function, its operands, and how often each of the rows moves."""

    def permute_gradient(plan, x, rows):
        return jax.vjp(lambda x: ops.permute(x, plan), x)[1](rows)

    def unpermute_gradient(plan, x, rows, weights):
        return jax.vjp(lambda y, w: ops.unpermute(y, plan, w), rows, weights)[1](x)

    return {
        "permute": (lambda plan, x: ops.permute(x, plan), (plan, x), 1),
        "permute, gradient": (permute_gradient, (plan, x, rows), 1),
        "unpermute": (lambda plan, y, w: ops.unpermute(y, plan, w), (plan, rows, weights), 1),
        "unpermute, gradients": (unpermute_gradient, (plan, x, rows, weights), 2),
    }


def check(name, plan, x, rows, weights):
    """Some rows and tokens of a pass."""
    function, given, _ = passes(plan, x, rows, weights)[name]
    done = jax.jit(function)(*given)
    some = slice(0, 64)
    row, source, w = (np.asarray(a[some]) for a in (plan.row, plan.source, weights))
    token = source // weights.shape[1]

    def wide(a):
        return np.asarray(a, np.float64)

    mine = wide(rows[row])
    if name == "permute":
        np.testing.assert_array_equal(wide(done[some]), wide(x[token]))
    elif name == "permute, gradient":
        assert relative_error(done[0][some], mine.sum(1)) < 1e-2
    elif name == "unpermute":
        assert relative_error(done[some], (w[..., None] * mine).sum(1)) < 1e-2
    else:
        dy, dw = done
        assert relative_error(dw[some], (wide(x[some])[:, None] * mine).sum(2)) < 1e-4
        scaled = wide(weights).reshape(-1)[source][:, None] * wide(x[token])
        assert relative_error(dy[some], scaled) < 1e-2


def copy(rows):
    return jax.lax.optimization_barrier(rows) + jnp.ones((), rows.dtype)


def cases_of(shape):
    tokens, width, choices, experts = shape
    topk_idx, x, rows, weights = operands(*shape)
    case = f"{tokens} tokens x {width}, {choices} of {experts} experts"
    plan = jax.jit(lambda i: ops.plan_permute(i, num_experts=experts))(topk_idx)
    copied = copy, (rows,)
    for name, (function, given, times) in passes(plan, x, rows, weights).items():
        yield rows_case(
            f"bfloat16 {name}, {case}",
            (function, given),
            x.nbytes + times * rows.nbytes,
            copied,
            functools.partial(check, name, plan, x, rows, weights),
        )
    yield chunks_case(rows, experts, f"{topk_idx.size} rows x {width}, {experts} chunks", copied)
    yield plan_case(topk_idx, experts, case)


def rows_case(case, ours, moved, copied, checked):
    """For what moves so many bytes of rows, against their copy."""
    num_bytes = 2 * copied[1][0].nbytes

    def describe(mine, theirs, ratio):
        return _measure.row(
            bench="permute",
            case=case,
            metric="rate",
            value=moved / mine / 1e12,
            unit="TB/s",
            reference=f"a copy of the rows, {num_bytes / theirs / 1e12:.2f} TB/s",
            ratio=ratio * moved / num_bytes,
        )

    seconds = moved / 4e12, num_bytes / 3e12
    return _measure.Case(ours=ours, reference=copied, seconds=seconds, row=describe, check=checked)


def chunks_case(rows, chunks, case, copied):
    """Chunks of uneven sizes in another order, with the plan."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(len(rows), rng.dirichlet([5.0] * chunks))
    order = rng.permutation(chunks)
    given = rows, jnp.asarray(sizes, jnp.int32), jnp.asarray(order, jnp.int32)

    def checked():
        got = jax.jit(sort_chunks)(*given)
        start = np.cumsum(sizes) - sizes
        first = slice(start[order[0]], start[order[0]] + sizes[order[0]])
        assert bool((got[: sizes[order[0]]] == rows[first]).all())

    ours = sort_chunks, given
    return rows_case(f"bfloat16 sort_chunks, {case}", ours, 2 * rows.nbytes, copied, checked)


def plan_case(topk_idx, experts, case):
    given = (topk_idx[None], jnp.zeros(1, jnp.int32))
    options = {
        "num_experts": experts,
        "num_rows": topk_idx.size,
        "alignment": 1,
        "num_ranks": 1,
    }

    def plan(implementation, *operands):
        return ops._plan(*operands, implementation=implementation, **options)

    ours, other = ((functools.partial(plan, name), given) for name in ("auto", "reference"))
    seconds = 2e-5, 7e-4
    return _measure.time_case("permute", f"plan, {case}", ours, other, "our reference", seconds)


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--wide", action="store_true", help="width 7168 too")
    options = parser.parse_args()
    shapes = [GPU if jax.default_backend() == "gpu" else CPU] + [WIDE] * options.wide
    cases = (case for shape in shapes for case in cases_of(shape))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
