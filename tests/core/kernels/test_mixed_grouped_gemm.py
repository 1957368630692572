"""The kernels of 8-bit rows and a thin plain operand, against float64 loops over dequantized numbers.

Formats that they do not read are widened first: blocks of 32, and blocks of 128 that end within one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import E4M3, E5M2, quantized
from expertmesh.core.kernels.choice.thin_gemm import choose_rows, choose_weights
from expertmesh.core.kernels.device import Device
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.testing import relative_error

# Rows, their width, the thin operand's, groups, padding rows.
FEW, MANY, SMALL = (1000, 512, 24, 5, 137), (3000, 384, 64, 40, 900), (90, 256, 8, 3, 20)
CASES = [
    *(("blocks of 128", shape, "bfloat16") for shape in (FEW, MANY, SMALL)),
    ("blocks of 128", (700, 200, 16, 4, 60), "bfloat16"),
    ("blocks of 128", (700, 256, 200, 4, 60), "float16"),
    ("blocks of 128, e5m2", FEW, "bfloat16"),
    ("tensors", (700, 200, 16, 4, 60), "bfloat16"),
    ("tensors", SMALL, "bfloat16"),
    ("blocks of 32", FEW, "bfloat16"),
]
# Blocks along the features; largest relative error: each number is rounded to 8 bits where it is widened.
KINDS = {
    "blocks of 128": ((1, 1, 128), E4M3),
    "blocks of 128, e5m2": ((1, 1, 128), E5M2),
    "tensors": ((), E4M3),
    "blocks of 32": ((1, 1, 32), E4M3),
}
WIDENED = 3e-3


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("kind, shape, dtype", CASES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(kind, shape, dtype, capability):
    C, D, T, G, dead = shape
    block, of_data = KINDS[kind]
    rng = np.random.default_rng(C + D)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[1:3] = 0, 1  # an empty group, and one of one row
    live, starts = sizes.sum(), np.cumsum(sizes) - sizes
    data, scale, wide = quantized(rng, (1, C, D), block, of_data, (1, G))
    a, b, thin = (
        np.asarray(jnp.asarray(rng.normal(size=n), dtype), np.float64)
        for n in ((G, D, T), (G, T, D), (C, T))
    )
    want = np.zeros((C, T)), np.zeros((C, T)), np.zeros((G, D, T)), np.zeros((G, T, D))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        x = wide[0, rows] * (1 if block else float(scale[0, g]))
        want[0][rows], want[1][rows] = x @ a[g], x @ b[g].T
        want[2][g], want[3][g] = x.T @ thin[rows], thin[rows].T @ x
    poisoned = data.copy()
    poisoned[:, live:] = np.nan  # must reach nothing
    thin[live:] = np.nan
    if block and scale.dtype == np.float32:
        scale[:, live:] = np.nan
    q = QuantizedArray(jnp.asarray(poisoned), jnp.asarray(scale), block=block)

    @jax.jit
    def run(q, a, b, thin, sizes):
        options = {"implementation": "triton", "out_dtype": jnp.dtype("float32")}
        cleared, weights = options | {"clear_padding": True}, options | {"num_experts": G}
        return (
            grouped_gemm_op(q, a, sizes, **cleared)[0],
            grouped_gemm_dgrad_op(q, b, sizes, **cleared)[0],
            grouped_gemm_wgrad_op(q, thin, sizes, **weights),
            grouped_gemm_wgrad_op(thin, q, sizes, **weights),
        )

    operands = q, *(jnp.asarray(x, dtype) for x in (a, b, thin[None])), sizes[None]
    got, again = run(*operands), run(*operands)
    for x, y, expected in zip(got, again, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert relative_error(np.asarray(x), expected) < WIDENED
    for rows in got[:2]:
        assert not np.asarray(rows[live:]).any()
    for weights in got[2:]:
        assert not np.asarray(weights[1]).any(), "the empty group has a gradient"


@pytest.mark.parametrize("T", [8, 16, 24, 32, 128, 520])
def test_tiles_hold_whole_instructions_of_all_columns_up_to_128(T):
    for tiles, columns in (
        (choose_rows(T), choose_rows(T).n),
        (choose_weights(T, Device()), choose_weights(T, Device()).m),
    ):
        assert columns % 16 == 0 and columns >= min(T, 128)
        # A step of columns lies within one block of 128.
        assert (tiles.k if columns == tiles.n else tiles.n) <= 128
