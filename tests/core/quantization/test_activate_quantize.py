"""activate_quantize and its gradient: the layers' bits, against loops over blocks; layouts, errors."""

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
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize

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


def cotangent(h):
    """Of the activation, NaN in the rows of no group."""
    d = np.array(np.random.default_rng(1).normal(size=(*h.shape[:2], h.shape[3])))
    d[:, 64:] = np.nan
    return jnp.asarray(d, jnp.bfloat16)


CASES = covering(
    "format, activation",
    [MX, BLOCK],
    ["silu", "gelu", GPT_OSS],
    covers=[(MX, "gelu"), (BLOCK, "silu"), (MX, GPT_OSS)],
)


def check_copies(pair, x, format):
    """Both are those of `x`, whose rows from 64 on are of no group, along its last dimension and its rows."""
    x = np.array(x)
    x[:, 64:] = 0
    for q, axis in zip(pair, (x.ndim - 1, 1), strict=True):
        block = tuple(format.block[1] if dim == axis else 1 for dim in range(x.ndim))
        assert q.block == block and q.dtype == "bfloat16"
        data, scale, _ = oracle.quantize(x, format, block).codes(format)
        np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), data)
        np.testing.assert_array_equal(np.asarray(q.scale).view(scale.dtype), scale)


@CASES
def test_copies_are_those_of_the_activation(format, activation):
    h, sizes = operands()
    pair = activate_quantize(h, sizes, (format, format), activation)
    check_copies(pair, activate(h, activation), format)


@CASES
def test_copies_are_those_of_the_gradient(format, activation):
    h, sizes = operands()
    d = cotangent(h)
    pair = activate_grad_quantize(h, d, sizes, (format, format), activation)
    check_copies(pair, jax.vjp(lambda h: activate(h, activation), h)[1](d)[0], format)


def test_formats_that_are_not_made_at_once():
    h, sizes = operands()
    x, d = Float8CurrentScaling().formats().x, cotangent(h)
    a, pull = jax.vjp(lambda h: activate(h, "silu"), h)
    for want, pair in (
        (a, activate_quantize(h, sizes, (x, MX), "silu")),
        (pull(d)[0], activate_grad_quantize(h, d, sizes, (x, MX), "silu")),
    ):
        want = np.nan_to_num(np.asarray(want, np.float64))
        for q in pair:
            back = np.asarray(dequantize(q), np.float64)
            assert np.linalg.norm(back - want) < 0.05 * np.linalg.norm(want)


@covering("kind", [AxisType.Explicit, AxisType.Auto], covers=[AxisType.Explicit])
def test_layouts(kind):
    """Participants and features split, no communication; the same bits."""
    h, sizes = operands(width=128)
    d = cotangent(h)

    def both(h, d, sizes, spec=None, of_h=None):
        pair = activate_quantize(h, sizes, (MX, MX), "silu", spec=spec)
        return pair, activate_grad_quantize(h, d, sizes, (MX, MX), "silu", spec=of_h)

    want = both(h, d, sizes)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    of_h, of_d = P("fsdp", None, None, "tp"), P("fsdp", None, "tp")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((h, d, sizes), (of_h, of_d, P("fsdp")), strict=True)
        ]
        function = jax.jit(lambda h, d, s: both(h, d, s, of_d, of_h))
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
    h, sizes = operands()
    with pytest.raises(ValueError, match=r"the shape of the activation, \(2, 96, 64\)"):
        activate_grad_quantize(h, h, sizes, (MX, MX), "silu")
