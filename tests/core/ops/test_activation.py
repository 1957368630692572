"""Activations against the formulas in float64, for every activation; dtype, zeros, NaN, errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core.ops import activation as module
from expertmesh.core.ops.activation import (
    ACTIVATIONS,
    IN_KERNELS,
    Activation,
    activate,
    gated_activation,
    unsupported,
)
from expertmesh.core.testing import magnitudes, relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ORACLES = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "relu": lambda x: np.where(x > 0, x, 0),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "squared_relu": lambda x: np.where(x > 0, x * x, 0),
}

EVERY = pytest.mark.parametrize("activation", ACTIVATIONS)


def test_every_activation_has_an_oracle():
    assert set(ORACLES) == set(ACTIVATIONS)


def test_kernels_refuse_what_they_do_not_have(monkeypatch):
    h = jnp.ones((4, 2, 8))
    assert set(IN_KERNELS) <= set(ACTIVATIONS)
    for name in IN_KERNELS:
        assert unsupported(h, activation=Activation(function=name)) is None
    monkeypatch.setattr(module, "IN_KERNELS", ("silu",))
    assert "have silu; the activation is gelu" in unsupported(
        h, activation=Activation(function="gelu")
    )


@EVERY
def test_values_and_gradients(activation):
    """The slope is a central difference of the float64 formula."""
    rng = np.random.default_rng(0)
    h = magnitudes(rng, (5, 7, 2, 11))
    d_out = rng.normal(size=(5, 7, 11))
    gate, up = h[..., 0, :].astype(np.float64), h[..., 1, :].astype(np.float64)
    act = ORACLES[activation]
    slope = (act(gate + 1e-6) - act(gate - 1e-6)) / 2e-6
    out, vjp = jax.vjp(lambda h: gated_activation(h, activation=activation), jnp.asarray(h))
    (d_h,) = vjp(jnp.asarray(d_out, jnp.float32))
    assert relative_error(out, act(gate) * up) < 1e-6
    assert relative_error(d_h[..., 0, :], d_out * slope * up) < 1e-5
    assert relative_error(d_h[..., 1, :], d_out * act(gate)) < 1e-6


@pytest.mark.parametrize("function, offset", [("quick_gelu", 1.0), ("silu", 0.0)])
def test_clamped(function, offset):
    """Values on, inside and outside both limits; the gate has no lower one. At the limit the gradient passes."""
    rng = np.random.default_rng(3)
    h, d_out = magnitudes(rng, (64, 2, 11)), rng.normal(size=(64, 11))
    h[:3, :, 0] = [[2.0, 2.0], [-2.0, -2.0], [-9.0, -9.0]]
    activation = Activation(function=function, limit=2.0, up_offset=offset)
    out, vjp = jax.vjp(lambda h: activate(h, activation), jnp.asarray(h))
    (d_h,) = vjp(jnp.asarray(d_out, jnp.float32))
    raw_gate, raw_up = h[:, 0].astype(np.float64), h[:, 1].astype(np.float64)
    gate, up = np.minimum(raw_gate, 2), np.clip(raw_up, -2, 2)
    assert (raw_gate > 2).any() and (raw_gate < -2).any() and (abs(raw_up) > 2).any()
    act = ORACLES[function]
    slope = (act(gate + 1e-6) - act(gate - 1e-6)) / 2e-6
    want = [d_out * slope * (up + offset) * (raw_gate <= 2), d_out * act(gate) * (abs(raw_up) <= 2)]
    assert relative_error(out, act(gate) * (up + offset)) < 1e-6
    assert relative_error(d_h, np.stack(want, axis=1)) < 1e-5


@EVERY
def test_without_a_gate(activation):
    rng = np.random.default_rng(4)
    h, d_out = magnitudes(rng, (5, 11)), rng.normal(size=(5, 11))
    plain = Activation(function=activation, gated=False)
    out, vjp = jax.vjp(lambda h: activate(h, plain), jnp.asarray(h))
    act, wide = ORACLES[activation], h.astype(np.float64)
    slope = (act(wide + 1e-6) - act(wide - 1e-6)) / 2e-6
    assert relative_error(out, act(wide)) < 1e-6
    assert relative_error(vjp(jnp.asarray(d_out, jnp.float32))[0], d_out * slope) < 1e-5
    narrow = jnp.asarray(h, jnp.bfloat16)
    np.testing.assert_array_equal(
        activate(narrow, plain), activate(narrow.astype(jnp.float32), plain).astype(jnp.bfloat16)
    )


@EVERY
def test_bfloat16_is_rounded_once(activation):
    """Equal to the float32 result rounded at the end, forward and backward."""
    h = jnp.asarray(magnitudes(np.random.default_rng(1), (64, 2, 32), "bfloat16"))
    wide = gated_activation(h.astype(jnp.float32), activation=activation)
    out, vjp = jax.vjp(lambda h: gated_activation(h, activation=activation), h)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    assert vjp(out)[0].dtype == jnp.bfloat16


@EVERY
def test_zero_rows_stay_zero_and_nan_stays_in_its_row(activation):
    h = np.random.default_rng(2).normal(size=(4, 2, 8)).astype(np.float32)
    h[1] = 0
    h[2] = np.nan
    out, vjp = jax.vjp(lambda h: gated_activation(h, activation=activation), jnp.asarray(h))
    (d_h,) = vjp(jnp.ones_like(out))
    np.testing.assert_array_equal(out[1], 0)
    assert np.isfinite(out[jnp.array([0, 1, 3])]).all() and np.isnan(out[2]).all()
    assert np.isfinite(d_h[jnp.array([0, 1, 3])]).all()


@pytest.mark.parametrize(
    "shape, activation, words",
    [
        ((4, 2, 8), "swish", ["activation='swish'", *ACTIVATIONS]),
        ((4, 3, 8), "silu", ["(4, 3, 8)", "[..., 2, F]"]),
        ((8,), "silu", ["(8,)", "[..., 2, F]"]),
    ],
)
def test_errors(shape, activation, words):
    with pytest.raises(ValueError) as info:
        gated_activation(jnp.zeros(shape), activation=activation)
    assert all(word in str(info.value) for word in ["gated_activation", *words])


@pytest.mark.parametrize(
    "fields, error, words",
    [
        (dict(function="swish"), ValueError, ["function='swish'", *ACTIVATIONS]),
        (dict(limit=0.0), ValueError, ["limit=0.0", "positive"]),
        (dict(limit=float("nan")), ValueError, ["limit=nan"]),
        (dict(limit="7"), TypeError, ["limit='7'"]),
        (dict(up_offset=float("inf")), ValueError, ["up_offset=inf", "finite"]),
        (dict(gated=False, limit=7.0), ValueError, ["limit=7.0", "gated=True"]),
    ],
    ids=str,
)
def test_activation_errors(fields, error, words):
    with pytest.raises(error) as info:
        Activation(**fields)
    assert all(word in str(info.value) for word in ["Activation", *words]), str(info.value)


def test_what_takes_which_activation():
    with pytest.raises(
        ValueError, match="gated_activation: activation must have a gate.*use activate"
    ):
        gated_activation(jnp.zeros((4, 2, 8)), activation=Activation(gated=False))
    with pytest.raises(ValueError, match=r"activate: h must have shape \[\.\.\., 2, F\].*\(4, 8\)"):
        activate(jnp.zeros((4, 8)), "silu")
    with pytest.raises(TypeError, match="activate: activation must be a name or an Activation"):
        activate(jnp.zeros((4, 2, 8)), jax.nn.silu)
