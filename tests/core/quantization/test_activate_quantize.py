"""activate_quantize and its gradient: the layers' bits, against loops over blocks; layouts, errors."""

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
    Activation,
    Float8BlockScaling,
    Float8CurrentScaling,
    MeshResource,
    MXFP8BlockScaling,
    activate,
    dequantize,
    global_shard_guard,
    grouped_quantize,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.quantization.activate_quantize import (
    Activated,
    ActivatedGrad,
    activate_grad_quantize,
    activate_quantize,
)
from expertmesh.core.testing import relative_error

pytestmark = pytest.mark.default_jax

GPT_OSS = Activation(function="quick_gelu", limit=7.0, up_offset=1.0)
MX = MXFP8BlockScaling().formats().x
BLOCK = Float8BlockScaling().formats().x


def operands(width=64):
    """h [2, 96, 2, width] and sizes; NaN in the padding rows."""
    rng = np.random.default_rng(0)
    sizes = np.array([[32, 0, 32], [0, 64, 0]], np.int32)
    h = rng.normal(size=(2, 96, 2, width)) * 2.0 ** rng.integers(-5, 6, size=(2, 96, 1, 1))
    h[:, 64:] = np.nan
    return jnp.asarray(h, jnp.bfloat16), sizes


def cotangent(h):
    """Of the activation, NaN in the padding rows."""
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
    """Both are those of `x`, whose rows from 64 on are padding, along its last dimension and its rows."""
    x = np.array(x)
    x[:, 64:] = 0
    for q, axis in zip(pair[:2], (x.ndim - 1, 1), strict=True):
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


@covering("weighted", [False, True], covers=[True])
@CASES
def test_what_was_quantized_stands_for_its_numbers(format, activation, weighted):
    """Both ops, given h in blocks, give what they give of h dequantized; also where another format keeps it."""
    h, sizes = operands()
    d, source = cotangent(h), np.where(np.arange(96) % 7, 3, -1)[None].repeat(2, 0)
    weights = np.random.default_rng(2).normal(size=source.shape).astype(np.float32)
    of = dict(weights=jnp.asarray(weights), row_source=jnp.asarray(source)) if weighted else {}
    for kept in (format, BLOCK, dataclasses.replace(MX, dtype="float8_e5m2")):
        q = grouped_quantize(h, sizes, kept)
        calls = (
            jax.jit(lambda h: activate_quantize(h, sizes, (format, format), activation, **of)),
            jax.jit(
                lambda h: activate_grad_quantize(h, d, sizes, (format, format), activation, **of)
            ),
        )
        for call in calls:
            got, want = call(q), call(dequantize(q))
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for x, y in zip(got[:2], want[:2], strict=True):
                x, y = (np.asarray(dequantize(side), np.float64)[:, :64] for side in (x, y))
                assert relative_error(x, y) < 5e-3


@CASES
def test_copies_are_those_of_the_gradient(format, activation):
    h, sizes = operands()
    d = cotangent(h)
    pair = activate_grad_quantize(h, d, sizes, (format, format), activation)
    check_copies(pair, jax.vjp(lambda h: activate(h, activation), h)[1](d)[0], format)


def routing():
    """Weights and sources of the rows of `operands`; every fifth row holds no token, and NaN."""
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(2, 96)).astype(np.float32)
    source = rng.integers(0, 50, (2, 96)).astype(np.int32)
    source[:, 64:] = source[:, ::5] = -1
    weights[source < 0] = np.nan
    weights[0, 1] = 0  # legal, with a gradient
    return jnp.asarray(weights), jnp.asarray(source)


def weighted(h, weights, source, activation):
    return jnp.where(
        (source >= 0)[..., None],
        weights[..., None] * activate(h.astype(jnp.float32), activation),
        0,
    )


def check_close(got, want):
    want = np.asarray(want, np.float64)
    assert np.isfinite(np.asarray(got, np.float64)).all()
    assert np.linalg.norm(np.asarray(got, np.float64) - want) < 1e-6 * np.linalg.norm(want)


@CASES
def test_copies_are_those_of_the_weighted_activation(format, activation):
    h, sizes = operands()
    h = h.at[:, ::5].set(np.nan)
    weights, source = routing()
    of = dict(weights=weights, row_source=source)
    copies = activate_quantize(h, sizes, (format, format), activation, **of)
    check_copies(copies, weighted(h, weights, source, activation).astype(h.dtype), format)
    assert copies.d_weights is None


@covering(
    "formats, activation",
    [(MX, MX), (BLOCK, BLOCK), (Float8CurrentScaling().formats().x, MX)],
    ["silu", "gelu", GPT_OSS],
    covers=[((MX, MX), "gelu"), ((BLOCK, BLOCK), GPT_OSS)],
)
def test_gradients_of_the_weighted_activation(formats, activation):
    h, sizes = operands()
    weights, source = routing()
    d, holds = cotangent(h), (source >= 0)
    h, d = (x.at[:, ::5].set(np.nan) for x in (h, d))
    clean = [jnp.where(holds.reshape(2, 96, *[1] * (x.ndim - 2)), x, 0) for x in (h, d, weights)]
    wide = (x.astype(jnp.float32) for x in (clean[0], clean[2]))
    _, pull = jax.vjp(lambda h, w: weighted(h, w, source, activation), *wide)
    d_h, d_weights = pull(clean[1].astype(jnp.float32))
    of = dict(weights=weights, row_source=source)
    copies = activate_grad_quantize(h, d, sizes, formats, activation, **of)
    check_close(copies.d_weights, jnp.where(holds, d_weights, 0))
    if formats[0] == formats[1]:
        check_copies(copies, d_h.astype(h.dtype), formats[0])


def test_formats_that_are_not_made_at_once():
    h, sizes = operands()
    x, d = Float8CurrentScaling().formats().x, cotangent(h)
    a, pull = jax.vjp(lambda h: activate(h, "silu"), h)
    for want, pair in (
        (a, activate_quantize(h, sizes, (x, MX), "silu")),
        (pull(d)[0], activate_grad_quantize(h, d, sizes, (x, MX), "silu")),
    ):
        want = np.nan_to_num(np.asarray(want, np.float64))
        for q in pair[:2]:
            back = np.asarray(dequantize(q), np.float64)
            assert np.linalg.norm(back - want) < 0.05 * np.linalg.norm(want)


@covering("gradient", [False, True], covers=[False, True])
def test_a_scale_per_group(gradient):
    """Of the largest numbers in each group's rows; with features over two devices the same bits."""
    (h, sizes), format = operands(), Float8CurrentScaling().formats().x
    h, (weights, source) = h.at[:, ::5].set(np.nan), routing()
    more = (cotangent(h).at[:, ::5].set(np.nan),) if gradient else ()
    run = activate_grad_quantize if gradient else activate_quantize

    def copies(h, weights, source, sizes, *more, spec=None):
        of = dict(weights=weights, row_source=source, spec=spec)
        return run(h, *more, sizes, (format, format), "silu", **of)

    got = jax.jit(copies)(h, weights, source, sizes, *more)
    made = (ActivatedGrad if gradient else Activated)(h, weights, source, Activation(), *more)
    rows, d_weights = made.apart(jnp.asarray(sizes), None)
    for q in got[:2]:
        for p, group, first, last in ((0, 0, 0, 32), (0, 2, 32, 64), (1, 1, 0, 64)):
            want = oracle.quantize(np.asarray(rows[p, first:last]), format)
            data, scale, _ = want.codes(format)
            np.testing.assert_array_equal(np.asarray(q.data[p, first:last]).view(np.uint8), data)
            np.testing.assert_array_equal(np.asarray(q.scale[p, group]).view(scale.dtype), scale)
    assert (got.d_weights is None) == (d_weights is None) == (not gradient)
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    of_h, of_d = P("fsdp", None, None, "tp"), P("fsdp", None, "tp")
    with jax.set_mesh(mesh):
        specs = (of_h, *[P("fsdp")] * 3, of_d)
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((h, weights, source, sizes, *more), specs, strict=False)
        ]
        split = jax.jit(copies)(*placed)
    for x, y in zip(jax.tree.leaves(split[:2]), jax.tree.leaves(got[:2]), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
    if gradient:
        check_close(split.d_weights, d_weights)
        check_close(got.d_weights, d_weights)


@covering("kind", [AxisType.Explicit, AxisType.Auto], covers=[AxisType.Explicit])
def test_layouts(kind):
    """Participants and features split, no communication; the same bits."""
    h, sizes = operands(width=128)
    d = cotangent(h)

    def both(h, d, sizes, *routing, spec=None, of_h=None):
        of = dict(zip(("weights", "row_source"), routing, strict=False))
        pair = activate_quantize(h, sizes, (MX, MX), "silu", spec=spec, **of)
        return pair, activate_grad_quantize(h, d, sizes, (MX, MX), "silu", spec=of_h, **of)

    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    of_h, of_d = P("fsdp", None, None, "tp"), P("fsdp", None, "tp")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((h, d, sizes, *routing()), (of_h, of_d, *[P("fsdp")] * 3), strict=True)
        ]
        function = jax.jit(lambda *operands: both(*operands, spec=of_d, of_h=of_h))
        resource = MeshResource(fsdp_resource="fsdp", tp_resource="tp")
        with global_shard_guard(resource):
            plain, weighted = function(*placed[:3]), function(*placed)
            assert not collectives(function.lower(*placed[:3]).compile().as_text())
            (summed,) = collectives(function.lower(*placed).compile().as_text())
    assert summed.kind == "all-reduce"  # the weights' gradient over tp
    check_close(weighted[1].d_weights, both(h, d, sizes, *routing())[1].d_weights)
    for got, want in ((plain, both(h, d, sizes)), (weighted, both(h, d, sizes, *routing()))):
        got, want = ([q for copies in pairs for q in copies[:2]] for pairs in (got, want))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(
                np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)
            )


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
