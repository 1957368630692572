"""Operands of the 8-bit GEMMs' kernels, and what runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core.quantization.quantized import QuantizedArray

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Length of the blocks (0: one scale per group and expert), dtypes of both operands, largest relative error where
# products of 128 are added in float32.
KINDS = {
    "blocks of 128": (128, (E4M3, E4M3), 2e-4),
    "blocks of 128, e5m2": (128, (E5M2, E4M3), 2e-4),
    "tensors": (0, (E4M3, E4M3), 2e-4),
    "tensors, e5m2": (0, (E5M2, E4M3), 2e-4),
    "blocks of 32": (32, (E4M3, E4M3), 1e-5),
}


def error_of(kind, forward):
    """The largest: the tensor cores add a forward's products of a whole contraction, in about 14 bits."""
    return 2e-3 if forward and kind.startswith("tensors") else KINDS[kind][2]


def quantized(rng, shape, block, dtype, scale_shape=None):
    """(data, scale, its numbers in float64), not by the code under test; without blocks scales of `scale_shape`."""
    data = jnp.asarray(rng.normal(size=shape) * 16, jnp.float32).astype(dtype)
    if not block:
        scale = rng.uniform(0.1, 3, size=scale_shape).astype(np.float32)
        return np.asarray(data), scale, np.asarray(data, np.float64)
    counts = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    scale = 2.0 ** rng.integers(-6, 7, size=counts)
    if 128 in block:
        scale = (scale * rng.uniform(0.5, 1, size=counts)).astype(np.float32)
    wide = scale.astype(np.float64)
    for dim, b in enumerate(block):
        wide = np.repeat(wide, b, axis=dim).take(np.arange(shape[dim]), axis=dim)
    if 32 in block:
        scale = np.asarray(jnp.asarray(scale, jnp.float32).astype("float8_e8m0fnu"))
    return np.asarray(data), scale, np.asarray(data, np.float64) * wide


def paired(operands, blocks):
    """Data, scale, data, scale and the rest, as two QuantizedArrays and the rest."""
    a, a_scale, b, b_scale, *rest = operands
    pairs = zip((a, b), (a_scale, b_scale), blocks, strict=True)
    return *(QuantizedArray(data, scale, block=block) for data, scale, block in pairs), *rest


def run_twice(op, operands, out_dtype="float32", *, blocks, splits=False, **options):
    """The result of the op's kernel, which must be the same again; `splits`: with a split accumulator."""
    rows, *others = paired([jnp.asarray(x) for x in operands], blocks)
    format = dataclasses.replace(rows.format, use_split_accumulator=splits)
    operands = dataclasses.replace(rows, format=format), *others
    run = jax.jit(
        lambda *x: op(*x, implementation="triton", out_dtype=jnp.dtype(out_dtype), **options)
    )
    got, again = (np.asarray(run(*operands)) for _ in range(2))
    np.testing.assert_array_equal(got.view(np.uint8), again.view(np.uint8))
    return got
