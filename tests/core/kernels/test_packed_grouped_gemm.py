"""The kernels of grouped GEMMs of 4 bits, against float64 loops over dequantized numbers.

They are Blackwell's, and run on Hopper too, where Triton widens the operands.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.gpus import as_gpu
from cases.marks import needs_triton
from expertmesh.core.linear.gemm import gemm_dgrad_op, gemm_op, gemm_wgrad_op
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]

FORMAT = TensorFormat(dtype="float4_e2m1fn", block=(1, 16), scale="float8_e4m3fn")
# Of the codes of 4 bits.
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = 101, 0, 64, 7  # of groups; their ends lie within blocks and bytes
PADDING = 20


@pytest.fixture(autouse=True)
def blackwell():
    with as_gpu("sm_100"):
        yield


def quantized(rng, shape, block, scales):
    """(QuantizedArray, its numbers in float64 without the scales of tensors, which are of shape `scales`)."""
    codes = rng.integers(0, 16, shape)
    counts = [n // b for n, b in zip(shape, block, strict=True)]
    scale = jnp.asarray(2.0 ** rng.uniform(-6, 6, counts), jnp.float32).astype("float8_e4m3fn")
    total = rng.uniform(0.1, 3, scales).astype(np.float32)
    data = jax.lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint4), jnp.float4_e2m1fn)
    wide = np.asarray(scale, np.float64)
    for dim, b in enumerate(block):
        wide = np.repeat(wide, b, axis=dim)
    q = QuantizedArray(data, scale, jnp.asarray(total), block=block, format=FORMAT)
    return q, NUMBERS[codes] * wide


def run(op, *operands, **options):
    call = jax.jit(lambda *x: op(*x, implementation="triton", out_dtype=jnp.float32, **options))
    got, again = (np.asarray(call(*operands)) for _ in range(2))
    np.testing.assert_array_equal(got, again)
    return got


def groups():
    ends = np.cumsum(SIZES)
    return [
        (g, slice(end - size, end)) for g, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    ]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("forward", [True, False], ids=["fprop", "dgrad"])
def test_rows(forward, square):
    rng, G, C, K, N = np.random.default_rng(0), len(SIZES), sum(SIZES) + PADDING, 160, 2 * 96
    of_rows, of_weight = (1, 1, 16), (1, 16, 1) if forward else (1, 1, 16)
    x, x_wide = quantized(rng, (1, C, K if forward else N), of_rows, (1, G))
    w, w_wide = quantized(rng, (G, K, N), (1, 16, 16) if square else of_weight, (G,))
    sizes = jnp.asarray([SIZES], jnp.int32)
    op = grouped_gemm_op if forward else grouped_gemm_dgrad_op
    got = run(op, x, w, sizes, clear_padding=True)[0]
    for g, rows in groups():
        factor = float(x.tensor_scale[0, g]) * float(w.tensor_scale[g])
        want = x_wide[0, rows] @ (w_wide[g] if forward else w_wide[g].T) * factor
        assert relative_error(got[rows], want) < 1e-5
    assert not got[sum(SIZES) :].any()


def test_weight_gradients():
    rng, G, C, K, N = np.random.default_rng(1), len(SIZES), sum(SIZES) + PADDING, 160, 96
    (x, x_wide), (dy, dy_wide) = (quantized(rng, (1, C, n), (1, 16, 1), (1, G)) for n in (K, N))
    sizes = jnp.asarray([SIZES], jnp.int32)
    got = run(grouped_gemm_wgrad_op, x, dy, sizes, num_experts=G)
    for g, rows in groups():
        factor = float(x.tensor_scale[0, g]) * float(dy.tensor_scale[0, g])
        want = x_wide[0, rows].T @ dy_wide[0, rows] * factor
        assert relative_error(got[g], want) < 1e-5 if rows.start < rows.stop else not got[g].any()


def test_dense():
    rng, T, K, N = np.random.default_rng(2), (2, 64), 160, 96
    x, x_wide = quantized(rng, (*T, K), (1, 1, 16), ())
    w, w_wide = quantized(rng, (K, N), (16, 16), ())
    dy, dy_wide = quantized(rng, (*T, N), (1, 1, 16), ())
    factor = float(x.tensor_scale) * float(w.tensor_scale)
    assert relative_error(run(gemm_op, x, w), x_wide @ w_wide * factor) < 1e-5
    factor = float(dy.tensor_scale) * float(w.tensor_scale)
    assert relative_error(run(gemm_dgrad_op, dy, w), dy_wide @ w_wide.T * factor) < 1e-5
    (x, x_wide), (dy, dy_wide) = (quantized(rng, (*T, n), (1, 16, 1), ()) for n in (K, N))
    factor = float(x.tensor_scale) * float(dy.tensor_scale)
    want = np.einsum("btk,btn->kn", x_wide, dy_wide) * factor
    assert relative_error(run(gemm_wgrad_op, x, dy), want) < 1e-5
