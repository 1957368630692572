"""grouped_quantize: each group as if alone, padding rows nowhere, layouts, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import full
from core import quantize_oracle as oracle
from expertmesh.core import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    dequantize,
    global_shard_guard,
    grouped_quantize,
    quantize,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved, grouped_quantize_both

CURRENT = Float8CurrentScaling().formats()
BLOCK = Float8BlockScaling().formats()
MX = MXFP8BlockScaling().formats()
NV = NVFP4BlockScaling().formats()


def operands(participants=2, rows=96, seed=0):
    """Groups of 32, 0 and 48 rows, each 2^9 times the one before; NaN and Inf in the padding rows."""
    rng = np.random.default_rng(seed)
    sizes = np.tile(np.array([[32, 0, 48]], np.int32), (participants, 1))
    sizes[-1] = [0, 64, 0]
    x = rng.normal(size=(participants, rows, 2, 16)).astype(np.float32)
    for p in range(participants):
        ends = np.cumsum(sizes[p])
        for g in range(3):
            x[p, ends[g] - sizes[p, g] : ends[g]] *= 2.0 ** (9 * g)
        x[p, ends[-1] :] = np.nan
        x[p, ends[-1] + 1 :] = np.inf
    return x, sizes


def by_group(x, sizes, format, axis):
    """Dequantized numbers, and the codes of the data, of each group quantized alone."""
    values, data = np.zeros(x.shape), np.zeros(x.shape, np.uint8)
    for p in range(len(x)):
        ends = np.cumsum(sizes[p])
        for g, end in enumerate(ends):
            rows = x[p, end - sizes[p, g] : end]
            block = [1] * rows.ndim
            if format.block:
                block[axis - 1 if axis > 0 else axis] = format.block[1]
            q = oracle.quantize(rows, format, tuple(block))
            values[p, end - sizes[p, g] : end] = oracle.dequantize(q, block if format.block else ())
            data[p, end - sizes[p, g] : end] = q.codes(format)[0]
    return values, data


@pytest.mark.any_device
@pytest.mark.parametrize(
    "format, axis",
    [
        (CURRENT.grad_dgrad, -1),
        full(BLOCK.x, -1),
        (MX.x, 1),
        full(NV.x, -1),
        (NV.x, 1),
    ],
)
def test_each_group_as_if_alone(format, axis):
    """Where blocks lie along the rows, a padding row may share one with the last group."""
    x, sizes = operands()
    x = x if format is not MX.x else x[:, :, :, :1]
    q = jax.jit(lambda x, sizes: grouped_quantize(x, sizes, format, axis=axis))(x, sizes)
    values, data = by_group(x, sizes, format, axis)
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), data)
    np.testing.assert_array_equal(dequantize(q), values.astype(np.float32))
    assert (q.group_sizes is not None) == (format.block is None or format is NV.x)


def test_a_partial_last_block_of_rows_and_no_group_with_rows():
    x, sizes = operands()
    q = grouped_quantize(x, 0 * sizes, BLOCK.x, axis=1)
    np.testing.assert_array_equal(q.scale, np.ones((2, 1, 2, 16)))
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), 0)


@pytest.mark.parametrize(
    "kind, format, scale",
    [
        full(AxisType.Explicit, NV.grad_wgrad, P("a", None, "b")),
        full(AxisType.Auto, CURRENT.x, P("a")),
    ],
)
def test_layouts_change_no_bit(kind, format, scale):
    """P over a, K over b: the amax of a group crosses b only. Random rounding too."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    x, sizes = operands(4)
    key = jax.random.key(0)
    function = jax.jit(lambda x, sizes: grouped_quantize(x, sizes, format, axis=1, key=key))
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((x, P("a", None, "b")), (sizes, P("a")))
    ]
    got, want = function(*placed), function(x, sizes)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert got.scale.sharding.is_equivalent_to(NamedSharding(mesh, scale), got.scale.ndim)
    [found] = collectives(function.lower(*placed).compile().as_text())
    assert (found.kind, len(found.groups[0])) == ("all-reduce", 2)
    np.testing.assert_array_equal(jax.jit(dequantize)(got), dequantize(want))


@pytest.mark.parametrize(
    "format", [full(BLOCK.x), MX.x, full(CURRENT.x), full(NV.x)], ids=lambda f: f.scale
)
def test_both_ways_are_each_way_alone(format):
    """P over a, no bit differs; padding rows and a partial block among them."""
    x, sizes = operands(4)
    x = np.concatenate([x, x], axis=-1).reshape(4, 96, -1)[..., :64]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    placed = [jax.device_put(a, NamedSharding(mesh, P("a"))) for a in (x, sizes)]
    both = jax.jit(lambda x, sizes: grouped_quantize_both(x, sizes, (format, format)))(*placed)
    for q, axis in zip(both[:2], (2, 1), strict=True):
        want = grouped_quantize(x, sizes, format, axis=axis)
        assert jax.tree.structure(q) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert q.data.sharding.spec == P("a", None, None)


def token_rows(rng, num_tokens, top_k, num_rows):
    """A map of tokens to rows, whose last ones and some between hold none, by counting."""
    places = rng.permutation(num_rows - 9)[: num_tokens * top_k - 3]
    source = np.full(num_rows, -1, np.int32)
    source[places] = rng.permutation(num_tokens * top_k)[: len(places)]
    row = np.full(num_tokens * top_k, -1, np.int32)
    row[source[source >= 0]] = np.flatnonzero(source >= 0)
    return RowMap(jnp.asarray(row.reshape(1, num_tokens, top_k)), jnp.asarray(source[None]))


@pytest.mark.parametrize(
    "formats",
    [
        (BLOCK.x,) * 2,
        (MX.x,) * 2,
        (CURRENT.x,) * 2,
        (CURRENT.x, None),
        (CURRENT.x, CURRENT.grad_dgrad),
        (NV.x, None),
    ],
)
def test_rows_of_tokens_where_they_are(formats):
    """As of rows that are written first, whatever tokens hold that no row is of."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(1, 20, 256)).astype(np.float32) * 2.0 ** rng.integers(-9, 9, (1, 20, 1))
    row_map = token_rows(rng, 20, 3, 128)
    source = np.asarray(row_map.source)[0]
    x[:, sorted({*range(20)} - {*(source[source >= 0] // 3)})] = np.nan
    rows = np.where(source[None, :, None] >= 0, x[:, source // 3], 0)
    sizes = jnp.asarray([[64, 0, 64]], jnp.int32)
    got = grouped_quantize_both(Moved(jnp.asarray(x), row_map), sizes, formats)
    if formats[1] is not None:
        alone = grouped_quantize_both(Moved(jnp.asarray(x), row_map), sizes, (None, formats[1]))
        jax.tree.map(np.testing.assert_array_equal, bits(alone)[1], bits(got)[1])
    want = grouped_quantize_both(jnp.asarray(rows), sizes, formats)
    jax.tree.map(np.testing.assert_array_equal, bits(got), bits(want))


def bits(copies):
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), copies[:2])


def test_the_layout_of_auto_axes_under_a_resource():
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2)
    x, sizes = operands(8)
    placed = [jax.device_put(a, NamedSharding(mesh, P(("fsdp", "ep")))) for a in (x, sizes)]
    function = jax.jit(lambda x, sizes: grouped_quantize(x, sizes, CURRENT.x))
    with global_shard_guard(MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
        q = function(*placed)
        assert not collectives(function.lower(*placed).compile().as_text())
        y = jax.jit(dequantize)(q)
    np.testing.assert_array_equal(y, dequantize(grouped_quantize(x, sizes, CURRENT.x)))


def test_an_axis_that_shards_the_rows():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    x, sizes = operands()
    x = jax.device_put(x, NamedSharding(mesh, P(None, "a")))
    with pytest.warns(RuntimeWarning, match="grouped_quantize: axis 'a'"):
        q = grouped_quantize(x, sizes, CURRENT.x)
    want = grouped_quantize(np.asarray(x), sizes, CURRENT.x)
    np.testing.assert_array_equal(q.scale, want.scale)


def test_a_block_on_two_shards():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    x = jax.device_put(np.ones((1, 4, 48), np.float32), NamedSharding(mesh, P(None, None, "a")))
    with pytest.raises(
        ValueError, match=r"grouped_quantize: a shard must hold whole.*dim=2.*16.*'a'"
    ):
        grouped_quantize(x, np.array([[4]]), NV.x)


def test_a_given_multiplier():
    x, sizes = operands()
    multiplier = 2.0 ** np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    q = grouped_quantize(x, sizes, CURRENT.x, multiplier=multiplier)
    np.testing.assert_array_equal(q.scale, 1 / multiplier)
    alone = quantize(x[0, 32:80], CURRENT.x, multiplier=multiplier[0, 2])
    np.testing.assert_array_equal(q.data[0, 32:80].view(np.uint8), alone.data.view(np.uint8))


def test_starts_are_checked_in_debug_mode():
    x = jnp.ones((1, 64, 4))

    def function(sizes):
        return grouped_quantize(x, sizes, MX.x, axis=1, debug=True).data

    checked = jax.jit(checkify.checkify(function))
    assert checked(jnp.array([[32, 0, 20]]))[0].get() is None
    assert "multiples of the block, 32" in checked(jnp.array([[20, 32]]))[0].get()


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, n: grouped_quantize(x[0], n, CURRENT.x), ValueError, ["[P, C, *K]", "(40, 16)"]),
        (lambda x, n: grouped_quantize(x, n[0], CURRENT.x), ValueError, ["[P, G]", "(2,)"]),
        (lambda x, n: grouped_quantize(x, n[:1], CURRENT.x), ValueError, ["same P", "(1, 2)"]),
        (lambda x, n: grouped_quantize(x, n * 1.0, CURRENT.x), TypeError, ["float32", "int32"]),
        (lambda x, n: grouped_quantize(x, n, MX.x, axis=1), ValueError, ["40", "32", "pad"]),
        (lambda x, n: grouped_quantize(x, n, MX.x), ValueError, ["16", "32", "pad"]),
        (lambda x, n: grouped_quantize(x, n, NV.weight), ValueError, ["across", "(16, 16)"]),
        (lambda x, n: grouped_quantize(x, n, MX.x, axis=0), ValueError, ["axis=0", "(2, 40, 16)"]),
        (lambda x, n: grouped_quantize(x, n, NV.grad_dgrad), ValueError, ["key=None"]),
        (lambda x, n: grouped_quantize(x, n, CURRENT.x, multiplier=1.0), ValueError, ["(2, 2)"]),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call(jnp.ones((2, 40, 16)), jnp.ones((2, 2), jnp.int32))
    assert all(word in str(info.value) for word in ["grouped_quantize", *words])


def test_no_rows_and_no_derivative():
    q = grouped_quantize(jnp.ones((2, 0, 32)), jnp.zeros((2, 3), jnp.int32), CURRENT.x)
    np.testing.assert_array_equal(q.scale, np.ones((2, 3)))
    with pytest.raises(NotImplementedError, match="grouped_quantize: it has no derivative"):
        jax.vjp(
            lambda x: grouped_quantize(x, jnp.ones((1, 1), int), MX.x).data, jnp.ones((1, 4, 32))
        )
