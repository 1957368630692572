"""FP8 rows projected, activated and quantized, and the gradient, where experts and F are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from core import quantize_oracle
from core.ops.test_activate_rows import oracle as activations
from expertmesh.core import (
    Float8BlockScaling,
    Float8CurrentScaling,
    dequantize,
    grouped_quantize,
    quantize,
)
from expertmesh.core.hlo import axes_of, collectives
from expertmesh.core.linear.quantized_activation import (
    quantized_activation,
    quantized_activation_grad,
)
from expertmesh.core.ops.activation import Activation
from expertmesh.core.testing import magnitudes, relative_error

GROUPS, ROWS, K, F = 3, 512, 256, 256
SIZES = np.array([[128, 0, 256], [256, 128, 0]], np.int32)
EXPERTS = SIZES.size
AXES = {"ep": 2, "tp": 2}
AMAX = "all-reduce", (f"s32[1,{GROUPS}]",), ("tp",)  # the bits of positive numbers
FORMATS = {recipe: recipe.formats() for recipe in (Float8BlockScaling(), Float8CurrentScaling())}
each_recipe = pytest.mark.parametrize("recipe", FORMATS, ids=lambda r: type(r).__name__)
each_kind = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)


def make(width):
    """Rows [2, C, width] whose padding is NaN, and the source of each; in one group a row holds no token."""
    rng = np.random.default_rng(0)
    live = np.arange(ROWS) < SIZES.sum(1)[:, None]
    source = np.where(live, rng.integers(0, ROWS, live.shape), -1).astype(np.int32)
    source[1, 3] = -1
    x = magnitudes(rng, (*live.shape, width))
    x[~live] = np.nan
    return rng, x, live, source, rng.normal(size=live.shape).astype(np.float32)


def each_group():
    """(participant, expert, rows) of each group that has rows."""
    for p, sizes in enumerate(SIZES):
        ends = np.cumsum(sizes)
        for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            if size:
                yield p, p * GROUPS + g, slice(end - size, end)


def numbers(q):
    return np.asarray(dequantize(q), np.float64)


def rounded(x, format, axis):
    """Numbers of a group as its 8 bits and scales, in blocks along the axis, say they are."""
    block = (
        tuple(format.block[1] if d == axis % x.ndim else 1 for d in range(x.ndim))
        if format.block
        else ()
    )
    q = quantize_oracle.quantize(x.astype(np.float32), format, block)
    return quantize_oracle.dequantize(q, block)


def run(mesh, function, operands, specs):
    """The results, and the collectives with the axes that they are over."""
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(
                lambda leaf, spec=spec: jax.device_put(
                    leaf, NamedSharding(mesh, P(*spec[: leaf.ndim]))
                ),
                x,
            )
            for x, spec in zip(operands, specs, strict=True)
        ]
        compiled = jax.jit(function).lower(*placed).compile()
        got = compiled(*placed)
    found = collectives(compiled.as_text())
    return got, sorted((c.kind, c.shapes, axes_of(c.groups, AXES)) for c in found)


def on(kind):
    devices = jax.devices()[:4]
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), (kind,) * 2, devices=devices)


def close(got, want, live):
    got = np.where(live.reshape(*live.shape, *[1] * (got.ndim - 2)), got, 0)
    assert relative_error(got, want) < 2e-3  # some numbers lie next to the middle of two codes


@each_recipe
@each_kind
def test_projection_on_shards_of_experts_and_features(recipe, kind):
    """No weight and no row moves; the amax of groups alone is reduced over F, where there are such scales."""
    format = FORMATS[recipe].x
    rng, x, live, source, weights = make(K)
    lhs = grouped_quantize(jnp.asarray(x), jnp.asarray(SIZES), format)
    w = magnitudes(rng, (EXPERTS, K, 2, F))
    rhs = quantize(jnp.asarray(w), FORMATS[recipe].weight, axis=1, across=3, batch_dims=1)
    operands = lhs, rhs, SIZES, weights, source

    def projected(*operands):
        return quantized_activation(*operands, activation=Activation(), format=format)

    specs = P("ep"), P("ep", None, None, "tp"), P("ep"), P("ep"), P("ep")
    (h, a, a_rows), moved = run(on(kind), projected, operands, specs)
    x, w = numbers(lhs), numbers(rhs)
    of_h, of_a, of_rows = np.zeros(h.shape), np.zeros(a.shape), np.zeros(a.shape)
    for p, e, rows in each_group():
        of_h[p, rows] = np.einsum("rk,kif->rif", x[p, rows], w[e])
    value, *_ = activations(Activation(), of_h, np.zeros(a.shape), weights, source, SIZES)
    for p, _, rows in each_group():
        of_a[p, rows] = rounded(value[p, rows], format, -1)
        of_rows[p, rows] = rounded(value[p, rows], format, 0)
    for got, want in ((h, of_h), (numbers(a), of_a), (numbers(a_rows), of_rows)):
        close(got, want, live)
    assert moved == ([] if format.block else [AMAX])


@each_kind
def test_gradient_on_shards_of_experts_and_features(kind):
    """The amax of groups, and the gradients of the routing weights, are reduced over F."""
    formats = FORMATS[Float8CurrentScaling()]
    format = formats.grad_dgrad
    rng, dy, live, source, weights = make(K)
    h = magnitudes(rng, (*live.shape, 2, F))
    h[~live] = np.nan
    of_dy = grouped_quantize(jnp.asarray(dy), jnp.asarray(SIZES), format)
    w = magnitudes(rng, (EXPERTS, F, K))
    rhs = quantize(jnp.asarray(w), formats.weight_dgrad, axis=2, across=1, batch_dims=1)
    operands = of_dy, rhs, h, weights, source, SIZES

    def gradient(*operands):
        return quantized_activation_grad(*operands, activation=Activation(), format=format)

    specs = P("ep"), P("ep", "tp"), P("ep", None, None, "tp"), P("ep"), P("ep"), P("ep")
    (d_h, d_h_rows, _, d_weights), moved = run(on(kind), gradient, operands, specs)
    dy, w = numbers(of_dy), numbers(rhs)
    d_a, of_h = np.zeros((*weights.shape, F)), np.zeros(h.shape)
    for p, e, rows in each_group():
        d_a[p, rows] = dy[p, rows] @ w[e].T
    _, value, of_weights = activations(Activation(), h, d_a, weights, source, SIZES)
    for p, _, rows in each_group():
        of_h[p, rows] = rounded(value[p, rows], format, -1)
    for got, want in ((numbers(d_h), of_h), (numbers(d_h_rows), of_h), (d_weights, of_weights)):
        close(got, want, live)
    assert moved == [("all-reduce", (f"f32[1,{ROWS}]",), ("tp",)), AMAX]
