"""quantize and dequantize against loops in NumPy, bit for bit; layouts; random rounding; errors."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import full
from core import quantize_oracle as oracle
from expertmesh.core import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TensorFormat,
    dequantize,
    global_shard_guard,
    quantize,
    quantize_dbias,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.quantization.quantize import dequantize_values, random_bits, rotate

CURRENT = Float8CurrentScaling().formats()
BLOCK = Float8BlockScaling().formats()
FLOAT_BLOCK = Float8BlockScaling(power_2_scale=False, amax_epsilon=2.0**-8).formats()
MX = MXFP8BlockScaling(fp8_format=Format.HYBRID).formats()
NV = NVFP4BlockScaling().formats()
# Name -> format, shape, axis, across.
SETTINGS = {
    "current": (CURRENT.x, (6, 24), -1, None),
    "current_e5m2": (CURRENT.grad_dgrad, (2, 3, 8), 0, None),
    "block": (BLOCK.x, (3, 200), -1, None),
    "block_square": (BLOCK.weight, (130, 2, 140), 0, 2),
    "block_float32": (FLOAT_BLOCK.x, (256, 5), 0, None),
    "mx": (MX.x, (5, 64), -1, None),
    "mx_e5m2": (MX.grad_dgrad, (64, 3, 2), 0, None),
    "nv": (NV.x, (3, 48), -1, None),
    "nv_square": (NV.weight, (32, 2, 48), 0, -1),
}


def codes(q):
    """Data, scale and tensor scale as unsigned integers."""

    def bits(x):
        x = np.asarray(x)
        return x.view(np.uint8 if x.dtype.itemsize == 1 else np.uint32)

    return bits(q.data), bits(q.scale), None if q.tensor_scale is None else bits(q.tensor_scale)


def assert_same(got, want):
    for part, a, b in zip(("data", "scale", "tensor_scale"), got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=part)


@functools.cache
def compiled(name, dtype):
    format, _, axis, across = SETTINGS[name]
    return jax.jit(lambda x: quantize(x, format, axis=axis, across=across))


@pytest.mark.any_device
@pytest.mark.parametrize("name", SETTINGS)
@hypothesis.settings(deadline=None, max_examples=15, derandomize=True)
@hypothesis.given(data=st.data())
def test_equals_the_oracle_bit_for_bit(name, data):
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    special = data.draw(st.sampled_from(["all", "none"]))
    shift = data.draw(st.sampled_from([0, 0, -110, 100]))  # towards the ends of float32
    format, shape, _, _ = SETTINGS[name]
    x = oracle.wild_numbers(np.random.default_rng(seed), shape, dtype, special)
    with np.errstate(all="ignore"):
        x = (x.astype(np.float64) * 2.0**shift).astype(dtype)
    q = compiled(name, dtype)(x)
    want = oracle.quantize(x, format, q.block)
    assert_same(codes(q), want.codes(format))


def both_dequantized(q):
    return dequantize(q), dequantize_values(q.data, q.scale, q.tensor_scale, block=q.block)


@pytest.mark.parametrize("name", SETTINGS)
def test_dequantize_equals_the_oracle(name):
    format, shape, _, _ = SETTINGS[name]
    x = oracle.wild_numbers(np.random.default_rng(0), shape, np.float32)
    q = compiled(name, "float32")(x)
    with np.errstate(all="ignore"):
        want = oracle.dequantize(oracle.quantize(x, format, q.block), q.block)
        want = want.astype(np.float32)
    got, again = jax.jit(both_dequantized)(q)
    np.testing.assert_array_equal(got, np.where(np.abs(want) < 2.0**-126, 0, want))
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize(
    "format, amax, byte",
    [
        (MX.x, 448.0, 127),
        (MX.x, np.nextafter(np.float32(448), np.float32(449)), 128),
        (MX.x, 0.0, 0),
        (MX.x, 1.75 * 2.0**-119, 0),
        (MX.x, 1.8 * 2.0**-119, 1),
        (MX.x, np.inf, 254),
        (MX.x, np.nan, 255),
        (MX.grad_dgrad, 57344.0, 127),
        (MX.grad_dgrad, 57345.0, 128),
    ],
)
def test_scales_of_eight_exponent_bits(format, amax, byte):
    q = quantize(jnp.zeros((1, 32)).at[0, 3].set(amax), format)
    assert codes(q)[1] == byte


@pytest.mark.parametrize(
    "name, inf, nan, others",
    [
        ("current", 448, np.nan, 1.0),
        ("current_e5m2", 57344, np.nan, 1.0),
        ("block", 448, np.nan, 1.0),
        ("mx", np.inf, np.nan, np.nan),
        ("nv", 6 * 448, np.nan, np.nan),
    ],
)
def test_what_inf_and_nan_become(name, inf, nan, others):
    """NaN takes its block along where the block's scale can say so; a finite number is never lost otherwise."""
    format, shape, axis, across = SETTINGS[name]
    for value, want in ((np.inf, inf), (-np.inf, -inf), (np.nan, nan)):
        x = jnp.ones(shape).at[0].set(value)
        np.testing.assert_array_equal(dequantize(quantize(x, format, axis=axis))[0], want)
    x = jnp.ones(shape).at[0, ..., 0].set(np.nan)
    np.testing.assert_array_equal(
        dequantize(quantize(x, format, axis=-1)).reshape(-1)[1], np.float32(others)
    )


def test_the_rotation():
    """16 blocks along a middle dimension; the rotation of both operands leaves a product as it is."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-64, 64, size=(2, 48, 3)).astype(np.float32) for _ in range(2))
    rotated = np.asarray(rotate(jnp.asarray(x), 1))
    want = np.einsum("abik,ij->abjk", x.reshape(2, 3, 16, 3), oracle.rotation())
    np.testing.assert_array_equal(rotated, want.reshape(x.shape))
    product = np.einsum("abk,abn->kn", rotated, rotate(jnp.asarray(y), 1))
    np.testing.assert_allclose(product, np.einsum("abk,abn->kn", x, y), rtol=1e-6)
    q = quantize(jnp.asarray(x), NV.x_wgrad, axis=1)
    np.testing.assert_array_equal(
        codes(q)[0], oracle.quantize(rotated, NV.x, q.block).codes(NV.x)[0]
    )
    narrow = rotate(jnp.asarray(x + 0.25).astype(jnp.bfloat16), 1)
    np.testing.assert_array_equal(narrow, narrow.astype(jnp.bfloat16))


def test_random_rounding():
    """To a neighbour, unbiased; by key and position alone."""
    format = NV.grad_dgrad
    x = np.tile(np.linspace(0, 6, 16, dtype=np.float32), (2000, 1))
    key = jax.random.key(3)
    q = jax.jit(lambda x, key: quantize(x, format, key=key))(x, key)
    y = np.asarray(q.data).astype(np.float64)  # the scales are 1: 6 is the largest number
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for column, number in zip(y.T, x[0], strict=True):
        assert set(column) == {max(grid[grid <= number]), min(grid[grid >= number])}
    assert np.abs(y.mean(0) - x[0]).max() < 0.09  # 4 deviations of a mean of 2000 steps of 2
    same = jax.jit(lambda x, key: quantize(x, format, key=key))(x, jax.random.key_data(key))
    assert_same(codes(q), codes(same))
    other = quantize(x, format, key=jax.random.key(4))
    assert np.mean(codes(other)[0] != codes(q)[0]) > 0.2


def test_random_bits_differ_everywhere():
    bits = np.asarray(random_bits(jnp.array([1, 2], jnp.uint32), (3, 11, 7)))
    assert len(np.unique(bits)) == bits.size


def mesh_of(kind, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


LAYOUTS = [
    # format, key, axis, batch_dims, spec, specs of data, scale and tensor_scale, axes of the amax
    (CURRENT.x, False, -1, 0, P("a", None, "b"), P("a", None, "b"), P(), None, 8),
    (CURRENT.weight, False, -1, 1, P("b", "a"), P("b", "a"), P("b"), None, 2),
    (CURRENT.weight, False, -1, 1, P(("a", "b")), P(("a", "b")), P(("a", "b")), None, 0),
    (BLOCK.weight, False, 1, 0, P(None, "a", "b"), P(None, "a", "b"), P(None, "a", "b"), None, 0),
    (MX.x, False, 1, 0, P("a", "b"), P("a", "b"), P("a", "b"), None, 0),
    (NV.grad_wgrad, True, 1, 1, P("b", "a"), P("b", "a"), P("b", "a"), P("b"), 2),
]


@pytest.mark.parametrize(
    "kind, format, key, axis, batch, spec, data, scale, tensor, group",
    [(AxisType.Explicit, *LAYOUTS[i]) for i in (5,)]
    + [(AxisType.Auto, *LAYOUTS[i]) for i in (1,)]
    + [full(AxisType.Explicit, *LAYOUTS[i]) for i in range(5)]
    + [full(AxisType.Auto, *LAYOUTS[i]) for i in (0, 2, 3, 4, 5)],
)
def test_layouts_change_no_bit(kind, format, key, axis, batch, spec, data, scale, tensor, group):
    """Each shard is quantized where it is; what crosses devices is the amax, over the axes that split the tensor."""
    mesh = mesh_of(kind, a=2, b=4)
    shape = (2, 256, 512) if format is BLOCK.weight else (8, 128, 64)
    x = oracle.wild_numbers(np.random.default_rng(1), shape, np.float32, "none")
    key = jax.random.key(0) if key else None

    @jax.jit
    def function(x):
        return quantize(x, format, axis=axis, across=2, batch_dims=batch, key=key)

    placed = put(mesh, x, *spec)
    q = function(placed)
    assert_same(codes(q), codes(function(x)))
    for part, want in ((q.data, data), (q.scale, scale), (q.tensor_scale, tensor)):
        if want is not None:
            assert part.sharding.is_equivalent_to(NamedSharding(mesh, want), part.ndim)
    found = collectives(function.lower(placed).compile().as_text())
    assert [(c.kind, len(c.groups[0])) for c in found] == [("all-reduce", group)] * bool(group)
    np.testing.assert_array_equal(dequantize(q), dequantize(function(x)))


def test_the_layout_of_auto_axes_under_a_resource():
    mesh = mesh_of(AxisType.Auto, fsdp=2, tp=4)
    x = put(mesh, np.ones((64, 256), np.float32), "fsdp", "tp")
    function = jax.jit(lambda x: quantize(x, MX.x, spec=P("fsdp", "tp")))
    with global_shard_guard(MeshResource(fsdp_resource="fsdp", tp_resource="tp")):
        q = function(x)
        assert not collectives(function.lower(x).compile().as_text())
        assert q.scale.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)
        y = jax.jit(lambda q: dequantize(q, spec=P("fsdp", "tp")))(q)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto, "resource"])
def test_a_block_on_two_shards(kind):
    """Over Auto axes the compiler chooses the layout, and reports the error."""
    mesh = mesh_of(AxisType.Auto if kind == "resource" else kind, fsdp=2)
    x = put(mesh, np.ones((4, 192), np.float32), None, "fsdp")
    resource = MeshResource(fsdp_resource="fsdp") if kind == "resource" else None
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with global_shard_guard(resource), pytest.raises(error) as info:
        jax.jit(lambda x: quantize(x, BLOCK.x, spec=resource and P(None, "fsdp")))(x)
    words = ["quantize", "whole blocks", "(4, 192)", "dim=1", "192", "128", "'fsdp'"]
    assert all(word in str(info.value) for word in words)


def test_dbias_is_summed_over_the_axes_of_the_rows_only():
    mesh = mesh_of(AxisType.Explicit, a=2, b=2, c=2)
    x = np.arange(4 * 2 * 64, dtype=np.float32).reshape(4, 2, 64)
    placed = put(mesh, x, "a", None, "b")
    function = jax.jit(lambda x: quantize_dbias(x, MX.x, feature_dims=1))
    q, dbias = function(placed)
    np.testing.assert_array_equal(dbias, x.sum((0, 1)))
    assert dbias.sharding.spec == P("b")
    assert_same(codes(q), codes(quantize(x, MX.x)))
    [found] = collectives(function.lower(placed).compile().as_text())
    assert found.kind == "all-reduce" and len(found.groups[0]) == 2


def test_dbias_is_summed_in_float32():
    """257 is no bfloat16."""
    x = jnp.ones((257, 32), jnp.bfloat16)
    np.testing.assert_array_equal(quantize_dbias(x, MX.x, dbias_dtype=jnp.float32)[1], 257.0)
    assert quantize_dbias(x, MX.x)[1].dtype == jnp.bfloat16


def test_a_given_multiplier():
    x = jnp.array([[1.0, -2.0, 300.0]])
    q = quantize(x, CURRENT.x, multiplier=jnp.float32(2))
    np.testing.assert_array_equal(q.data, [[2.0, -4.0, 448.0]])
    assert q.scale == 0.5


def test_there_is_no_derivative():
    x = jnp.ones((2, 32))
    q = quantize(x, MX.x)
    for function, operand in (
        (lambda x: quantize(x, MX.x).data, x),
        (lambda x: quantize_dbias(x, MX.x)[1], x),
        (lambda data: dequantize(dataclasses.replace(q, data=data)), q.data),
    ):
        with pytest.raises(NotImplementedError, match="it has no derivative.*use dense"):
            jax.vjp(function, operand)


@pytest.mark.parametrize(
    "format, across, batch, spec",
    [
        full(MX.x, None, 0, P(("dp", "fsdp", "ep"))),
        (CURRENT.x, None, 0, P(("dp", "fsdp", "ep"))),
        (BLOCK.weight, 2, 1, P("ep", "fsdp")),
        full(NV.x, None, 1, P("ep", "fsdp")),
    ],
)
def test_roles_are_those_of_quantize(format, across, batch, spec):
    """Without a spec, under a MeshResource, rows are tokens and kernels are weights: nothing moves."""
    mesh = mesh_of(AxisType.Auto, dp=2, fsdp=2, ep=2)
    axes = dict(axis=1 if batch else -1, across=across, batch_dims=batch)
    q = quantize(jnp.ones((8, 256, 128)), format, **axes)
    scales = spec if q.block else P(*spec[:batch])
    q = dataclasses.replace(
        q,
        data=put(mesh, q.data, *spec),
        scale=put(mesh, q.scale, *scales),
        tensor_scale=None if q.tensor_scale is None else put(mesh, q.tensor_scale, *spec[:batch]),
    )
    roles = MeshResource(dp_resource="dp", fsdp_resource="fsdp", ep_resource="ep")
    with global_shard_guard(roles):
        compiled = jax.jit(dequantize).lower(q).compile()
    assert not collectives(compiled.as_text())
    assert compiled.output_shardings.is_equivalent_to(q.data.sharding, 3)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: quantize(x, MX.x, axis=0), ValueError, ["dimension 0", "48", "32", "pad"]),
        (lambda x: quantize(x, NV.x, axis=1), ValueError, ["dimension 1", "40", "16", "pad"]),
        (lambda x: quantize(x, NV.weight, axis=0), ValueError, ["across", "(16, 16)"]),
        (lambda x: quantize(x, NV.weight, axis=0, across=0), ValueError, ["across=0"]),
        (lambda x: quantize(x, MX.x, axis=2), ValueError, ["axis=2"]),
        (lambda x: quantize(x, CURRENT.x, batch_dims=3), ValueError, ["batch_dims=3"]),
        (lambda x: quantize(x, BLOCK.x, axis=0, batch_dims=1), ValueError, ["batch_dims=1"]),
        (lambda x: quantize(x, NV.grad_dgrad, axis=0), ValueError, ["key=None", "jax.random.key"]),
        (lambda x: quantize(x, BLOCK.x, multiplier=1.0), ValueError, ["multiplier", "block"]),
        (lambda x: quantize(x, CURRENT.x, multiplier=x[0]), ValueError, ["(40,)", "init_delayed"]),
        (lambda x: quantize(x.astype(int), CURRENT.x), TypeError, ["int32", "bfloat16"]),
        (lambda x: quantize(x, Float8BlockScaling()), TypeError, ["TensorFormat", "formats()"]),
        (lambda x: quantize(x, NV.grad_dgrad, axis=0, key=x), TypeError, ["float32", "uint32[2]"]),
        (lambda x: quantize_dbias(x, CURRENT.x, feature_dims=3), ValueError, ["feature_dims=3"]),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call(jnp.ones((48, 40)))
    assert all(word in str(info.value) for word in ["quantize", *words])


def test_empty_and_scalar_operands():
    q = quantize(jnp.zeros((0, 32), jnp.bfloat16), MX.x)
    assert q.data.shape == (0, 32) and q.scale.shape == (0, 1)
    assert dequantize(q).shape == (0, 32) and dequantize(q).dtype == jnp.bfloat16
    q = quantize(jnp.zeros((0, 32)), CURRENT.x)
    assert q.scale == 1
    np.testing.assert_array_equal(dequantize(quantize(jnp.float32(3), CURRENT.x)), 3.0)


def test_half_precision():
    x = np.array([[65504, 6e-8, -1.5, 0] * 8], np.float16)
    q = quantize(x, MX.x)
    assert_same(codes(q), oracle.quantize(x, MX.x, q.block).codes(MX.x))
    assert ml_dtypes.finfo(q.dtype).bits == 16


@pytest.mark.any_device
@pytest.mark.parametrize(
    "scale, multipliers",
    # 448 / 2^-8, or 448 / 1.5 * 2^12; a scale in float32 keeps to what float16 holds.
    [("power_of_2", [2.0**16, 2.0**20]), ("float32", [65504.0, 65504.0])],
)
def test_small_blocks_in_half_precision(scale, multipliers):
    format = TensorFormat(dtype="float8_e4m3fn", block=(1, 8), scale=scale)
    x = np.array([[2.0**-8] * 8, [1.5 * 2.0**-12, 0] * 4], np.float16)
    q = quantize(x, format)
    assert_same(codes(q), oracle.quantize(x, format, q.block).codes(format))
    np.testing.assert_allclose(1 / np.asarray(q.scale)[:, 0], multipliers, rtol=1e-6)


def test_a_format_of_ones_own():
    """Other blocks than the recipes'."""
    format = TensorFormat(dtype="float8_e4m3fn", block=(2, 8), scale="float8_e8m0fnu")
    x = oracle.wild_numbers(np.random.default_rng(3), (4, 16), np.float32)
    q = quantize(x, format, axis=-1, across=0)
    assert_same(codes(q), oracle.quantize(x, format, (2, 8)).codes(format))
