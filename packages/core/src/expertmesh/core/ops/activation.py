"""Gated activation: out = act(gate) * up, where h[..., 0, :] is the gate and h[..., 1, :] is up.

    d_gate = d_out * act'(gate) * up;  d_up = d_out * act(gate)

Dimension key: F expert width.
"""

import jax
import jax.numpy as jnp

from expertmesh.core.op import Op
from expertmesh.core.vjp import differentiable

__all__ = ["ACTIVATIONS", "check_activation", "gated_activation"]


def _gelu(x):
    return jax.nn.gelu(x, approximate=True)


def _gelu_exact(x):
    return jax.nn.gelu(x, approximate=False)


def _quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def _squared_relu(x):
    return jnp.square(jax.nn.relu(x))


_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "relu": jax.nn.relu,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}

ACTIVATIONS = tuple(_FUNCTIONS)


def gated_activation(h: jax.Array, *, activation: str) -> jax.Array:
    """act(h[..., 0, :]) * h[..., 1, :].

    Args:
      h: float[..., 2, F].
      activation: "silu" x sigmoid(x); "gelu" its tanh approximation, "gelu_exact" x Phi(x); "relu"; "quick_gelu"
        x sigmoid(1.702 x); "squared_relu" relu(x)^2.

    Returns:
      float[..., F] in h's dtype, computed in float32. A row of zeros gives a row of zeros.

    Raises:
      ValueError: unknown activation, or a shape that is not [..., 2, F].

    Differentiable; the backward computes the activation again from h. No communication if any dimension but the 2 is
    sharded.
    """
    check_activation("gated_activation", activation)
    if h.ndim < 2 or h.shape[-2] != 2:
        raise ValueError(
            f"gated_activation: h must have shape [..., 2, F]; got h.shape={h.shape}; "
            "stack the gate and up projections along a dimension of size 2 before the last"
        )
    return _gated(h, activation=activation)


def check_activation(name: str, activation: str) -> None:
    """Raises a ValueError in the name of `name` unless the activation is one of `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(ACTIVATIONS)}; got activation={activation!r}; "
            "choose one of these"
        )


def _gate_times_up(h, *, activation):
    gate, up = _halves(h)
    return (_FUNCTIONS[activation](gate) * up).astype(h.dtype)


def _gate_times_up_grad(h, d_out, *, activation):
    gate, up = _halves(h)
    act, slope = jax.jvp(_FUNCTIONS[activation], (gate,), (jnp.ones_like(gate),))
    d_out = d_out.astype(jnp.float32)
    return jnp.stack([d_out * slope * up, d_out * act], axis=-2).astype(h.dtype)


def _halves(h):
    h = h.astype(jnp.float32)
    return h[..., 0, :], h[..., 1, :]


_gated_op = Op(
    "gated_activation",
    _gate_times_up,
    "... c f -> ... f",
    whole=("c",),
    roles="tokens . tp -> tokens tp",
)
_gated_grad_op = Op(
    "gated_activation_grad",
    _gate_times_up_grad,
    "... c f, ... f -> ... c f",
    whole=("c",),
    roles="tokens . tp, tokens tp -> tokens . tp",
)


def _gated_fwd(h, *, activation):
    return _gated_op(h, activation=activation), h


def _gated_bwd(h, d_out, *, activation):
    return (_gated_grad_op(h, d_out, activation=activation),)


_gated = differentiable(_gated_fwd, _gated_bwd)
