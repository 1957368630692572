"""From the activation to the combined tokens, against a loop over rows in float64; what rows may hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import Activation
from expertmesh.core.testing import relative_error
from expertmesh.ep import EpConfig, combine, dispatch_weights, prepare
from expertmesh.flax_moe.weighted_product import weighted_product

T, K, E, F, D = 12, 2, 4, 10, 6


def silu(x):
    return x / (1 + np.exp(-x))


def slope(x):
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


@pytest.mark.parametrize("gated", [True, False])
def test_value_and_gradients(gated):
    """A choice without an expert, a weight of 0, rows that are dropped, NaN in rows without a token."""
    rng = np.random.default_rng(0)
    idx = np.argsort(rng.random((T, E)), axis=1)[:, :K]
    idx[3, 1] = -1
    handle = prepare(jnp.asarray(idx), EpConfig(num_experts=E, alignment=4, capacity=24, axis=()))
    row, source = np.asarray(handle.slot), np.asarray(handle.source)[0]
    assert (row[idx >= 0] < 0).any() and (source < 0).any()
    h = rng.normal(size=(1, len(source), *(2,) * gated, F)).astype(np.float32)
    h[:, source < 0] = np.nan
    wo, dy = rng.normal(size=(E, F, D)), rng.normal(size=(T, D))
    weights = rng.normal(size=(T, K))
    weights[5, 0] = 0

    def function(h, wo, weights):
        options = {"activation": Activation(gated=gated)}
        rows = weighted_product(h, wo, dispatch_weights(handle, weights), handle, **options)
        return combine(handle, rows)

    operands = [jnp.asarray(x, jnp.float32) for x in (h, wo, weights)]
    y, pull = jax.vjp(jax.jit(function), *operands)
    sizes = (T, D), h.shape, wo.shape, weights.shape
    want, want_h, want_wo, want_w = wanted = [np.zeros(size) for size in sizes]
    for t, k in np.argwhere(row >= 0):
        r, e, w = row[t, k], idx[t, k], weights[t, k]
        gate = h[0, r, 0] if gated else h[0, r]
        up = h[0, r, 1] if gated else 1
        a, d = silu(gate) * up, wo[e] @ dy[t]
        want[t] += w * a @ wo[e]
        want_wo[e] += w * np.outer(a, dy[t])
        want_w[t, k] = a @ d
        d_gate = w * d * slope(gate) * up
        want_h[0, r] = np.stack([d_gate, w * d * silu(gate)]) if gated else d_gate
    gradients = pull(jnp.asarray(dy, jnp.float32))
    for got, expected in zip((y, *gradients), wanted, strict=True):
        assert relative_error(got, expected) < 1e-5
