"""quantize_moved: one scale for the tokens that have a row, and their data, against NumPy; rows and copies of these."""

import dataclasses

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
    MeshResource,
    TensorFormat,
    dequantize,
    global_shard_guard,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.grouped_requantize import move_quantized
from expertmesh.core.quantization.quantize_moved import quantize_moved
from expertmesh.core.quantization.quantize_rows import Moved
from multiprocess_runner import on_gpu

FORMATS = [TensorFormat(dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")]
T, K, PLACES = 90, 208, 3
SIZES = jnp.asarray([[96, 0, 64]], jnp.int32)
LIVE, C = 160, 272


def rows_of(dtype="bfloat16", fill=np.nan, participants=1):
    """Rows of tokens of wild magnitudes; the largest of all is `fill`, of two tokens that have no row."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(participants, T, K)) * 2.0 ** rng.integers(-9, 9, (participants, T, 1))
    x[:, ::44] = fill
    source, row = np.full((participants, C), -1, np.int32), np.full((participants, T, PLACES), -1)
    held = np.setdiff1d(np.arange(T), np.arange(T)[::44])
    for p in range(participants):
        at = np.sort(rng.permutation(LIVE)[:120])
        place = rng.permutation([t * PLACES + k for t in held for k in range(PLACES)])[:120]
        source[p, at], row[p].ravel()[place] = place, at
    row_map = RowMap(jnp.asarray(row, jnp.int32), jnp.asarray(source))
    return Moved(jnp.asarray(x, dtype), row_map), source // PLACES


def codes(x):
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


@pytest.mark.any_device
@pytest.mark.parametrize("fill", [np.nan, np.inf, 3e6], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.dtype)
def test_bits(format, dtype, fill):
    """The scale and the data of tokens with rows; rows are these bytes."""
    rows, token = rows_of(dtype, fill)

    def all_of(rows):
        moved = quantize_moved(rows, SIZES, format)
        return moved.base, move_quantized(moved)

    jitted = jax.jit(all_of)
    assert not on_gpu() or "expertmesh_core_launch" in jitted.lower(rows).as_text()
    (q, moved), again = jitted(rows), jitted(rows)
    np.testing.assert_array_equal(codes(q.data), codes(again[0].data))
    x, has_row = np.asarray(rows.base, np.float32), np.unique(token[token >= 0])
    want = oracle.quantize(x[0][has_row], format, ()).codes(format)
    np.testing.assert_array_equal(codes(q.data)[0, has_row], want[0])
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint32), np.full((1, 3), want[1]))
    at = np.where(token[0, :LIVE] >= 0, token[0, :LIVE], 0)
    expected = np.where(token[0, :LIVE, None] < 0, 0, codes(q.data)[0, at])
    assert moved.block == () and moved.format == format and moved.dtype == dtype
    np.testing.assert_array_equal(codes(moved.data)[0, :LIVE], expected)
    np.testing.assert_array_equal(moved.scale, q.scale)
    np.testing.assert_array_equal(moved.group_sizes, SIZES)
    wide = np.asarray(dequantize(moved), np.float32)[0, :LIVE]
    exact = np.where(token[0, :LIVE, None] < 0, 0, x[0, at])
    limit = np.abs(x[0][has_row]).max() * 2.0 ** -(4 if "4m3" in format.dtype else 3)
    assert np.abs(wide - exact).max() <= limit


def test_tokens_without_rows_and_zeros():
    """No token has a row: the amax is 0; a token that is NaN makes the data NaN, and the scale 1."""
    rows, token = rows_of(fill=3e6)
    none = jax.tree.map(lambda x: jnp.full_like(x, -1), rows.row_map)
    q = quantize_moved(dataclasses.replace(rows, row_map=none), SIZES, FORMATS[0]).base
    zeros = dataclasses.replace(rows, base=jnp.zeros_like(rows.base))
    of_zeros = quantize_moved(zeros, SIZES, FORMATS[0]).base
    np.testing.assert_array_equal(q.scale, of_zeros.scale)
    assert np.isfinite(q.scale).all() and not codes(of_zeros.data).any()
    broken = rows.base.at[0, token[0].max(), 3].set(jnp.nan)
    q = quantize_moved(dataclasses.replace(rows, base=broken), SIZES, FORMATS[0]).base
    np.testing.assert_array_equal(q.scale, 1)
    assert np.isnan(np.asarray(q.data, np.float32)[0, token[0].max(), 3])


@covering("kind", [AxisType.Explicit, AxisType.Auto], covers=[AxisType.Explicit])
def test_layouts(kind):
    """Participants split, each with a scale of its own, no communication; the same bits."""
    rows, _ = rows_of(participants=2)
    sizes = jnp.tile(SIZES, (2, 1))

    def both(rows, sizes):
        moved = quantize_moved(rows, sizes, FORMATS[0])
        return moved, move_quantized(moved)

    want = jax.jit(both)(rows, sizes)
    assert len(np.unique(want[0].base.scale)) == 2
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        placed = jax.device_put((rows, sizes), NamedSharding(mesh, P("fsdp")))
        function = jax.jit(both)
        got = function(*placed)
        assert not collectives(function.lower(*placed).compile().as_text())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(codes(x), codes(y))


def test_errors():
    rows, _ = rows_of()
    with pytest.raises(ValueError, match=r"group_sizes \[P, G\] with the same P"):
        quantize_moved(rows, jnp.tile(SIZES, (2, 1)), FORMATS[0])
    with pytest.raises(TypeError, match="quantize_moved: x must be"):
        quantize_moved(dataclasses.replace(rows, base=rows.row_map.source), SIZES, FORMATS[0])
    with pytest.raises(ValueError, match="must be without blocks; got"):
        quantize_moved(rows, SIZES, Float8BlockScaling().formats().x)
    with pytest.raises(NotImplementedError, match="use grouped_dense"):
        jax.grad(
            lambda x: quantize_moved(
                dataclasses.replace(rows, base=x), SIZES, FORMATS[0]
            ).base.scale.sum()
        )(rows.base)
