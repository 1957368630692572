"""Grouped GEMM of rows through an index against permute and grouped GEMM, forward.

A rate counts the operations of the product. Higher ratios are better.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.linear.gathered_gemm import gathered_gemm_op
from expertmesh.core.linear.grouped_gemm import grouped_gemm_op
from expertmesh.core.ops import permute as permute_ops
from expertmesh.core.testing import relative_error

# tokens, width, of the results, experts, choices: the first product of a block
GPU = {
    "ffn": (32768, 4096, 1024, 128, 8),
    "qwen3-30b w13": (4096, 2048, 1536, 32, 8),
    "dsv3 w13": (4096, 7168, 4096, 32, 8),
    "mixtral w13": (8192, 4096, 28672, 8, 2),
}
CPU = {"small": (128, 256, 512, 8, 2)}


def operands(shape, dtype):
    """Tokens, weights, and the plan of random choices."""
    tokens, k, n, experts, choices = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, tokens, k), dtype)
    rhs = jax.random.normal(keys[1], (experts, k, n), dtype) * k**-0.5
    scores = jax.random.normal(keys[2], (1, tokens, experts))
    topk_idx = jax.lax.top_k(scores, choices)[1].astype(jnp.int32)
    return x, rhs, permute_ops.plan_permute(topk_idx, num_experts=experts)


def check(gathered, x, index, rhs, sizes):
    """The first rows and columns of some experts."""
    got, few = jax.jit(gathered)(x, index, rhs, sizes), slice(0, 64)
    ends = np.cumsum(sizes[0])
    for expert in range(0, len(ends), max(1, len(ends) // 8)):
        start = ends[expert] - sizes[0, expert]
        part = slice(start, min(start + 4, ends[expert]))
        rows, w = (np.asarray(a, np.float64) for a in (x[0, index[0, part]], rhs[expert, :, few]))
        assert relative_error(got[0, part, few], rows @ w) < 1e-2, expert


def case_of(name, shape, dtype):
    x, rhs, plan = operands(shape, dtype)
    index, sizes = plan.token, plan.group_sizes
    tokens, k, n, experts, choices = shape
    implementation = "triton" if jax.default_backend() == "gpu" else "reference"
    options = {"out_dtype": jnp.dtype(dtype), "implementation": implementation}

    def gathered(x, index, rhs, sizes):
        return gathered_gemm_op(x, index, rhs, sizes, **options)

    def permuted(x, plan, rhs, sizes):
        return grouped_gemm_op(permute_ops.permute(x, plan), rhs, sizes, **options)

    rows = tokens * choices
    return _measure.gemm_case(
        "gathered_gemm",
        f"{jnp.dtype(dtype).name} fprop {name} {rows}x{k}x{n} of {tokens} tokens, {experts} groups",
        2 * rows * k * n,
        (gathered, (x, index, rhs, sizes)),
        (permuted, (x, plan, rhs, sizes)),
        "permute, grouped GEMM",
        check=functools.partial(check, gathered, x, index, rhs, sizes),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    shapes, dtype = (GPU, jnp.bfloat16) if jax.default_backend() == "gpu" else (CPU, jnp.float32)
    cases = (case_of(name, shape, dtype) for name, shape in shapes.items())
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
