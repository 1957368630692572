"""No op of rows in groups reads padding rows: NaN and Inf there change no bit of what it returns elsewhere.

Moves of rows, which take a map in place of group sizes, are tested beside them (`ops/test_row_map.py`).
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import (
    Activation,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    dequantize,
    grouped_dense,
    grouped_gemm,
    quantize,
)
from expertmesh.core.linear.gathered_activation import (
    dgrad_activation_grad_op,
    gathered_activation_op,
)
from expertmesh.core.linear.grouped_gemm import (
    group_bias_grad_op,
    group_bias_op,
    group_bias_weights_grad_op,
    grouped_gemm_dgrad_low_rank_op,
    grouped_gemm_dgrad_op,
    grouped_gemm_low_rank_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.linear.quantized_activation import (
    quantized_activation_grad_op,
    quantized_activation_op,
)
from expertmesh.core.ops.activate_rows import activate_rows_grad_op, activate_rows_op
from expertmesh.core.ops.groups import cleared
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize_rows import Moved, Rows, quantize_rows

P, C, K, N, E, T = 2, 96, 32, 64, 5, 7
# The last groups end within a block of rows, and within a step of the reference.
SIZES = jnp.asarray([[32, 0, 20, 0, 0], [0, 7, 0, 0, 0]], jnp.int32)
LIVE = np.asarray([52, 7])
MX, CURRENT = MXFP8BlockScaling().formats(), Float8CurrentScaling().formats()
SILU, F32 = Activation(), jnp.dtype("float32")


def selected(x, fill):
    """x [P, C, ...], or [P, C / block, ...], with `fill` in padding rows; other arrays as they are."""
    x = jnp.asarray(x)
    if x.ndim < 2 or x.shape[0] != P or C % x.shape[1]:
        return x
    live = jnp.arange(x.shape[1]) * (C // x.shape[1]) < LIVE[:, None]
    return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, jnp.asarray(fill, x.dtype))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(fill):
    """What ops read, `fill` in the padding rows of each."""
    x, dy = normal(0, P, C, K), normal(1, P, C, N)

    def copies(x, formats):
        q = quantize_rows("test", Rows(x), SIZES, (formats.x, formats.x_wgrad))[:2]
        return [dataclasses.replace(z, data=selected(z.data, fill)) for z in q]

    mx = [
        dataclasses.replace(q, scale=selected(q.scale, fill))
        for rows in (x, dy)
        for q in copies(rows, MX)
    ]
    source = np.where(np.arange(C) < LIVE[:, None], np.arange(C) % T, -1).astype(np.int32)
    source[:, ::5] = -1
    given = dict(
        x=x, dy=dy, h=normal(2, P, C, 2, N), weights=normal(3, P, C), source=jnp.asarray(source)
    )  # fmt: skip
    return SimpleNamespace(
        **{name: selected(a, fill) if name != "source" else a for name, a in given.items()},
        moved=Moved(
            normal(4, P, T + 1, K).at[:, T].set(fill),
            RowMap(
                jnp.zeros((P, T + 1), jnp.int32),
                jnp.where(jnp.arange(C) < LIVE[:, None], jnp.arange(C) % T, T),
            ),
        ),
        mx=mx,
        current=[*copies(x, CURRENT), *copies(dy, CURRENT)],
        w=normal(5, E, K, N),
        bias=normal(6, E, N),
    )


def weight(o, formats, axis):
    return quantize(o.w, formats.weight, axis=axis, batch_dims=1)


def tokens_of(o):
    """Those of `moved`, quantized."""
    return quantize(o.moved.base, MX.x)


def of_rows(o):
    return dict(weights=o.weights, row_source=o.source)


def multiplied(o):
    multiplier = jnp.ones_like(SIZES, "float32") * jnp.arange(1, E + 1, dtype="float32")
    formats = CURRENT.x, CURRENT.x
    return quantize_rows("test", Rows(o.x), SIZES, formats, multiplier=multiplier)


OPS = {
    "grouped_gemm": lambda o: grouped_gemm_op(o.x, o.w, SIZES, out_dtype=F32),
    "input gradient": lambda o: grouped_gemm_dgrad_op(o.dy, o.w, SIZES, out_dtype=F32),
    "grouped_gemm, low rank": lambda o: grouped_gemm_low_rank_op(
        o.x, o.w, SIZES, o.x[..., :3], o.w[:, :3], out_dtype=F32
    ),
    "input gradient, low rank": lambda o: grouped_gemm_dgrad_low_rank_op(
        o.dy, o.w, SIZES, o.dy[..., :3], o.w[..., :3], out_dtype=F32
    ),
    "weight gradient": lambda o: grouped_gemm_wgrad_op(
        o.x, o.dy, SIZES, num_experts=E, out_dtype=F32
    ),
    "grouped_gemm, blocks": lambda o: grouped_gemm_op(
        o.mx[0], weight(o, MX, 1), SIZES, out_dtype=F32
    ),
    "input gradient, blocks": lambda o: grouped_gemm_dgrad_op(
        o.mx[2], weight(o, MX, 2), SIZES, out_dtype=F32
    ),
    "weight gradient, blocks": lambda o: grouped_gemm_wgrad_op(
        o.mx[1], o.mx[3], SIZES, num_experts=E, out_dtype=F32
    ),
    "grouped_gemm, tensors": lambda o: grouped_gemm_op(
        o.current[0], weight(o, CURRENT, 1), SIZES, out_dtype=F32
    ),
    "weight gradient, tensors": lambda o: grouped_gemm_wgrad_op(
        o.current[1], o.current[3], SIZES, num_experts=E, out_dtype=F32
    ),
    "grouped_gemm, tokens": lambda o: grouped_gemm_op(o.moved, o.w, SIZES, out_dtype=F32),
    "weight gradient, tokens": lambda o: grouped_gemm_wgrad_op(
        o.moved, o.dy, SIZES, num_experts=E, out_dtype=F32
    ),
    "group_bias": lambda o: group_bias_op(o.dy, o.bias, SIZES, o.weights),
    "bias gradient": lambda o: group_bias_grad_op(o.dy, SIZES, None, num_experts=E, out_dtype=F32),
    "bias gradient, weights": lambda o: group_bias_grad_op(
        o.dy, SIZES, o.weights, num_experts=E, out_dtype=F32
    ),
    "gradient of a bias' weights": lambda o: group_bias_weights_grad_op(o.dy, o.bias, SIZES),
    "gathered activation": lambda o: gathered_activation_op(
        o.moved, jnp.stack([o.w, o.w], 2), SIZES, o.weights, activation=SILU
    ),
    "quantized activation": lambda o: quantized_activation_op(
        dataclasses.replace(o.moved, base=tokens_of(o)),
        quantize(jnp.stack([o.w, o.w], 2), MX.weight, axis=1, batch_dims=1),
        SIZES,
        o.weights,
        o.moved.row_map.source,
        activation=SILU,
        format=MX.x,
        narrow=False,
    ),
    "quantized activation, tensors": lambda o: quantized_activation_op(
        o.current[0],
        quantize(jnp.stack([o.w, o.w], 2), CURRENT.weight, batch_dims=1),
        SIZES,
        o.weights,
        o.source,
        activation=SILU,
        format=CURRENT.x,
        narrow=False,
    ),
    "input gradient, activation's gradient, tensors": lambda o: quantized_activation_grad_op(
        o.current[0],
        quantize(jnp.swapaxes(o.w, 1, 2), CURRENT.weight, batch_dims=1),
        o.h,
        o.weights,
        o.source,
        SIZES,
        activation=SILU,
        format=CURRENT.x,
    ),
    "activate_rows": lambda o: activate_rows_op(o.h, o.weights, o.source, SIZES, activation=SILU),
    "activate_rows' gradient": lambda o: activate_rows_grad_op(
        o.h, o.dy, o.weights, o.source, SIZES, activation=SILU
    ),
    "input gradient, activation's gradient": lambda o: dgrad_activation_grad_op(
        o.x, jnp.swapaxes(o.w, 1, 2), o.h, o.weights, o.source, SIZES, activation=SILU
    ),
    "quantize, blocks": lambda o: quantize_rows("test", Rows(o.x), SIZES, (MX.x, MX.x_wgrad)),
    "quantize, tensors": lambda o: quantize_rows("test", Rows(o.x), SIZES, (CURRENT.x, CURRENT.x)),
    "quantize, tokens": lambda o: quantize_rows("test", o.moved, SIZES, (CURRENT.x, CURRENT.x)),
    "quantize, multiplier": multiplied,
    "requantize": lambda o: grouped_requantize(o.mx[0], SIZES, MX.x_wgrad),
    "activate_quantize": lambda o: activate_quantize(o.h, SIZES, (MX.x, MX.x), SILU, **of_rows(o)),
    "activate_quantize, no weights": lambda o: activate_quantize(o.h, SIZES, (MX.x, MX.x), SILU),
    "activate_grad_quantize": lambda o: activate_grad_quantize(
        o.h, o.dy, SIZES, (MX.x, MX.x), SILU, **of_rows(o)
    ),
    "dequantize, tensors": lambda o: dequantize(o.current[0]),
}


@pytest.mark.parametrize("name", OPS)
def test_no_op_reads_padding_rows(name):
    def run(fill):
        results = jax.tree.leaves(OPS[name](operands(fill)))
        return [np.asarray(selected(x, 1)) for x in results]

    clean, *poisoned = (run(fill) for fill in (1.0, np.nan, np.inf))
    assert all(np.isfinite(x.astype(np.float32)).all() and len(np.unique(x)) > 1 for x in clean)
    for results in poisoned:
        for x, y in zip(clean, results, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling(), Float8CurrentScaling()], ids=str)
def test_padding_rows_are_cleared_where_they_are_promised(recipe):
    """Forward and backward; the others are the same without."""
    sizes = jnp.asarray([[120, 0, 0, 0, 0], [0, 0, 0, 0, 0]], jnp.int32)
    x, w, dy = normal(0, P, 160, 128), normal(1, E, 128, 128), normal(2, P, 160, 128)
    x, dy = (jnp.where(cleared(jnp.ones_like(z), sizes) > 0, z, jnp.nan) for z in (x, dy))

    def run(clear_padding):
        def layer(x, w):
            options = dict(clear_padding=clear_padding)
            if recipe is None:
                return grouped_gemm(x, w, sizes, **options)
            return grouped_dense(x, w, sizes, recipe=recipe, **options)

        y, pull = jax.vjp(layer, x, w)
        return y, *pull(dy)

    promised, left = run(True), run(False)
    for x, y in zip(promised[:2], left[:2], strict=True):
        assert np.isfinite(x).all() and not np.asarray(x)[:, 120:].any() and not x[1].any()
        np.testing.assert_array_equal(x, cleared(y, sizes))
    np.testing.assert_array_equal(promised[2], left[2])
    assert np.isfinite(left[2]).all()
