"""The kernels of the quantized GEMMs on a GPU, against float64 products of dequantized numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import KINDS, error_of, paired, quantized, run_twice
from expertmesh.core.linear.gemm import gemm_dgrad_op, gemm_op, gemm_wgrad_op
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("capability")]

# Tokens, contraction, two output dimensions; no tile is full.
SHAPES = {0: ((3, 70), 176, (2, 80)), 32: ((3, 70), 160, (3, 96)), 128: ((3, 70), 208, (2, 128))}


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_products(which, kind, out_dtype):
    along, dtypes, _ = KINDS[kind]
    tokens, K, N = SHAPES[along]
    if which == "wgrad" and along:
        tokens = 3, 2 * along  # whole blocks in each row of tokens
    rng = np.random.default_rng(along)
    row, down = ((1, 1, along), (1, along, 1)) if along else ((), ())
    if which == "fprop":
        across = {0: (), 32: (32, 1, 1), 128: (128, 1, 128)}[along]
        shapes, blocks = ((*tokens, K), (K, *N)), (row, across)
        want, op = "abk,kcd->abcd", gemm_op
    elif which == "dgrad":
        across = {0: (), 32: (1, 1, 32), 128: (128, 1, 128)}[along]
        shapes, blocks = ((*tokens, *N), (K, *N)), ((1, *row) if along else (), across)
        want, op = "abcd,kcd->abk", gemm_dgrad_op
    else:
        shapes, blocks = ((*tokens, K), (*tokens, *N)), (down, (*down, 1) if along else ())
        want, op, dtypes = "abk,abcd->kcd", gemm_wgrad_op, dtypes[::-1]
    (a, a_scale, a_wide), (b, b_scale, b_wide) = (
        quantized(rng, shape, block, dtype, ())
        for shape, block, dtype in zip(shapes, blocks, dtypes, strict=True)
    )
    want = np.einsum(want, a_wide, b_wide) * (1 if along else float(a_scale) * float(b_scale))
    operands = a, a_scale, b, b_scale
    got = run_twice(op, operands, out_dtype, blocks=blocks)
    assert got.dtype == out_dtype
    assert relative_error(got, want) < (
        error_of(kind, which == "fprop") if out_dtype == "float32" else 4e-3
    )


def test_shapes_that_are_left_to_the_reference():
    """Rows of tokens, or of outputs, that are no whole blocks; a width that tensor cores do not take."""

    def of(shape, block):
        counts = [-(-n // b) for n, b in zip(shape, block, strict=True)] if block else ()
        return jax.ShapeDtypeStruct(shape, "float8_e4m3fn"), jax.ShapeDtypeStruct(counts, "float32")

    def refused(op, a, b):
        operands = paired((*of(*a), *of(*b)), (a[1], b[1]))
        (kernel,) = op.kernels_for(operands)
        return kernel.unsupported(*operands, out_dtype=jnp.dtype("bfloat16"))

    down = (1, 128, 1)
    assert refused(gemm_wgrad_op, ((2, 128, 64), down), ((2, 128, 64), down)) is None
    assert "blocks of 128; it is 200" in refused(
        gemm_wgrad_op, ((2, 200, 64), down), ((2, 200, 64), down)
    )
    weight = (256, 2, 192), (128, 1, 128)
    assert "blocks of 128; it is 192" in refused(gemm_op, ((2, 200, 256), (1, 1, 128)), weight)
    assert "multiples of 16; they are (64, 24)" in refused(gemm_op, ((2, 64), ()), ((64, 24), ()))
    assert "no kernel for blocks" in refused(gemm_op, ((2, 64), (1, 16)), ((64, 64), (16, 16)))
