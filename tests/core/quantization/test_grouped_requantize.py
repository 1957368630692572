"""grouped_requantize: the bits of both steps in NumPy, layouts, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from core import quantize_oracle as oracle
from expertmesh.core import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MeshResource,
    MXFP8BlockScaling,
    dequantize,
    global_shard_guard,
    grouped_quantize,
    quantize,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.grouped_requantize import grouped_requantize, move_quantized
from expertmesh.core.quantization.quantize_rows import Moved, read_in_place, written

MX = MXFP8BlockScaling().formats().x
BLOCK = Float8BlockScaling().formats().x
EXACT = Float8BlockScaling(power_2_scale=False).formats().x
CURRENT = Float8CurrentScaling().formats().x


def operands(format, width=64):
    """[2, 96, width] quantized along its width, magnitudes by rows, and sizes; rows from 64 on are padding."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 96, width)) * 2.0 ** rng.integers(-8, 9, size=(2, 96, 1))
    sizes = jnp.asarray([[32, 0, 32], [0, 64, 0]], jnp.int32)
    return quantize(jnp.asarray(x, jnp.bfloat16), format), sizes


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("format", [MX, BLOCK, EXACT], ids=lambda f: f.scale)
def test_bits_of_both_steps(format):
    q, sizes = operands(format)
    got = grouped_requantize(q, sizes, format)
    scale = np.repeat(np.asarray(q.scale, np.float64), format.block[1], axis=2)[..., : q.shape[2]]
    wide = (np.asarray(q.data, np.float64) * scale).astype(np.float32)
    wide = np.array(jnp.asarray(wide).astype(jnp.bfloat16))
    wide[:, 64:] = 0
    assert got.block == (1, format.block[1], 1) and got.dtype == "bfloat16"
    data, scale, _ = oracle.quantize(wide, format, got.block).codes(format)
    np.testing.assert_array_equal(bits(got.data), data)
    np.testing.assert_array_equal(np.asarray(got.scale).view(scale.dtype), scale)


@pytest.mark.parametrize("format", [CURRENT, MX], ids=lambda f: f.scale)
def test_formats_that_are_not_made_at_once(format):
    q, sizes = operands(BLOCK)
    got = grouped_requantize(q, sizes, format)
    want = grouped_quantize(dequantize(q), sizes, format, axis=1)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("format", [MX, BLOCK, EXACT], ids=lambda f: f.scale)
def test_rows_of_tokens(format, other):
    """The bits of the tokens' data and scales, and of the moved rows quantized again; zeros where there is no token."""
    tokens, sizes = operands(format)
    tokens = jax.tree.map(lambda x: x[:, :48], tokens)
    source = np.random.default_rng(1).integers(0, 96, (2, 96)).astype(np.int32)
    source[:, ::7] = -1
    row_map = RowMap(jnp.zeros((2, 48, 2), jnp.int32), jnp.asarray(source))
    again = (BLOCK if format is MX else MX) if other else format
    rows = Moved(tokens, row_map)
    moved = jax.jit(move_quantized)(rows)
    second = jax.jit(grouped_requantize, static_argnums=2)(rows, sizes, again)
    for p, part in ((p, part) for p in range(2) for part in ("data", "scale")):
        want = bits(getattr(tokens, part))[p][source[p] // 2].copy()
        want[source[p] < 0] = 0
        for got in (moved, written(rows)):
            np.testing.assert_array_equal(bits(getattr(got, part))[p], want)
    want = grouped_requantize(moved, sizes, again)
    assert jax.tree.structure(second) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(second), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@covering("kind", [AxisType.Explicit, AxisType.Auto], covers=[AxisType.Explicit])
def test_layouts(kind):
    """Participants and features split, no communication; the same bits."""
    q, sizes = operands(MX, width=128)
    want = grouped_requantize(q, sizes, MX)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    of_q = P("fsdp", None, "tp")
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        placed = jax.device_put(q, NamedSharding(mesh, of_q))
        groups = jax.device_put(sizes, NamedSharding(mesh, P("fsdp")))
        function = jax.jit(lambda q, s: grouped_requantize(q, s, MX, spec=of_q))
        got = function(placed, groups)
        assert not collectives(function.lower(placed, groups).compile().as_text())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


def test_errors():
    q, sizes = operands(MX)
    with pytest.raises(TypeError, match="must be a QuantizedArray; got"):
        grouped_requantize(q.data, sizes, MX)
    with pytest.raises(ValueError, match=r"group_sizes \[P, G\] with the same P"):
        grouped_requantize(q, sizes[:1], MX)
    few = jax.tree.map(lambda x: x[:, :80], q)
    with pytest.raises(ValueError, match="multiple of the block, 32"):
        grouped_requantize(few, sizes, MX)


@pytest.mark.parametrize("width, pays", [(1024, True), (1152, False)])
def test_which_rows_are_read_in_place(width, pays):
    """By what was measured, see docs/dev/kernels.md."""
    assert read_in_place(BLOCK, width) == pays
    assert not read_in_place(MX, 128)
