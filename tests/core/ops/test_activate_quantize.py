"""activate_quantize: the two layers' bits, against loops over blocks; rows of no group, layouts, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from core import quantize_oracle as oracle
from expertmesh.core import (
    Activation,
    Float8BlockScaling,
    Float8CurrentScaling,
    MeshResource,
    MXFP8BlockScaling,
    activate,
    dequantize,
    global_shard_guard,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.ops.activate_quantize import activate_quantize

GPT_OSS = Activation(function="quick_gelu", limit=7.0, up_offset=1.0)
MX = MXFP8BlockScaling().formats().x
BLOCK = Float8BlockScaling().formats().x


def operands(width=64):
    """h [2, 96, 2, width] and sizes; NaN in the rows of no group."""
    rng = np.random.default_rng(0)
    sizes = np.array([[32, 0, 32], [0, 64, 0]], np.int32)
    h = rng.normal(size=(2, 96, 2, width)) * 2.0 ** rng.integers(-5, 6, size=(2, 96, 1, 1))
    h[:, 64:] = np.nan
    return jnp.asarray(h, jnp.bfloat16), sizes


@covering(
    "format, activation",
    [MX, BLOCK],
    ["silu", "gelu", GPT_OSS],
    covers=[(MX, "gelu"), (BLOCK, "silu"), (MX, GPT_OSS)],
)
def test_copies_are_those_of_the_activation(format, activation):
    h, sizes = operands()
    a = np.array(activate(h, activation))
    a[:, 64:] = 0
    pair = activate_quantize(h, sizes, (format, format), activation)
    for q, axis in zip(pair, (2, 1), strict=True):
        block = tuple(format.block[1] if dim == axis else 1 for dim in range(3))
        assert q.block == block and q.dtype == "bfloat16"
        data, scale, _ = oracle.quantize(a, format, block).codes(format)
        np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), data)
        np.testing.assert_array_equal(np.asarray(q.scale).view(scale.dtype), scale)


def test_formats_that_are_not_made_at_once():
    h, sizes = operands()
    formats = Float8CurrentScaling().formats()
    a = np.nan_to_num(np.asarray(activate(h, "silu"), np.float64))
    for q in activate_quantize(h, sizes, (formats.x, MX), "silu"):
        back = np.asarray(dequantize(q), np.float64)
        assert np.linalg.norm(back - a) < 0.05 * np.linalg.norm(a)


@covering("kind", [AxisType.Explicit, AxisType.Auto], covers=[AxisType.Explicit])
def test_layouts(kind):
    """Participants and features split, no communication; the same bits."""
    h, sizes = operands(width=128)
    want = activate_quantize(h, sizes, (MX, MX), "silu")
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    specs = P("fsdp", None, None, "tp"), P("fsdp")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((h, sizes), specs, strict=True)
        ]
        function = jax.jit(
            lambda h, s: activate_quantize(h, s, (MX, MX), "silu", spec=P("fsdp", None, "tp"))
        )
        resource = MeshResource(fsdp_resource="fsdp", tp_resource="tp")
        with global_shard_guard(resource):
            got = function(*placed)
            assert not collectives(function.lower(*placed).compile().as_text())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def test_errors():
    h, sizes = operands(width=48)
    with pytest.raises(ValueError, match="multiple of the block, 32"):
        activate_quantize(h, sizes, (MX, MX), "silu")
    with pytest.raises(ValueError, match="2, F"):
        activate_quantize(h[:, :, 0], sizes, (MX, MX), "silu")
    with pytest.raises(ValueError, match="gate"):
        activate_quantize(h, sizes, (MX, MX), Activation(gated=False))
