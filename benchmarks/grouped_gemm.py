"""Grouped GEMM, each pass, against one dense GEMM of the same rows, contraction and width.

Kernel and reference alternate in one process; a ratio is the median of the ratios of pairs, higher is better. In short
bursts the GPU keeps its clock, in long ones its power limit lowers it, more for the faster of the two: `--bursts`.
`ragged_dot` (forward only) is timed beside them with `--ragged`.
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


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def group_sizes(rows: int, groups: int, align: int = 1) -> np.ndarray:
    """Unequal, a Dirichlet(5) draw, and unaligned, or multiples of `align`; `rows` together."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows, rng.dirichlet([5.0] * groups)).astype(np.int32) // align * align
    sizes[: (rows - sizes.sum()) // align] += align
    return sizes


def operands(shape, dtype):
    rows, k, n, groups = shape
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (1, rows, k), dtype)
    dy = jax.random.normal(keys[1], (1, rows, n), dtype)
    rhs = jax.random.normal(keys[2], (groups, k, n), dtype) * k**-0.5
    return lhs, dy, rhs, jnp.asarray(group_sizes(rows, groups))[None]


def passes(lhs, dy, rhs, sizes, clear_padding=True):
    """pass -> (grouped function, its operands), (dense function, its operands)."""
    to = {"out_dtype": lhs.dtype, "implementation": "triton" if on_gpu() else "reference"}
    groups, rows = rhs.shape[0], to | {"clear_padding": clear_padding}

    def dot(a_dim, b_dim):
        dims = (((a_dim,), (b_dim,)), ((), ()))
        return lambda a, b: jax.lax.dot_general(a, b, dims, preferred_element_type=lhs.dtype)

    return {
        "fprop": (
            (lambda a, b, s: grouped_gemm_op(a, b, s, **rows), (lhs, rhs, sizes)),
            (dot(1, 0), (lhs[0], rhs[0])),
        ),
        "dgrad": (
            (lambda a, b, s: grouped_gemm_dgrad_op(a, b, s, **rows), (dy, rhs, sizes)),
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


def check(which, function, a, b, sizes):
    """The first rows and columns of some groups, or a corner of their gradients."""
    got, few = jax.jit(function)(a, b, sizes), slice(0, 64)
    ends = np.cumsum(sizes[0])
    for group in range(0, len(ends), max(1, len(ends) // 8)):
        start, end = ends[group] - sizes[0, group], ends[group]
        if which == "wgrad":
            x, y = (np.asarray(z[0, start:end, :8], np.float64) for z in (a, b))
            assert relative_error(got[group, :8, :8], x.T @ y) < 1e-2, group
        elif end > start:
            part = slice(start, min(start + 4, end))
            w = b[group, few].T if which == "dgrad" else b[group, :, few]
            x, w = (np.asarray(z, np.float64) for z in (a[0, part], w))
            assert relative_error(got[0, part, few], x @ w) < 1e-2, group


def cases_of(name, shape, dtype, ragged, protocol):
    rows, k, n, _ = shape
    flops = 2 * rows * k * n
    arrays = operands(shape, dtype)
    for which, (grouped, dense) in passes(*arrays).items():
        case = f"{jnp.dtype(dtype).name} {which} {name} {rows}x{k}x{n}, {shape[3]} groups{protocol}"
        checked = functools.partial(check, which, grouped[0], *grouped[1])
        yield _measure.gemm_case(
            "grouped_gemm", case, flops, grouped, dense, "dense XLA GEMM", check=checked
        )
    if ragged:
        lhs, _, rhs, sizes = arrays
        other = jax.lax.ragged_dot, (lhs[0], rhs, sizes[0])
        case = f"{jnp.dtype(dtype).name} fprop {name} {rows}x{k}x{n} against ragged_dot{protocol}"
        ours = passes(*arrays)["fprop"][0]
        rates = 600e12, 60e12
        yield _measure.gemm_case("grouped_gemm", case, flops, ours, other, "lax.ragged_dot", rates)


def rows_of(shapes, dtype, ragged: bool, milliseconds: float):
    """The rows of all shapes in bursts of so many milliseconds, and the means of the passes against dense."""
    length = milliseconds * 1e-3
    protocol = "" if length == _measure.BURST else f", bursts of {milliseconds:g} ms"
    cases = (
        case
        for name, shape in shapes.items()
        for case in cases_of(name, shape, dtype, ragged, protocol)
    )

    def of_pass(row):
        dense = row["reference"].startswith("dense")
        return " ".join(row["case"].split()[:2]) + protocol if dense else None

    return _measure.with_means(_measure.measured(cases, length=length), of_pass)


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--ragged", action="store_true", help="time lax.ragged_dot too; slow")
    short = _measure.BURST * 1e3
    parser.add_argument(
        "--bursts", type=float, nargs="+", default=[short], help="milliseconds of each"
    )
    options = parser.parse_args()
    shapes, dtype = (GPU, jnp.bfloat16) if on_gpu() else (CPU, jnp.float32)
    rows = (
        row
        for milliseconds in options.bursts
        for row in rows_of(shapes, dtype, options.ragged, milliseconds)
    )
    _measure.write(options.json, rows)


if __name__ == "__main__":
    main()
