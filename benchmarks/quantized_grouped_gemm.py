"""Grouped GEMMs of 8-bit operands, with a scale per block of 128, against what the tensor cores reach without groups.

For scales per tensor and blocks of 128 the reference is one dense 8-bit XLA GEMM of the same size; for the weight
gradient of blocks of 128, and for blocks of 32, which are multiplied as bfloat16, it is our bfloat16 kernel. Kernel and
reference alternate; a ratio is the median of the ratios of pairs, higher is better.

The forward's weight, and but for blocks of 32 the weight gradient's operands, lie as the tensor cores read them, their
contraction contiguous, as they do where they are quantized in the same program; `fprop, rows of N` is the forward of a
weight [E, K, N] from elsewhere, transposed each time. Other recipes have a program each, so that none takes long:
`quantized_by_tensor` and `quantized_by_32`. All passes of all shapes with `--all`.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from benchmarks import _measure
from benchmarks.grouped_gemm import CPU, GPU, group_sizes, on_gpu
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import required_alignment
from expertmesh.core.testing import relative_error

DATA = jnp.float8_e4m3fn
# Length of the blocks of each recipe; 0 for one scale per group and expert.
ALONG = {"fp8_current": 0, "fp8_block": 128, "mxfp8": 32}
# Two more shapes: those of DeepGEMM's published figures.
SHAPES = GPU | {"four groups": (32768, 7168, 4096, 4), "four groups w2": (32768, 2048, 7168, 4)}
# Of each recipe: shapes, passes.
FEW = {
    "fp8_block": [
        (("dsv3 w13", "dsv3 w2"), ("fprop", "wgrad")),
        (("four groups", "four groups w2"), ("fprop",)),
    ],
    "fp8_current": [(tuple(GPU), ("fprop", "dgrad", "wgrad"))],
    "mxfp8": [(tuple(GPU), ("fprop",)), (("dsv3 w13",), ("wgrad",))],
}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def quantized(key, shape, block, scale_shape):
    """Random (data, scale); without blocks the scales have `scale_shape`."""
    data = jax.random.normal(key, shape, jnp.bfloat16).astype(DATA)
    if not block:
        return data, jnp.full(scale_shape, 0.5, jnp.float32)
    counts = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    scale = jnp.exp2(jax.random.randint(key, counts, -2, 3).astype(jnp.float32))
    return data, scale.astype(jnp.float8_e8m0fnu) if 32 in block else scale


PASSES = ("fprop", "fprop, rows of N", "dgrad", "wgrad")


def call(recipe, which, shape):
    """(op, its operands, its options)."""
    rows, k, n, groups = shape
    along = ALONG[recipe]
    sizes = jnp.asarray(group_sizes(rows, groups, align(recipe, which)))[None]
    of_rows = (1, 1, along) if along else ()
    down = (1, along, 1) if along else ()  # along the rows, whose groups then start with a block
    keys = jax.random.split(jax.random.key(0), 2)
    if which == "wgrad":
        x, dy = (
            quantized(key, (1, rows, width), down, (1, groups))
            for key, width in zip(keys, (k, n), strict=True)
        )
        if along != 32:
            x, dy = ((_laid(data, (0, 2, 1)), scale) for data, scale in (x, dy))
        both = (QuantizedArray(*q, block=down) for q in (x, dy))
        return grouped_gemm_wgrad_op, (*both, sizes), dict(num_experts=groups)
    dgrad = which == "dgrad"
    across = {0: (), 32: of_rows if dgrad else down, 128: (1, 128, 128)}[along]
    x = quantized(keys[0], (1, rows, n if dgrad else k), of_rows, (1, groups))
    w, w_scale = quantized(keys[1], (groups, k, n), across, (groups,))
    if which == "fprop" and along != 32:
        w = _laid(w, (0, 2, 1))
    op = grouped_gemm_dgrad_op if dgrad else grouped_gemm_op
    weight = QuantizedArray(w, w_scale, block=across)
    return op, (QuantizedArray(*x, block=of_rows), weight, sizes), {}


def align(recipe, which) -> int:
    """What the sizes of groups are multiples of: those of a weight gradient begin with a block."""
    return required_alignment(recipe) if which == "wgrad" else 1


def _laid(x, order):
    """`x` with its dimensions in memory in this order, the last one contiguous."""
    return jax.device_put(x, Format(Layout(order), x.sharding))


def dense(which, shape):
    """One 8-bit GEMM of a pass' size, the contraction of both operands contiguous."""
    rows, k, n, _ = shape
    height, width, contraction = {"dgrad": (rows, k, n), "wgrad": (k, n, rows)}.get(
        which, (rows, n, k)
    )
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (
        jax.random.normal(key, (size, contraction), jnp.bfloat16).astype(DATA)
        for key, size in zip(keys, (height, width), strict=True)
    )

    def multiply(x, w, scale):
        x, w = (v.astype(jnp.bfloat16) * scale for v in (x, w))
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.bfloat16)

    return multiply, (x, w, jnp.bfloat16(0.5))


def bfloat16(recipe, which, shape, to):
    """The same GEMM by our kernel for bfloat16, of the same groups."""
    rows, k, n, groups = shape
    sizes = jnp.asarray(group_sizes(rows, groups, align(recipe, which)))[None]
    x, dy, w = (
        jax.random.normal(jax.random.key(0), size, jnp.bfloat16)
        for size in ((1, rows, k), (1, rows, n), (groups, k, n))
    )
    if which == "wgrad":
        options = to | {"num_experts": groups}
        return lambda *z: grouped_gemm_wgrad_op(*z, **options), (x, dy, sizes)
    if which == "dgrad":
        return lambda *z: grouped_gemm_dgrad_op(*z, **to), (dy, w, sizes)
    return lambda *z: grouped_gemm_op(*z, **to), (x, w, sizes)


def check(which, function, operands):
    """The first rows of the first group, or a corner of its gradient."""
    got = jax.jit(function)(*operands)
    a, b, sizes = operands
    end = int(sizes[0, 0])
    few = slice(0, 256)
    rows = slice(0, end if which == "wgrad" else 4)
    of_a = (slice(0, 1), rows, few if which == "wgrad" else slice(None))
    of_b = {
        "wgrad": (slice(0, 1), rows, few),
        "dgrad": (slice(0, 1), few, slice(None)),
    }.get(which, (slice(0, 1), slice(None), few))
    x, y = (
        wide(q.data, q.scale, q.block, part) for q, part in zip((a, b), (of_a, of_b), strict=True)
    )
    if which == "wgrad":
        assert relative_error(got[0, few, few], x.T @ y) < 1e-2
    else:
        assert relative_error(got[0, rows, few], x @ (y.T if which == "dgrad" else y)) < 1e-2


def wide(data, scale, block, part):
    """float64 of the first of a leading dimension of 1, of `part` of the data, whose slices start at 0."""
    values = np.asarray(data[part], np.float64)[0]
    if not block:
        return values * float(np.asarray(scale).reshape(-1)[0])
    counts = [slice(0, -(-size // b)) for size, b in zip((1, *values.shape), block, strict=True)]
    factors = np.asarray(scale[tuple(counts)]).astype(np.float64)[0]
    for dim, length in enumerate(block[1:]):
        factors = np.repeat(factors, length, axis=dim).take(np.arange(values.shape[dim]), axis=dim)
    return values * factors


def cases_of(recipe, name, shape, only):
    rows, k, n, groups = shape
    flops = 2 * rows * k * n
    to = {
        "out_dtype": jnp.dtype("bfloat16"),
        "implementation": "triton" if on_gpu() else "reference",
    }
    for which in only:
        op, operands, options = call(recipe, which, shape)

        def function(*z, op=op, options=options):
            return op(*z, **to, **options)

        in_bfloat16 = recipe == "mxfp8" or (recipe, which) == ("fp8_block", "wgrad")
        yield _measure.gemm_case(
            "quantized_grouped_gemm",
            f"{recipe} {which} {name} {rows}x{k}x{n}, {groups} groups",
            flops,
            (function, operands),
            bfloat16(recipe, which, shape, to)
            if in_bfloat16 or not on_gpu()
            else dense(which, shape),
            "our bfloat16 kernel" if in_bfloat16 else "dense 8-bit XLA GEMM",
            (500e12 if recipe == "mxfp8" else 1000e12, 700e12 if in_bfloat16 else 1300e12),
            functools.partial(check, which, function, operands),
        )


def keep_8_bits() -> None:
    """Before JAX begins: else XLA widens the operands of the dense GEMM to bfloat16."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    )


def of_recipe_and_pass(row: dict) -> str | None:
    """What a row's mean is named, if it is one of the shapes of the package's figures."""
    recipe, which, *rest = row["case"].split()
    return f"{recipe} {which}" if " ".join(rest).startswith(tuple(GPU)) else None


def main(recipe="fp8_block"):
    parser = _measure.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="every pass and shape")
    options = parser.parse_args()
    keep_8_bits()
    shapes = SHAPES if on_gpu() else {"small": CPU["small"]}
    every = [(tuple(shapes), PASSES)]
    cases = (
        case
        for names, which in (FEW[recipe] if on_gpu() and not options.all else every)
        for name in names
        for case in cases_of(recipe, name, shapes[name], which)
    )
    _measure.write(options.json, _measure.with_means(_measure.measured(cases), of_recipe_and_pass))


if __name__ == "__main__":
    main()
