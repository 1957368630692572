"""The Triton kernel of the gated activations' gradient on a GPU, against the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.ops.test_activation import ORACLES
from expertmesh.core.ops.activation import IN_KERNELS, Activation, activate
from expertmesh.core.testing import magnitudes, relative_error

pytestmark = [pytest.mark.gpu, needs_triton]


def _gradient(h, d_out, activation):
    """d_h of the kernel, twice the same."""
    run = jax.jit(lambda h, d: jax.vjp(lambda h: activate(h, activation), h)[1](d)[0])
    assert "expertmesh_core_launch" in run.lower(h, d_out).as_text(), "the reference would run"
    d_h = run(h, d_out)
    np.testing.assert_array_equal(
        np.asarray(d_h, np.float32), np.asarray(run(h, d_out), np.float32)
    )
    return d_h


@pytest.mark.parametrize("limit, offset", [(None, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize("function", IN_KERNELS)
def test_gradient(function, limit, offset):
    """Widths on both sides of a tile; at the limit the gradient passes."""
    rng = np.random.default_rng(0)
    h = magnitudes(rng, (3, 171, 2, 1416 if limit else 200)).astype(np.float32)
    h[0, :, :, 0] = limit or 0
    d = rng.normal(size=(*h.shape[:2], h.shape[3])).astype(np.float32)
    activation = Activation(function=function, limit=limit, up_offset=offset)
    d_h = _gradient(jnp.asarray(h), jnp.asarray(d), activation)
    most = limit or np.inf
    raw_gate, raw_up = h[..., 0, :].astype(np.float64), h[..., 1, :].astype(np.float64)
    gate, up = np.minimum(raw_gate, most), np.clip(raw_up, -most, most) + offset
    act = ORACLES[function]
    slope = (act(gate + 1e-6) - act(gate - 1e-6)) / 2e-6
    if function == "relu":
        slope = (gate > 0).astype(np.float64)
    assert relative_error(d_h[..., 0, :], d * slope * up * (raw_gate <= most)) < 1e-5
    assert relative_error(d_h[..., 1, :], d * act(gate) * (abs(raw_up) <= most)) < 1e-6


@pytest.mark.parametrize("dtype, unit", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_rounded_once(dtype, unit):
    rng = np.random.default_rng(1)
    h = jnp.asarray(rng.normal(size=(77, 2, 130)) * 4, dtype)
    d = jnp.asarray(rng.normal(size=(77, 130)), dtype)
    d_h = np.asarray(_gradient(h, d, Activation()), np.float64)
    gate, up = np.moveaxis(np.asarray(h, np.float64), 1, 0)
    sigmoid = 1 / (1 + np.exp(-gate))
    wide = np.asarray(d, np.float64)
    for got, want in (
        (d_h[:, 0], wide * up * sigmoid * (1 + gate * (1 - sigmoid))),
        (d_h[:, 1], wide * gate * sigmoid),
    ):
        assert (abs(got - want) <= 1.01 * unit * abs(want) + 1e-5).all()


def test_nan_stays_in_its_row():
    h = jnp.ones((5, 2, 640), jnp.bfloat16).at[1].set(0).at[2].set(jnp.nan)
    d_h = _gradient(h, jnp.ones((5, 640), jnp.bfloat16), Activation())
    rows = np.isnan(np.asarray(d_h, np.float32)).reshape(5, -1)
    assert rows[2].all() and not rows[[0, 1, 3, 4]].any()
