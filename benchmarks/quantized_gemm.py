"""GEMMs of 8-bit operands without groups, against XLA's.

The reference is one 8-bit XLA GEMM of the same size, which has one scale; for blocks of 32, which Hopper multiplies as
bfloat16, XLA's bfloat16 GEMM. The forward's weight lies with its contraction contiguous, and so do the weight
gradient's operands in blocks of 128, as where they are quantized in the same program.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import on_gpu
from benchmarks.quantized_grouped_gemm import ALONG, _laid, dense, keep_8_bits, quantized, wide
from expertmesh.core.linear.gemm import gemm_dgrad_op, gemm_op, gemm_wgrad_op
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.testing import relative_error

# Tokens, contraction, width: a shared expert's two GEMMs.
GPU = {"w13": (32768, 7168, 4096), "w2": (32768, 2048, 7168)}
CPU = {"small": (512, 256, 384)}
OPS = {"fprop": gemm_op, "dgrad": gemm_dgrad_op, "wgrad": gemm_wgrad_op}


def call(recipe, which, shape):
    """(op, its operands)."""
    tokens, k, n = shape
    along = ALONG[recipe]
    row, down, square = ((1, along), (along, 1), (128, 128)) if along else ((), (), ())
    if along == 32:
        square = row if which == "dgrad" else down
    shapes = {"fprop": ((tokens, k), (k, n)), "dgrad": ((tokens, n), (k, n))}.get(
        which, ((tokens, k), (tokens, n))
    )
    blocks = (down, down) if which == "wgrad" else (row, square)
    keys = jax.random.split(jax.random.key(0), 2)
    operands = [
        quantized(key, size, block, ())
        for key, size, block in zip(keys, shapes, blocks, strict=True)
    ]
    transposed = {"fprop": along != 32, "wgrad": along == 128}.get(which, False)
    operands = [
        (_laid(data, (1, 0)) if transposed and (which == "wgrad" or i) else data, scale)
        for i, (data, scale) in enumerate(operands)
    ]
    return OPS[which], tuple(
        QuantizedArray(*parts, block=block) for parts, block in zip(operands, blocks, strict=True)
    )


def check(which, function, operands):
    """A corner of the result."""
    got = jax.jit(function)(*operands)
    few, every = slice(0, 128), slice(None)
    parts = {
        "fprop": ((few, every), (every, few)),
        "dgrad": ((few, every), (few, every)),
        "wgrad": ((every, few), (every, few)),
    }[which]
    a, b = (
        wide(q.data[None], q.scale[None], q.block and (1, *q.block), (slice(0, 1), *part))
        for q, part in zip(operands, parts, strict=True)
    )
    want = {"fprop": lambda: a @ b, "dgrad": lambda: a @ b.T, "wgrad": lambda: a.T @ b}[which]()
    assert relative_error(got[few, few], want) < 1e-2


def bfloat16(shape):
    """XLA's GEMM of as many operations."""
    tokens, k, n = shape
    x, w = (
        jax.random.normal(jax.random.key(0), size, jnp.bfloat16) for size in ((tokens, k), (k, n))
    )
    return jnp.matmul, (x, w)


def cases():
    for name, shape in (GPU if on_gpu() else CPU).items():
        in_8_bits, in_16_bits = dense("fprop", (*shape, 1)), bfloat16(shape)
        for recipe, passes in {
            "fp8_current": ("fprop", "wgrad"),
            "fp8_block": ("fprop", "dgrad", "wgrad"),
            "mxfp8": ("fprop",),
        }.items():
            wider = recipe == "mxfp8" or not on_gpu()
            for which in passes:
                op, operands = call(recipe, which, shape)
                function = functools.partial(
                    op,
                    out_dtype=jnp.dtype("bfloat16"),
                    implementation="triton" if on_gpu() else "reference",
                )
                yield _measure.gemm_case(
                    "quantized_gemm",
                    f"{recipe} {which} {name} {'x'.join(map(str, shape))}",
                    2 * shape[0] * shape[1] * shape[2],
                    (function, operands),
                    in_16_bits if wider else in_8_bits,
                    "XLA's bfloat16 GEMM" if wider else "8-bit XLA GEMM",
                    (500e12 if recipe == "mxfp8" else 1000e12, 700e12 if wider else 1300e12),
                    functools.partial(check, which, function, operands),
                )


def main():
    options = _measure.parser(__doc__).parse_args()
    keep_8_bits()
    _measure.write(options.json, _measure.measured(cases()))


if __name__ == "__main__":
    main()
