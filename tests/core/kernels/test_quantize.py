"""The Triton kernels of quantize and dequantize on a GPU, bit for bit against NumPy."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cases.marks import needs_triton
from core import quantize_oracle as oracle
from expertmesh.core import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    dequantize,
    quantize,
)
from expertmesh.core.kernels.choice import quantize as choice
from expertmesh.core.quantization.quantize import quantize_square, quantize_with_amax

pytestmark = [pytest.mark.gpu, needs_triton]

CURRENT = Float8CurrentScaling().formats()
BLOCK = Float8BlockScaling().formats()
EXACT = Float8BlockScaling(power_2_scale=False, amax_epsilon=1e-4).formats()
MX = MXFP8BlockScaling().formats()

FORMATS = {
    "current": (CURRENT.x, -1, None),
    "current e5m2": (CURRENT.grad_dgrad, -1, None),
    "block": (BLOCK.x, -1, None),
    "block along rows": (BLOCK.x, 1, None),
    "block, any scale": (EXACT.x, -1, None),
    "square": (BLOCK.weight, 1, 3),
    "block e5m2": (dataclasses.replace(BLOCK.x, dtype="float8_e5m2"), -1, None),
    "mx": (MX.x, -1, None),
    "mx e5m2": (dataclasses.replace(MX.x, dtype="float8_e5m2"), -1, None),
    "mx along rows": (MX.x, 1, None),
}


def run_twice(function, *operands):
    """What the kernel gives, twice the same."""
    jitted = jax.jit(function)
    assert "expertmesh_core_launch" in jitted.lower(*operands).as_text(), "the reference would run"
    first, second = jitted(*operands), jitted(*operands)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(codes(a), codes(b))
    return first


def without_padding(q, sizes):
    """`q` up to the block in which the last of its groups ends."""
    live = int(np.asarray(sizes).sum())
    scale = q.scale[:, : -(-live // q.block[1])]
    return dataclasses.replace(q, data=q.data[:, :live], scale=scale)


def codes(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def is_nan(x):
    """Of 8-bit numbers; scales have none."""
    return np.isnan(np.asarray(x).astype(np.float32))


def check(q, want, format):
    data, scale, _ = want.codes(format)
    np.testing.assert_array_equal(codes(q.data), data)
    np.testing.assert_array_equal(codes(q.scale), scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("which", FORMATS)
def test_quantize(which, dtype):
    """Partial blocks, zeros, subnormal numbers, an Inf and a NaN; no dimension is a multiple of a tile."""
    format, axis, across = FORMATS[which]
    x = oracle.wild_numbers(np.random.default_rng(0), (2, 160, 3, 96), np.dtype(jnp.dtype(dtype)))
    q = run_twice(lambda x: quantize(x, format, axis=axis, across=across), jnp.asarray(x))
    check(q, oracle.quantize(x, format, q.block), format)


WEIGHTS = {"square": BLOCK.weight, "any scale": EXACT.weight, "current": CURRENT.weight}


@pytest.mark.parametrize("dgrad", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
# The last dimension is a multiple of a block where one lies between: only then the GEMM has a kernel.
@pytest.mark.parametrize(
    "shape, batch_dims", [((2, 160, 2, 256), 1), ((3, 272, 208), 1), ((144, 80), 0)]
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("which", WEIGHTS)
def test_weights_for_both_gemms(which, transposed, shape, batch_dims, dtype, dgrad, monkeypatch):
    """What `quantize` gives, in memory in two orders or in one; partial blocks, and a scale per matrix.

    Also by Triton's interpreter, which rounds to 8 bits in a way of its own, but for two orders.
    """
    from expertmesh.core.kernels import quantize_square as room

    square = dict(axis=batch_dims, across=len(shape) - 1, batch_dims=batch_dims)
    if not transposed:
        config = choice.Config("triton", None, transposed=False)
        monkeypatch.setattr(room, "choose_square", lambda weights: config)
    jax.clear_caches()
    format, special = WEIGHTS[which], dict(special="") if which == "current" else {}
    x = oracle.wild_numbers(np.random.default_rng(3), shape, np.dtype(jnp.dtype(dtype)), **special)
    run = partial(quantize_square, format=format, dgrad=dgrad, **square)
    copies = run_twice(lambda x: run(x), jnp.asarray(x))
    want = quantize(jnp.asarray(x), format, **square)
    assert (copies[1] is not None) == dgrad
    for copy in copies[: 1 + dgrad]:
        assert copy.block == want.block
        np.testing.assert_array_equal(codes(copy.data), codes(want.data))
        np.testing.assert_array_equal(codes(copy.scale), codes(want.scale))


# Of one matrix with few tiles, and with more than run at a time; of many, with as many, and with one.
MATRICES = [(1, 144, 80), (1, 4096, 2048), (3, 2048, 4096), (40, 272, 2, 144), (600, 128, 144)]


@pytest.mark.parametrize("amax_axes", [(), ("x",)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_a_scale_for_each_matrix(shape, dtype, amax_axes):
    """What `quantize` gives; along mesh axes of one device, too."""
    from expertmesh.core.kernels import quantize_square as room

    rng = np.random.default_rng(4)
    magnitudes = 2.0 ** rng.integers(-40, 40, shape[:1])
    x = rng.normal(size=shape) * magnitudes.reshape(-1, *[1] * (len(shape) - 1))
    x = jnp.asarray(x, dtype)
    options = dict(format=CURRENT.weight, block=(), batch_dims=1, dgrad=True, amax_axes=amax_axes)
    run = partial(room.quantize_square, **options)
    if amax_axes:
        mesh = jax.make_mesh((1,), amax_axes)
        run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    copies = run_twice(lambda x: run(x), x)
    want = jax.jit(lambda x: quantize(x, CURRENT.weight, batch_dims=1))(x)
    assert len(copies) == 4
    for data, scale in (copies[:2], copies[2:]):
        np.testing.assert_array_equal(codes(data), codes(want.data))
        np.testing.assert_array_equal(codes(scale), codes(want.scale))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("which", [name for name, (format, *_) in FORMATS.items() if format.block])
def test_dequantize(which, dtype):
    """Every code of 8 bits, tiny and large scales, partial blocks."""
    format, axis, across = FORMATS[which]
    rng = np.random.default_rng(1)
    q = quantize(jnp.ones((2, 160, 3, 96), dtype), format, axis=axis, across=across)
    data = rng.integers(0, 256, q.shape).astype(np.uint8).view(q.data.dtype)
    scale = 2.0 ** rng.integers(-126, 120, q.scale.shape)
    q = dataclasses.replace(q, data=jnp.asarray(data), scale=jnp.asarray(scale, q.scale.dtype))
    for dim, length in enumerate(q.block):
        scale = np.repeat(scale, length, axis=dim).take(np.arange(q.shape[dim]), axis=dim)
    with np.errstate(all="ignore"):
        want = (data.astype(np.float64) * scale).astype(np.float32)
        want = np.where(np.abs(want) < 2.0**-126, want * 0, want).astype(dtype)
    got = np.asarray(run_twice(dequantize, q))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(codes(got)[~np.isnan(want)], codes(want)[~np.isnan(want)])


def test_by_a_given_multiplier():
    """The amax that comes with it is that of each expert."""
    x = oracle.wild_numbers(np.random.default_rng(2), (3, 70, 200), np.float32, special="")
    multipliers = np.array([2.0**-3, 1.7, 2.0**12], np.float32)
    q, amax = run_twice(
        lambda x, m: quantize_with_amax(x, CURRENT.x, m),
        jnp.asarray(x),
        jnp.asarray(multipliers),
    )
    want = [oracle.to_data(e, m, "float8_e4m3fn") for e, m in zip(x, multipliers, strict=True)]
    np.testing.assert_array_equal(np.asarray(q.data, np.float64), np.stack(want))
    np.testing.assert_array_equal(amax, np.abs(x).max((1, 2)))
