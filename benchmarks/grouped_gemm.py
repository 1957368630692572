"""Grouped GEMM, each pass, against one dense GEMM of the same rows, contraction and width.

Kernel and reference alternate in one process; a ratio is the median of the ratios of pairs, higher is better.
`ragged_dot` (forward only) is timed beside them with `--ragged`. Uneven groups are timed against even ones of the same
rows, and a buffer of which a quarter is live against the live rows alone and a fill of as many bytes as are zeros.
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from expertmesh.core.ops.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.testing import relative_error

# rows, contraction, width, groups
GPU = {
    "mixtral w13": (16384, 4096, 28672, 8),
    "mixtral w2": (16384, 14336, 4096, 8),
    "tutorial w13": (8192, 1024, 8192, 4),
    "dsv3 w13": (32768, 7168, 4096, 32),
    "dsv3 w2": (32768, 2048, 7168, 32),
    "qwen3-30b w13": (32768, 2048, 1536, 32),
}
CPU = {"small": (1024, 256, 512, 8), "fine": (1024, 256, 512, 64)}
# Of the rows for uneven groups, and of those for buffers, all rows counted.
SKEWED = "dsv3 w2"
FINE = 128  # rows of a group where there are many
CAPACITY = 4  # rows of a buffer to a live one


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def group_sizes(rows: int, groups: int) -> np.ndarray:
    """Unequal and unaligned: a Dirichlet(5) draw."""
    rng = np.random.default_rng(0)
    return rng.multinomial(rows, rng.dirichlet([5.0] * groups)).astype(np.int32)


def skewed_sizes(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Group sizes by name; even ones first."""
    shares = 1 / np.arange(1, groups + 1)
    zipf = np.floor(rows * shares / shares.sum())
    zipf[0] += rows - zipf.sum()
    named = {
        "even": np.full(groups, rows // groups),
        "zipf(1.0)": np.random.default_rng(0).permutation(zipf),
        "all rows in one": np.where(np.arange(groups) == groups // 2, rows, 0),
    }
    return {name: sizes.astype(np.int32) for name, sizes in named.items()}


def operands(shape, dtype):
    rows, k, n, groups = shape
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (1, rows, k), dtype)
    dy = jax.random.normal(keys[1], (1, rows, n), dtype)
    rhs = jax.random.normal(keys[2], (groups, k, n), dtype) * k**-0.5
    return lhs, dy, rhs, jnp.asarray(group_sizes(rows, groups))[None]


def passes(lhs, dy, rhs, sizes):
    """pass -> (grouped function, its operands), (dense function, its operands)."""
    to = {"out_dtype": lhs.dtype, "implementation": "triton" if on_gpu() else "reference"}
    groups = rhs.shape[0]

    def dot(a_dim, b_dim):
        dims = (((a_dim,), (b_dim,)), ((), ()))
        return lambda a, b: jax.lax.dot_general(a, b, dims, preferred_element_type=lhs.dtype)

    return {
        "fprop": (
            (lambda a, b, s: grouped_gemm_op(a, b, s, **to), (lhs, rhs, sizes)),
            (dot(1, 0), (lhs[0], rhs[0])),
        ),
        "dgrad": (
            (lambda a, b, s: grouped_gemm_dgrad_op(a, b, s, **to), (dy, rhs, sizes)),
            (dot(1, 1), (dy[0], rhs[0])),
        ),
        "wgrad": (
            (
                lambda a, b, s: grouped_gemm_wgrad_op(a, b, s, num_experts=groups, **to),
                (lhs, dy, sizes),
            ),
            (dot(0, 0), (lhs[0], dy[0])),
        ),
    }


def check(lhs, dy, rhs, sizes):
    """A kernel that is wrong is not timed: the first rows of some groups, and a corner of their gradients."""
    grouped = {name: jax.jit(f)(*x) for name, ((f, x), _) in passes(lhs, dy, rhs, sizes).items()}
    ends = np.cumsum(sizes[0])
    for group in range(0, len(ends), max(1, len(ends) // 8)):
        start, end = ends[group] - sizes[0, group], ends[group]
        part = slice(start, min(start + 4, end))
        a, d, w = (np.asarray(x, np.float64) for x in (lhs[0, part], dy[0, part], rhs[group]))
        if part.stop > part.start:
            assert relative_error(grouped["fprop"][0, part], a @ w) < 1e-2
            assert relative_error(grouped["dgrad"][0, part], d @ w.T) < 1e-2
        a, d = (np.asarray(x[0, start:end, :8], np.float64) for x in (lhs, dy))
        assert relative_error(grouped["wgrad"][group, :8, :8], a.T @ d) < 1e-2


def rows_of(name, shape, dtype, ragged):
    rows, k, n, _ = shape
    flops = 2 * rows * k * n
    arrays = operands(shape, dtype)
    check(*arrays)
    for which, (grouped, dense) in passes(*arrays).items():
        case = f"{jnp.dtype(dtype).name} {which} {name} {rows}x{k}x{n}, {shape[3]} groups"
        yield _measure.against_gemm("grouped_gemm", case, flops, grouped, dense, "dense XLA GEMM")
    if ragged:
        lhs, _, rhs, sizes = arrays
        other = jax.lax.ragged_dot, (lhs[0], rhs, sizes[0])
        case = f"{jnp.dtype(dtype).name} fprop {name} {rows}x{k}x{n} against ragged_dot"
        ours = passes(*arrays)["fprop"][0]
        yield _measure.against_gemm(
            "grouped_gemm", case, flops, ours, other, "lax.ragged_dot", pairs=3
        )


def rows_of_skew(shape, dtype, pairs):
    """Uneven groups, and many small ones, against even groups of the same rows."""
    rows, k, n, groups = shape
    flops = 2 * rows * k * n
    lhs, dy, rhs, _ = operands(shape, dtype)
    (_, even), *uneven = (
        (name, jnp.asarray(sizes)[None]) for name, sizes in skewed_sizes(rows, groups).items()
    )
    many = jnp.tile(rhs, (rows // FINE // groups, 1, 1))
    cases = {f"{name} of {groups} groups": (lhs, dy, rhs, sizes) for name, sizes in uneven}
    fine = jnp.full((1, many.shape[0]), FINE, jnp.int32)
    cases[f"{many.shape[0]} groups of {FINE} rows"] = lhs, dy, many, fine
    reference = passes(lhs, dy, rhs, even)
    for name, arrays in cases.items():
        check(*arrays)
        for which, (ours, _) in passes(*arrays).items():
            case = f"{jnp.dtype(dtype).name} {which} {rows}x{k}x{n}, {name}"
            even_groups = reference[which][0], f"{groups} even groups"
            yield _measure.against_gemm("grouped_gemm", case, flops, ours, *even_groups, pairs)


def rows_of_capacity(shape, dtype, pairs):
    """A buffer of CAPACITY times the live rows, against the live rows alone and a fill of what else is written."""
    rows, k, n, groups = shape
    live = rows // CAPACITY
    lhs, dy, rhs, _ = operands(shape, dtype)
    sizes = jnp.asarray(group_sizes(live, groups))[None]
    exact = passes(lhs[:, :live], dy[:, :live], rhs, sizes)
    zeros = {"fprop": (rows - live, n), "dgrad": (rows - live, k), "wgrad": (0,)}
    for which, (ours, _) in passes(lhs, dy, rhs, sizes).items():
        function, arrays = exact[which][0]

        def with_fill(a, *rest, function=function, shape=zeros[which]):
            return function(a, *rest), jnp.broadcast_to(a[0, 0, 0], shape)

        size = f"{live}x{k}x{n} of a buffer of {rows}, {groups} groups"
        case, flops = f"{jnp.dtype(dtype).name} {which} {size}", 2 * live * k * n
        other = (with_fill, arrays), "the live rows alone and a fill"
        yield _measure.against_gemm("grouped_gemm", case, flops, ours, *other, pairs)


def of_pass(row: dict) -> str | None:
    """What a row's mean is named, if it is one of the shapes against dense."""
    dense = row["reference"].startswith("dense")
    return " ".join(row["case"].split()[:2]) if dense else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--ragged", action="store_true", help="time lax.ragged_dot too; slow")
    parser.add_argument("--uneven", action="store_true", help="uneven groups and buffers only")
    options = parser.parse_args()
    shapes, dtype = (GPU, jnp.bfloat16) if on_gpu() else (CPU, jnp.float32)
    found = (
        row
        for name, shape in ({} if options.uneven else shapes).items()
        for row in rows_of(name, shape, dtype, options.ragged)
    )
    some = shapes.get(SKEWED, CPU["small"])
    more = rows_of_skew(some, dtype, pairs=5), rows_of_capacity(some, dtype, pairs=5)
    _measure.write(options.json, itertools.chain(_measure.with_means(found, of_pass), *more))


if __name__ == "__main__":
    main()
