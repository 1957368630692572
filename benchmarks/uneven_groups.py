"""Grouped GEMMs of uneven groups, each pass, against even groups of the same rows; and of a mostly empty buffer.

The reference of a buffer, of which a quarter is live, is the same pass of the live rows alone and a fill of as many
bytes as it writes zeros; without the fill where zeros are left out (`clear_padding=False`). Many small groups are
limited by memory: other references of theirs are XLA's batched GEMM, which knows that they are alike, a copy of as
many bytes as their operands and results have, and the read of all weights, which the forward and the input gradient
need, and nothing else.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from benchmarks.grouped_gemm import CPU, GPU, check, group_sizes, on_gpu, operands, passes

FINE = 128  # rows of a group where there are many
CAPACITY = 4  # rows of a buffer to a live one


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


def cases_of_skew(shape, dtype):
    """Uneven groups, and many small ones, against even groups of the same rows."""
    rows, k, n, groups = shape
    flops = 2 * rows * k * n
    lhs, dy, rhs, _ = operands(shape, dtype)
    (_, even), *uneven = (
        (name, jnp.asarray(sizes)[None]) for name, sizes in skewed_sizes(rows, groups).items()
    )
    many = jnp.tile(rhs, (rows // FINE // groups, 1, 1))
    named = {f"{name} of {groups} groups": (lhs, dy, rhs, sizes) for name, sizes in uneven}
    fine = jnp.full((1, many.shape[0]), FINE, jnp.int32)
    named[f"{many.shape[0]} groups of {FINE} rows"] = lhs, dy, many, fine
    reference = passes(lhs, dy, rhs, even)
    for name, arrays in named.items():
        for which, (ours, _) in passes(*arrays).items():
            case = f"{jnp.dtype(dtype).name} {which} {rows}x{k}x{n}, {name}"
            even_groups = reference[which][0], f"{groups} even groups"
            checked = functools.partial(check, which, ours[0], *ours[1])
            yield _measure.gemm_case(
                "uneven_groups", case, flops, ours, *even_groups, check=checked
            )
            if arrays[2] is many:
                yield from limits(case, which, flops, ours, arrays)


def limits(case, which, flops, ours, arrays):
    """Against a batched GEMM, a copy of as many bytes, and the weights alone, read once."""
    lhs, dy, weights, _ = arrays  # two of them are read, the third is as large as what is written
    x, y = (rows.reshape(len(weights), FINE, -1) for rows in (lhs, dy))
    batched, of = {
        "fprop": ("gmk,gkn->gmn", (x, weights)),
        "dgrad": ("gmn,gkn->gmk", (y, weights)),
        "wgrad": ("gmk,gmn->gkn", (x, y)),
    }[which]
    other = (functools.partial(jnp.einsum, batched), of), "XLA's batched GEMM"
    yield _measure.gemm_case("uneven_groups", case, flops, ours, *other)
    moved = lhs.nbytes + dy.nbytes + weights.nbytes
    yield _measure.copy_case("uneven_groups", case, *ours, moved)
    if which != "wgrad":
        rate = flops / weights.nbytes * 3e12
        read = (lambda w: jnp.max(w, axis=(1, 2))), (weights,)
        name = "a read of the weights alone"
        yield _measure.gemm_case("uneven_groups", case, flops, ours, read, name, (rate, rate))


def cases_of_capacity(shape, dtype):
    """A buffer of CAPACITY times the live rows, against the live rows alone and a fill of what else is written."""
    rows, k, n, groups = shape
    live = rows // CAPACITY
    lhs, dy, rhs, _ = operands(shape, dtype)
    sizes = jnp.asarray(group_sizes(live, groups))[None]
    exact = passes(lhs[:, :live], dy[:, :live], rhs, sizes)
    left = passes(lhs, dy, rhs, sizes, clear_padding=False)
    zeros = {"fprop": (rows - live, n), "dgrad": (rows - live, k), "wgrad": (0,)}
    for which, (ours, _) in passes(lhs, dy, rhs, sizes).items():
        function, arrays = exact[which][0]

        def with_fill(a, *rest, function=function, shape=zeros[which]):
            return function(a, *rest), jnp.broadcast_to(a[0, 0, 0], shape)

        size = f"{live}x{k}x{n} of a buffer of {rows}, {groups} groups"
        case, flops = f"{jnp.dtype(dtype).name} {which} {size}", 2 * live * k * n
        other = (with_fill, arrays), "the live rows alone and a fill"
        yield _measure.gemm_case("uneven_groups", case, flops, ours, *other)
        if which != "wgrad":
            case, alone = f"{case}, zeros left out", (exact[which][0], "the live rows alone")
            yield _measure.gemm_case("uneven_groups", case, flops, left[which][0], *alone)


def main():
    options = _measure.parser(__doc__).parse_args()
    shape, dtype = (GPU["dsv3 w2"], jnp.bfloat16) if on_gpu() else (CPU["small"], jnp.float32)
    cases = itertools.chain(cases_of_skew(shape, dtype), cases_of_capacity(shape, dtype))
    _measure.write(options.json, _measure.measured(cases))


if __name__ == "__main__":
    main()
