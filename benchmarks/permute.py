"""permute, unpermute and their gradients against a copy of the rows in the same run; the plan against its reference.

A rate counts the bytes that must move: each token once and each row once, read or written. Higher ratios are better.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.ops import permute as ops
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


def check(plan, x, rows, weights):
    """What is wrong is not timed: some rows and tokens of each pass."""
    done = {
        name: jax.jit(f)(*given) for name, (f, given, _) in passes(plan, x, rows, weights).items()
    }
    some = slice(0, 64)
    row, source, w = (np.asarray(a[some]) for a in (plan.row, plan.source, weights))
    token = source // weights.shape[1]

    def wide(a):
        return np.asarray(a, np.float64)

    np.testing.assert_array_equal(wide(done["permute"][some]), wide(x[token]))
    mine = wide(rows[row])
    assert relative_error(done["permute, gradient"][0][some], mine.sum(1)) < 1e-2
    assert relative_error(done["unpermute"][some], (w[..., None] * mine).sum(1)) < 1e-2
    dy, dw = done["unpermute, gradients"]
    assert relative_error(dw[some], (wide(x[some])[:, None] * mine).sum(2)) < 1e-4
    scaled = wide(weights).reshape(-1)[source][:, None] * wide(x[token])
    assert relative_error(dy[some], scaled) < 1e-2


def copy(rows):
    return jax.lax.optimization_barrier(rows) + jnp.ones((), rows.dtype)


def rows_of(shape, pairs):
    tokens, width, choices, experts = shape
    topk_idx, x, rows, weights = operands(*shape)
    case = f"{tokens} tokens x {width}, {choices} of {experts} experts"
    plan = jax.jit(lambda i: ops.plan_permute(i, num_experts=experts))(topk_idx)
    check(plan, x, rows, weights)
    for name, (function, given, times) in passes(plan, x, rows, weights).items():
        moved, copied = x.nbytes + times * rows.nbytes, 2 * rows.nbytes
        ours, theirs, ratio = _measure.alternate((function, given), (copy, (rows,)), pairs)
        yield _measure.row(
            bench="permute",
            case=f"bfloat16 {name}, {case}",
            metric="rate",
            value=moved / ours / 1e12,
            unit="TB/s",
            reference=f"a copy of the rows, {copied / theirs / 1e12:.2f} TB/s",
            ratio=ratio * moved / copied,
        )
    yield plan_row(topk_idx, experts, case, pairs)


def plan_row(topk_idx, experts, case, pairs):
    given = (topk_idx[None], jnp.zeros(1, jnp.int32))
    options = {
        "num_experts": experts,
        "num_rows": topk_idx.size,
        "alignment": 1,
        "num_ranks": 1,
    }

    def plan(implementation, *operands):
        return ops._plan(*operands, implementation=implementation, **options)

    return _measure.against_reference("permute", f"plan, {case}", plan, given, pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--wide", action="store_true", help="width 7168 too")
    options = parser.parse_args()
    shapes = [GPU if jax.default_backend() == "gpu" else CPU] + [WIDE] * options.wide
    _measure.write(options.json, (row for shape in shapes for row in rows_of(shape, options.pairs)))


if __name__ == "__main__":
    main()
