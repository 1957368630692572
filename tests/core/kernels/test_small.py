"""Every kernel once on few rows: what `ci/sanitize` runs under compute-sanitizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import (
    QuantizedArray,
    RouterConfig,
    as_recipe,
    dequantize,
    gathered_gemm,
    grouped_dense,
    grouped_gemm,
    permute,
    plan_permute,
    quantize,
    route,
    unpermute,
)
from expertmesh.core.kernels.choice import gathered_activation as by_groups
from expertmesh.core.linear.grouped_gemm import grouped_gemm_wgrad_op
from expertmesh.core.linear.quantized_activation import (
    quantized_activation,
    quantized_activation_grad,
)
from expertmesh.core.ops.activate_rows import activate_rows_grad_op, activate_rows_op
from expertmesh.core.ops.activation import Activation, activate
from expertmesh.core.ops.permute import plan_rows
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.quantize_moved import quantize_moved
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]
E, K, T, D, F = 40, 4, 150, 256, 160


def _normal(seed, *shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _rows(sizes, width, seed):
    """Rows [1, C, width] of groups, NaN where they belong to none."""
    x = np.array(_normal(seed, 1, 384, width, dtype="float32"))
    x[:, int(sizes.sum()) :] = np.nan
    return jnp.asarray(x, "bfloat16")


def test_permutation_and_router():
    logits, x = _normal(0, 1, T, E, dtype="float32"), _normal(1, 1, T, D)

    @jax.jit
    def run(logits, x):
        def mean(logits, x):
            routing = route(logits, RouterConfig(top_k=K))
            plan = plan_permute(routing.topk_idx, num_experts=E, alignment=16)
            rows = permute(x, plan)
            return unpermute(rows, plan, routing.topk_weights), (rows, plan.source)

        y, pull, held = jax.vjp(mean, logits, x, has_aux=True)
        return y, pull(y), held

    y, (_, dx), (rows, source) = run(logits, x)
    assert not np.asarray(rows)[np.asarray(source) < 0].any() and (np.asarray(source) < 0).any()
    assert relative_error(y, np.asarray(x, np.float64)) < 1e-2  # the weights' sum is 1
    assert relative_error(dx, np.asarray(x, np.float64)) < 2e-2


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("recipe", [None, "fp8_current", "fp8_block", "mxfp8"])
def test_products(recipe):
    sizes = np.array([[128, 0, 128]], np.int32)
    x, w, b = _rows(sizes, D, 0), _normal(1, 3, D, F, dtype="float32"), _normal(2, 3, F)
    dy = _rows(sizes, F, 3)

    @jax.jit
    def run(x, w, b, dy):
        options = {} if recipe is None else {"recipe": recipe}
        function = grouped_gemm if recipe is None else grouped_dense
        kernel = w.astype(jnp.bfloat16) / 16
        y, pull = jax.vjp(
            lambda x, w, b: function(x, w, jnp.asarray(sizes), b, **options), x, kernel, b
        )
        return y, pull(dy)

    y, (dx, dw, db) = run(x, w, b, dy)
    wide = [np.asarray(a, np.float64) for a in (x[0], w / 16, b, dy[0])]
    error = 1e-2 if recipe is None else 6e-2
    for group, rows in ((0, slice(0, 128)), (2, slice(128, 256))):
        x_g, w_g, b_g, dy_g = wide[0][rows], wide[1][group], wide[2][group], wide[3][rows]
        assert relative_error(y[0, rows], x_g @ w_g + b_g) < error
        assert relative_error(dx[0, rows], dy_g @ w_g.T) < error
        assert relative_error(dw[group], x_g.T @ dy_g) < error
        assert relative_error(db[group], dy_g.sum(0)) < 1e-2
    assert not np.asarray(y[0, 256:]).any() and not np.asarray(dw[1]).any()


@pytest.mark.parametrize("recipe", ["fp8_current"])
def test_products_of_tokens(recipe, monkeypatch):
    """Rows of quantized tokens in each pass of a gated block."""
    monkeypatch.setattr(by_groups, "ROWS_AT_ONCE", 1)
    formats, places = as_recipe(recipe).formats(), 2
    sizes, width = np.array([[140, 0, 116]], np.int32), 256
    source = np.full((1, 272), -1, np.int32)
    source[0, :250] = np.random.default_rng(0).permutation((T - 1) * places)[:250]
    row = np.full((1, T, places), -1, np.int32)
    row.reshape(-1)[source[0, :250]] = np.arange(250)
    row_map = RowMap(jnp.asarray(row), jnp.asarray(source))
    x, dy = (_normal(i, 1, T, D).at[0, T - 1].set(jnp.nan) for i in (0, 1))
    wi, wo = _normal(2, 3, D, 2, width) / 16, _normal(3, 3, width, D) / 16

    @jax.jit
    def run(x, dy, wi, wo):
        rows, d_y = (
            quantize_moved(Moved(a, row_map), jnp.asarray(sizes), format)
            for a, format in ((x, formats.x), (dy, formats.grad_dgrad))
        )
        up, down = (quantize(w, formats.weight, batch_dims=1) for w in (wi, wo))
        routing, of = (jnp.ones(source.shape, jnp.float32), row_map.source), Activation()
        h, _, a = quantized_activation(rows, up, sizes, *routing, activation=of, format=formats.x)
        d_h = quantized_activation_grad(
            d_y, down, h, *routing, sizes, activation=of, format=formats.grad_dgrad
        )
        options = dict(num_experts=3, out_dtype=jnp.dtype("bfloat16"))
        pairs = (rows, d_h.along_rows), (a, d_y)
        plain = (jax.tree.map(_without_sizes, pair, is_leaf=_is_quantized) for pair in pairs)
        return h, *(grouped_gemm_wgrad_op(*pair, sizes, **options) for pair in plain)

    h, d_wi, d_wo = run(x, dy, wi, wo)
    token = np.where(source[0] < 0, T - 2, source[0] // places)
    held = (source[0] >= 0)[:, None]
    rows, d_y = (np.where(held, np.asarray(a, np.float64)[0, token], 0) for a in (x, dy))
    for g, part in ((0, slice(0, 140)), (2, slice(140, 256))):
        want = np.einsum("rd,dcf->rcf", rows[part], np.asarray(wi, np.float64)[g])
        assert relative_error(h[0, part], want) < 6e-2
        d_a, (gate, up) = d_y[part] @ np.asarray(wo, np.float64)[g].T, np.moveaxis(want, 1, 0)
        s = 1 / (1 + np.exp(-gate))
        d_h = np.stack([d_a * up * s * (1 + gate * (1 - s)), d_a * gate * s], 1)
        assert relative_error(d_wi[g], np.einsum("rd,rcf->dcf", rows[part], d_h)) < 0.1
        assert relative_error(d_wo[g], (gate * s * up).T @ d_y[part]) < 0.1
    assert not np.asarray(d_wi[1]).any() and not np.asarray(d_wo[1]).any()


def test_gathered_products():
    """In float16, which Triton's interpreter multiplies."""
    x, w = _normal(0, T, D, dtype="float16"), _normal(1, E, D, F, dtype="float16")
    idx = np.random.default_rng(2).integers(-1, E, (T, K)).astype(np.int32)
    idx[0], x = -1, x.at[0].set(jnp.nan)  # of no row

    @jax.jit
    def run(x, w, idx):
        plan = plan_permute(idx, num_experts=E, alignment=16)
        return gathered_gemm(x, w, plan), plan

    y, plan = run(x, w, idx)
    wide_x, wide_w, source = np.asarray(x, np.float64), np.asarray(w, np.float64), plan.source
    rows = np.flatnonzero(source >= 0)
    choices = np.asarray(source)[rows]
    want = np.zeros(y.shape)
    want[rows] = np.einsum("rd,rdf->rf", wide_x[choices // K], wide_w[idx.reshape(-1)[choices]])
    assert relative_error(y, want) < 1e-2
    assert not np.asarray(y)[np.asarray(source) < 0].any()


def test_activation():
    h, d = _normal(0, 1, 100, 2, F), _normal(1, 1, 100, F)
    y, pull = jax.jit(lambda h: jax.vjp(lambda h: activate(h, "silu"), h))(h)
    (dh,) = jax.jit(lambda pull, d: pull(d))(pull, d)
    gate, up = np.moveaxis(np.asarray(h, np.float64), 2, 0)
    s = 1 / (1 + np.exp(-gate))
    assert relative_error(y, gate * s * up) < 1e-2
    assert relative_error(dh[:, :, 1], np.asarray(d, np.float64) * gate * s) < 1e-2


def test_weighted_activation():
    h, d, weights = (
        _normal(0, 1, 100, 2, F),
        _normal(1, 1, 100, F),
        _normal(2, 1, 100, dtype="float32"),
    )
    source, sizes = jnp.arange(100, dtype=jnp.int32)[None] % 5 - 1, jnp.asarray([[30, 70]])

    @jax.jit
    def run(h, d, weights):
        value = activate_rows_op(h, weights, source, sizes, activation=Activation())
        return value, *activate_rows_grad_op(h, d, weights, source, sizes, activation=Activation())

    value, dh, dw, again = run(h, d, weights)
    gate, up = np.moveaxis(np.asarray(h, np.float64), 2, 0)
    a = gate / (1 + np.exp(-gate)) * up * (np.asarray(source) >= 0)[..., None]
    assert relative_error(value, np.asarray(weights)[..., None] * a) < 1e-2
    assert relative_error(dw, (a * np.asarray(d, np.float64)).sum(-1)) < 1e-2
    np.testing.assert_array_equal(value, again)
    assert not np.asarray(dh)[:, ::5].any()


def test_plan_of_a_rank():
    idx = np.random.default_rng(0).integers(-1, E, (T, K))
    plan = jax.jit(
        lambda i, rank: plan_rows(i, num_experts=E, capacity=300, num_ranks=4, rank=rank)
    )(jnp.asarray(idx, jnp.int32), jnp.int32(2))
    held = np.asarray(plan.source_C)
    np.testing.assert_array_equal(idx.reshape(-1)[held[held >= 0]] // (E // 4), 2)
    assert (held >= 0).sum() == (idx // (E // 4) == 2).sum() - plan.num_dropped


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_quantization(recipe):
    format = as_recipe(recipe).formats().x
    w, h, d = _normal(0, 2, 160, 96), _normal(1, 1, 160, 2, 96), _normal(2, 1, 160, 96)
    sizes = jnp.asarray([[64, 96]], jnp.int32)

    @jax.jit
    def run(w, h, d):
        a, pull = jax.vjp(lambda h: activate(h, "silu"), h)
        formats = format, format
        pairs = (
            activate_quantize(h, sizes, formats, "silu")[:2],
            activate_grad_quantize(h, d, sizes, formats, "silu")[:2],
        )
        again = grouped_requantize(quantize(d, format), sizes, format)
        back = jax.tree.map(dequantize, (quantize(w, format), *pairs, again), is_leaf=_is_quantized)
        return back, (w, (a, a), pull(d) * 2, d)

    for q, wide in zip(*map(jax.tree.leaves, run(w, h, d)), strict=True):
        assert relative_error(q, np.asarray(wide, np.float64)) < 5e-2


def _is_quantized(x):
    return isinstance(x, QuantizedArray)


def _without_sizes(x):
    """As GEMMs' ops take quantized operands, and other leaves."""
    return dataclasses.replace(x, group_sizes=None) if _is_quantized(x) else x
