"""Weighted activations of rows and their gradients against float64 loops; rows without a token."""

import jax.numpy as jnp
import numpy as np
import pytest

from core.ops.test_activation import ORACLES
from expertmesh.core.ops.activate_rows import activate_rows_grad_op, activate_rows_op
from expertmesh.core.ops.activation import Activation
from expertmesh.core.testing import magnitudes, relative_error

pytestmark = pytest.mark.default_jax

CONFIGS = [
    Activation(),
    Activation(function="quick_gelu", limit=2.0, up_offset=1.0),
    Activation(function="gelu_exact", gated=False),
]


def make(activation, shape=(2, 37), width=200, dtype="float32"):
    """h, d, weights (some 0), source, group sizes; NaN in whatever belongs to a row without a token."""
    rng = np.random.default_rng(0)
    pair = (2,) if activation.gated else ()
    h = magnitudes(rng, (*shape, *pair, width)).astype(np.float32)
    d = rng.normal(size=(*shape, width)).astype(np.float32)
    weights = rng.normal(size=shape).astype(np.float32)
    weights[0, :3] = 0
    source = np.where(rng.random(shape) < 0.6, rng.integers(0, 99, shape), -1).astype(np.int32)
    source[:, -9:] = -1  # the padding rows
    for x in (h, d, weights):
        x[source < 0] = np.nan
    sizes = np.array([[shape[1] - 14, 5]] * shape[0], np.int32)
    return jnp.asarray(h, dtype), jnp.asarray(d, dtype), *map(jnp.asarray, (weights, source, sizes))


def oracle(activation, h, d, weights, source, group_sizes):
    """value, d_h, d_weights in float64; slopes by central differences."""
    del group_sizes
    h, d, weights = (np.array(x, np.float64) for x in (h, d, weights))
    held = np.asarray(source) >= 0
    for x in (h, d, weights):
        x[~held] = 0
    act, most = ORACLES[activation.function], activation.limit or np.inf
    raw = h[..., 0, :] if activation.gated else h
    gate = np.minimum(raw, most)
    up = np.clip(h[..., 1, :], -most, most) + activation.up_offset if activation.gated else 1.0
    slope = (act(gate + 1e-6) - act(gate - 1e-6)) / 2e-6
    value, wd = act(gate) * up, weights[..., None] * d
    d_gate = wd * slope * up * (raw <= most)
    d_h = d_gate
    if activation.gated:
        d_h = np.stack([d_gate, wd * act(gate) * (abs(h[..., 1, :]) <= most)], -2)
    d_h[~held] = 0
    return weights[..., None] * value * held[..., None], d_h, (d * value).sum(-1) * held


@pytest.mark.parametrize("activation", CONFIGS, ids=lambda a: a.function)
def test_value_and_gradients(activation):
    h, d, weights, source, sizes = make(activation)
    want, want_h, want_w = oracle(activation, h, d, weights, source, sizes)
    out = activate_rows_op(h, weights, source, sizes, activation=activation)
    d_h, d_w, again = activate_rows_grad_op(h, d, weights, source, sizes, activation=activation)
    assert relative_error(out, want) < 1e-6
    assert relative_error(again, want) < 1e-6
    assert relative_error(d_h, want_h) < 1e-5
    assert relative_error(d_w, want_w) < 1e-6
    empty = np.asarray(source) < 0
    for x in (out, d_h, d_w):
        assert not np.asarray(x)[empty].any()
