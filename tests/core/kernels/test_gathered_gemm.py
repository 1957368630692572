"""The kernel of gathered rows on a GPU, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.linear.gathered_gemm import gathered_gemm_op
from expertmesh.core.testing import relative_error

# Tokens, rows, contraction, width, groups, padding rows; none is a multiple of a tile.
SHAPES = [
    (300, 1000, 512, 776, 5, 137),
    (1024, 4096, 1032, 512, 64, 900),
    (99, 600, 72, 1000, 9, 20),
    (50, 77, 8, 8, 3, 77),
    (40, 200, 8200, 136, 3, 20),  # a contraction that is left to the other kernel
]
CASES = [(shape, "bfloat16", "bfloat16") for shape in SHAPES]
CASES += [(SHAPES[0], "float16", "float32"), (SHAPES[-1], "float16", "float32")]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape, dtype, out", CASES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(shape, dtype, out):
    T, C, K, N, G, dead = shape
    rng = np.random.default_rng(C)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[1] = 0  # an empty group
    live = sizes.sum()
    x = rng.normal(size=(T, K)) * 2.0 ** rng.integers(-3, 4, size=(T, 1))
    x[T - 1] = np.nan  # must reach nothing
    index = rng.integers(-1, T - 1, C).astype(np.int32)
    index[::7] = T  # no such row
    index[live:] = T - 1
    x, w = jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=(G, K, N)), dtype)

    @jax.jit
    def run(x, index, w, sizes):
        options = {"implementation": "triton", "out_dtype": jnp.dtype(out), "clear_padding": True}
        return gathered_gemm_op(x[None], index[None], w, sizes[None], **options)[0]

    wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    missing = (index < 0) | (index >= T)
    rows = np.where(missing[:, None], 0, wide_x[np.where(missing, 0, index)])
    want, first = np.zeros((C, N)), 0
    for g, size in enumerate(sizes):
        part = slice(first, first := first + size)
        want[part] = rows[part] @ wide_w[g]
    got = run(x, index, w, sizes)
    assert relative_error(got, want) < (2e-5 if out == "float32" else 5e-3)
    assert not np.asarray(got[live:]).any() and not np.asarray(got)[missing].any()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(run(x, index, w, sizes)))
