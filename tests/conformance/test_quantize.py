"""Tests 16 to 19: quantization of groups, bit for bit, idempotence and errors, random rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from conformance.settings import TOKENS, Setting, run_on_mesh, two_modes
from core import quantize_oracle as oracle
from expertmesh.core import (
    RECIPES,
    NVFP4BlockScaling,
    as_recipe,
    dequantize,
    grouped_quantize,
    quantize,
)

pytestmark = pytest.mark.any_device

# Each format without random numbers that a recipe has, once; named after the last recipe and operand to have it.
_NAMES = {
    format: f"{name}-{role}"
    for name in RECIPES
    for role, format in vars(as_recipe(name).formats()).items()
    if not format.stochastic and not format.hadamard
}
FORMATS = {name: format for format, name in _NAMES.items()}
ONE_DIMENSIONAL = {name: f for name, f in FORMATS.items() if f.block is None or f.block[0] == 1}
SIZES = np.array([128, 0, 32], np.int32)
ROWS, LEFT_OVER, WIDTH = 256, 96, 32


def codes(q):
    """The bytes of data and scales."""
    leaves = [x for x in (q.data, q.scale, q.tensor_scale) if x is not None]
    return tuple(
        jax.lax.bitcast_convert_type(
            x.astype(jnp.float8_e4m3fn) if x.dtype == jnp.float4_e2m1fn else x,
            jnp.uint32 if x.dtype == jnp.float32 else jnp.uint8,
        )
        for x in leaves
    )


def oracle_codes(x, format, block):
    want = oracle.quantize(x, format, block)
    data, scale, tensor_scale = want.codes(format)
    if format.dtype == "float4_e2m1fn":
        data = np.where(np.isnan(want.data), 0, want.data).astype("float8_e4m3fn").view(np.uint8)
    return tuple(part for part in (data, scale, tensor_scale) if part is not None)


def quantize_groups(x, sizes, *, axis):
    return {
        name: codes(grouped_quantize(x, sizes, format, axis=axis))
        for name, format in ONE_DIMENSIONAL.items()
    }


@two_modes
def test_groups_are_quantized_as_if_alone(setting: Setting):
    """Test 16: bitwise; magnitudes 2^(3g), an empty group, padding rows with NaN; blocks along rows and columns."""
    participants = int(np.prod(setting.sizes))
    rng = np.random.default_rng(0)
    sizes = np.tile(SIZES, (participants, 1))
    group = np.repeat(np.arange(4), [*SIZES, LEFT_OVER])
    x = rng.normal(size=(participants, ROWS, WIDTH)) * 8.0 ** group[:, None]
    x = np.where(group[:, None] == 3, np.nan, x).astype(np.float32)
    axis = {"explicit": 2, "auto": 2}.get(setting.mode, 1)
    got = run_on_mesh(setting, quantize_groups, (x, sizes), (TOKENS, TOKENS), axis=axis)
    ends, last = np.cumsum(SIZES), participants - 1
    for name, format in ONE_DIMENSIONAL.items():
        size = 1 if format.block is None else format.block[1]
        block = () if format.block is None else (size, 1) if axis == 1 else (1, size)
        data, scale, *tensor_scale = got[name]
        for g, (n, end) in enumerate(zip(SIZES, ends, strict=True)):
            want = oracle_codes(x[last, end - n : end], format, block)
            np.testing.assert_array_equal(data[last, end - n : end], want[0], err_msg=name)
            if block and n:
                first, count = (end - n, n) if axis == 2 else ((end - n) // size, -(-n // size))
                found = scale[last, first : first + count]
                np.testing.assert_array_equal(found, want[1], err_msg=name)
            for found, number in zip(
                tensor_scale or ([] if block else [scale]), want[-1:], strict=False
            ):
                assert found[last, g] == number, name
        assert not data[:, ends[-1] :].any(), name


def quantize_each(x):
    return {
        name: codes(quantize(x, format, axis=axis, across=1 - axis))
        for axis in (0, 1)
        for name, format in FORMATS.items()
        for name in [f"{name}-{axis}"]
    }


@pytest.mark.parametrize("compiled, dtype", [(True, "float32"), full(False, "bfloat16")])
def test_bits_of_all_formats(compiled, dtype):
    """Test 17: in one program and op by op; exponents in [-20, 20], zeros, subnormals, an Inf, a NaN."""
    x = oracle.wild_numbers(np.random.default_rng(17), (64, 96), dtype)
    got = (jax.jit(quantize_each) if compiled else quantize_each)(x)
    for name, found in got.items():
        format, axis = FORMATS[name[:-2]], int(name[-1])
        block = [0, 0]
        if format.block is not None:
            block[axis], block[1 - axis] = format.block[1], format.block[0]
        want = oracle_codes(x, format, tuple(block) if format.block else ())
        for a, b in zip(found, want, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def again(x):
    """Each format's numbers, and the numbers and codes of quantizing them once more."""
    out = {}
    for name, format in FORMATS.items():
        q = quantize(x, format, across=0)
        y = dequantize(q)
        q_again = quantize(y, format, across=0)
        out[name] = y, dequantize(q_again), codes(q), codes(q_again)
    return out


def test_quantizing_twice_and_errors():
    """Test 18: MXFP8 values stay; NVFP4 codes and block scales stay; FP8 errors are those of rounding."""
    rng = np.random.default_rng(18)
    x = (rng.normal(size=(128, 256)) * 2.0 ** rng.integers(-2, 3, size=(128, 1))).astype(np.float32)
    for name, (y, twice, q, q_again) in again(x).items():
        format = FORMATS[name]
        if format.scale == "float8_e8m0fnu":
            np.testing.assert_array_equal(twice, y, err_msg=name)
        if format.scale == "float8_e4m3fn":
            for a, b in zip(q[:2], q_again[:2], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
            np.testing.assert_allclose(twice, y, rtol=1e-6)
        else:
            info = jnp.finfo(format.dtype)
            unit = np.abs(x) * 2.0 ** -(info.nmant + 1)
            scale = np.asarray(scale_of_each(x, format))
            step = scale * 2.0 ** (info.minexp - info.nmant)
            error = np.abs(np.asarray(y, np.float64) - x)
            assert (error <= np.maximum(unit, step / 2) * (1 + 1e-6)).all(), name
            assert error.max() > 0


@functools.partial(jax.jit, static_argnums=1)
def scale_of_each(x, format):
    q = quantize(x, format, across=0)
    return dequantize(dataclasses.replace(q, data=jnp.ones_like(q.data)))


def test_random_rounding():
    """Test 19: the mean error falls as 1 / sqrt(n); devices draw differently; one seed, one result."""
    format, plain = (getattr(NVFP4BlockScaling().formats(), r) for r in ("grad_dgrad", "x"))
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("dp",), axis_types=(AxisType.Explicit,), devices=devices)
    rng = np.random.default_rng(19)
    x = np.tile(rng.normal(size=(1, 512)), (2, 1)).astype(np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))

    @jax.jit
    def function(x, keys):
        return jax.lax.map(lambda key: quantize(x, format, key=key).data.astype(jnp.float32), keys)

    keys = jax.random.split(jax.random.key(0), 64)
    data = np.asarray(function(placed, keys)) * np.asarray(scale_of_each(x, plain))
    nearest = np.asarray(dequantize(quantize(x, plain)))
    errors = [np.abs(data[:n].mean(0) - x).mean() for n in (1, 16, 64)]
    assert errors[2] < np.abs(nearest - x).mean() < errors[0]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)
    assert errors[0] / errors[2] == pytest.approx(8, rel=0.2)
    assert (
        np.mean(data[0, 0] != data[0, 1]) > 0.1
    )  # the devices' rows are equal, their draws are not
    np.testing.assert_array_equal(function(placed, keys), function(x, keys))
