"""Grouped GEMMs of rows through an index against permute and grouped GEMM: those of a block's tokens, x and dy.

A rate counts the operations of the GEMM. Higher ratios are better.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.ops import permute as permute_ops
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

# tokens, width, of the results, experts, choices: the up projection of a block
GPU = {
    "ffn": (32768, 4096, 1024, 128, 8),
    "qwen3-30b w13": (4096, 2048, 1536, 32, 8),
    "dsv3 w13": (4096, 7168, 4096, 32, 8),
    "mixtral w13": (8192, 4096, 28672, 8, 2),
}
# The same of narrow experts, whose gradients are read through an index too.
NARROW = {
    "F 256, D 768": (40960, 768, 512, 128, 8),
    "F 256, D 4096": (32768, 4096, 512, 256, 16),
    "F 512, D 1536": (24576, 1536, 1024, 64, 4),
    "F 512, D 4096": (32768, 4096, 1024, 128, 8),
}
CPU = {"small": (128, 256, 512, 8, 2)}


def operands(shape, dtype):
    """Tokens, the results' cotangents, rows of the down projection, both weights, and the plan of random choices."""
    tokens, k, n, experts, choices = shape
    keys = jax.random.split(jax.random.key(0), 6)
    rows = tokens * choices
    shapes = (1, tokens, k), (1, rows, n), (1, rows, n // 2), (experts, k, n), (experts, n // 2, k)
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys[:5], shapes, strict=True)]
    scores = jax.random.normal(keys[5], (1, tokens, experts))
    topk_idx = jax.lax.top_k(scores, choices)[1].astype(jnp.int32)
    return *arrays, permute_ops.plan_permute(topk_idx, num_experts=experts)


def passes(shape, dtype, narrow: bool):
    """name -> (function of rows and the others, its tokens, the others, operations of a row)."""
    x, d_h, a, wi, wo, plan = operands(shape, dtype)
    sizes, experts = plan.group_sizes, shape[3]
    to = {"out_dtype": jnp.dtype(dtype)}
    weights = to | {"num_experts": experts}
    found = {"fprop": (lambda rows, w: grouped_gemm_op(rows, w, sizes, **to), wi, shape[2])}
    if narrow:
        found |= {
            "wgrad of x": (
                lambda rows, dy: grouped_gemm_wgrad_op(rows, dy, sizes, **weights),
                d_h,
                shape[2],
            ),
            "dgrad": (
                lambda rows, w: grouped_gemm_dgrad_op(rows, w, sizes, **to),
                wo,
                shape[2] // 2,
            ),
            "wgrad of dy": (
                lambda rows, lhs: grouped_gemm_wgrad_op(lhs, rows, sizes, **weights),
                a,
                shape[2] // 2,
            ),
        }
    return x, plan, found


def check(gathered, permuted, *arrays):
    """Both ways are alike."""
    got, want = (np.asarray(jax.jit(f)(*arrays).ravel()[:: 2**12]) for f in (gathered, permuted))
    assert relative_error(got, want.astype(np.float64)) < 1e-2


def cases_of(name, shape, dtype, narrow: bool):
    x, plan, found = passes(shape, dtype, narrow)
    tokens, k, _, experts, choices = shape
    rows = tokens * choices
    for which, (function, other, n) in found.items():

        def gathered(x, plan, other, function=function):
            return function(Moved(x, RowMap(plan.row, plan.source)), other)

        def permuted(x, plan, other, function=function):
            return function(permute_ops.permute(x, plan), other)

        arrays = x, plan, other
        yield _measure.gemm_case(
            "gathered_gemm",
            f"{jnp.dtype(dtype).name} {which} {name} {rows}x{k}x{n} of {tokens} tokens, {experts} groups",
            2 * rows * k * n,
            (gathered, arrays),
            (permuted, arrays),
            "permute, grouped GEMM",
            check=functools.partial(check, gathered, permuted, *arrays),
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    cases = (
        case
        for shapes, narrow in ([(GPU, False), (NARROW, True)] if on_gpu else [(CPU, True)])
        for name, shape in shapes.items()
        for case in cases_of(name, shape, dtype, narrow)
    )
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
