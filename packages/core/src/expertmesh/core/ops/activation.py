"""Activations between an expert's two projections, gated or not.

    gated:  out = act(g) * (u + b),  g = min(gate, L),  u = clip(up, -L, L)
            d_gate = d_out * act'(g) * (u + b) where gate <= L, else 0
            d_up = d_out * act(g)              where |up| <= L, else 0
    plain:  out = act(h);  d_h = d_out * act'(h)

with gate = h[..., 0, :], up = h[..., 1, :], the limit L (none: no clamping) and the offset b of an Activation.

Dimension key: F expert width.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.config import Config
from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import FLOATS, check_arrays, check_numbers
from expertmesh.core.vjp import differentiable

__all__ = ["ACTIVATIONS", "Activation", "activate", "check_activation", "gated_activation"]


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu_exact(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


# Each is 0 at 0, so that a row of zeros stays one.
_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "relu": jax.nn.relu,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}

ACTIVATIONS = tuple(_FUNCTIONS)
# Those of kernels/triton/activation.py, kernels/triton/activate_quantize.py and kernels/cuda/activation.cuh.
IN_KERNELS = ("silu", "gelu", "gelu_exact", "relu", "quick_gelu", "squared_relu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation(Config):
    """What an expert does between its two projections.

    Attributes:
      function: "silu" x sigmoid(x); "gelu" its tanh approximation, "gelu_exact" x Phi(x); "relu"; "quick_gelu"
        x sigmoid(1.702 x); "squared_relu" relu(x)^2.
      gated: whether its output is multiplied with a second projection; SwiGLU is "silu", GEGLU "gelu", ReGLU "relu".
      limit: L > 0: the gate is clamped from above, the second projection from both sides. None: no clamping.
      up_offset: b, added to the second projection.

    gpt-oss is `Activation(function="quick_gelu", limit=7.0, up_offset=1.0)`.

    Raises:
      ValueError: unknown function, a limit that is not positive, an offset that is not finite, or either of them
        without a gate.
      TypeError: limit or offset are not Python numbers.
    """

    function: str = "silu"
    gated: bool = True
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        self._normalize()
        _check_function("Activation", "function", self.function)
        check_numbers("Activation", "pass 0.0 for none", up_offset=self.up_offset)
        if self.limit is not None:
            check_numbers("Activation", "pass None for no clamping", limit=self.limit)
        if self.limit is not None and not self.limit > 0:
            raise ValueError(
                f"Activation: limit must be positive; got limit={self.limit}; pass None for no clamping"
            )
        if not self.gated and (self.limit is not None or self.up_offset):
            raise ValueError(
                "Activation: limit and up_offset must be left out without a gate; "
                f"got limit={self.limit}, up_offset={self.up_offset}; set gated=True"
            )

    @classmethod
    def of(cls, activation: "str | Activation") -> "Activation":
        """Itself; a name stands for the gated activation with that function."""
        return activation if isinstance(activation, Activation) else cls(function=activation)


def activate(h: jax.Array, activation: str | Activation) -> jax.Array:
    """Applies an activation, by the module's formulas.

    Args:
      h: float[..., 2, F] (0 gate, 1 up) for a gated activation, else float[..., F].
      activation: an Activation, or the name of its function for a gated one.

    Returns:
      float[..., F] in h's dtype, computed in float32. A row of zeros gives a row of zeros.

    Raises:
      ValueError: unknown activation, or a shape that is not [..., 2, F] for a gated one.

    Differentiable; the backward computes the activation again from h. No communication if any dimension but the 2 is
    sharded.
    """
    check_activation("activate", activation)
    activation = Activation.of(activation)
    check_arrays("activate", FLOATS, h=h)
    if activation.gated:
        _check_pair("activate", h)
    return _activate(h, activation=activation)


def with_pair(spec: PartitionSpec) -> PartitionSpec:
    """Of h [..., 2, F], for that of its activation [..., F]."""
    return PartitionSpec(*tuple(spec)[:-1], None, *tuple(spec)[-1:])


def gated_activation(h: jax.Array, *, activation: str | Activation) -> jax.Array:
    """`activate` for gated activations alone: act(h[..., 0, :]) * h[..., 1, :] for the name of a function.

    Args:
      h: float[..., 2, F].
      activation: the name of a function, or an Activation with a gate.

    Returns, costs and gradients are those of `activate`.

    Raises:
      ValueError: unknown activation, one without a gate, or a shape that is not [..., 2, F].
    """
    return _activate(h, activation=check_gated("gated_activation", h, activation))


def check_gated(
    name: str, h: Any, activation: str | Activation, *, quantized: bool = False
) -> Activation:
    """The Activation, after the errors of `gated_activation`, which name `name`.

    Args:
      quantized: whether h may be a QuantizedArray.
    """
    check_activation(name, activation)
    activation = Activation.of(activation)
    if not activation.gated:
        raise ValueError(
            f"{name}: activation must have a gate; got activation={activation}; use activate"
        )
    check_arrays(name, FLOATS, quantized=quantized, h=h)
    _check_pair(name, h)
    return activation


def check_activation(name: str, activation: str | Activation) -> None:
    """Raises an error that names `name` unless it is an Activation or one of `ACTIVATIONS`.

    Raises:
      ValueError: another name.
      TypeError: neither a name nor an Activation.
    """
    if isinstance(activation, Activation):
        return
    if not isinstance(activation, str):
        raise TypeError(
            f"{name}: activation must be a name or an Activation; got activation={activation!r}; "
            "pass for example 'silu'"
        )
    _check_function(name, "activation", activation)


def _check_function(name: str, field: str, function: str) -> None:
    if function not in _FUNCTIONS:
        raise ValueError(
            f"{name}: {field} must be one of {', '.join(ACTIVATIONS)}; got {field}={function!r}; "
            "choose one of these"
        )


def _check_pair(name: str, h: jax.Array) -> None:
    if h.ndim < 2 or h.shape[-2] != 2:
        raise ValueError(
            f"{name}: h must have shape [..., 2, F]; got h.shape={h.shape}; "
            "stack the gate and up projections along a dimension of size 2 before the last"
        )


def gated_reference(h: jax.Array, *, activation: Activation) -> jax.Array:
    """`activate` of h [..., c, F]; c is 2 with a gate, and 1 without one."""
    gate, up = _parts(h, activation)
    value = _FUNCTIONS[activation.function](gate)
    return (value if up is None else value * up).astype(h.dtype)


def gated_grad_reference(h: jax.Array, d_out: jax.Array, *, activation: Activation) -> jax.Array:
    """The gradient of `gated_reference`, in the dtype of h."""
    gate, up = _parts(h, activation)
    act, slope = _with_slope(activation.function, gate)
    d_out = d_out.astype(jnp.float32)
    d_gate = d_out * slope
    d_h = jnp.stack([d_gate] if up is None else [d_gate * up, d_out * act], axis=-2)
    if activation.limit is not None:
        raw = h.astype(jnp.float32)
        # The gate has no lower bound.
        size = jnp.stack([raw[..., 0, :], jnp.abs(raw[..., 1, :])], axis=-2)
        d_h = jnp.where(size > activation.limit, jnp.float32(0), d_h)
    return d_h.astype(h.dtype)


def _parts(h: jax.Array, activation: Activation) -> tuple[jax.Array, jax.Array | None]:
    """g and u + b, in float32; without a gate h and None."""
    h = h.astype(jnp.float32)
    if not activation.gated:
        return h[..., 0, :], None
    gate, up = h[..., 0, :], h[..., 1, :]
    if activation.limit is not None:
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
    return gate, up + activation.up_offset


def _with_slope(function: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(_FUNCTIONS[function], (x,), (jnp.ones_like(x),))


def function_and_gradient(
    activation: Activation, h: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Of float32 h the activation, float32, and a function from its cotangent to that of h."""
    if activation.gated:
        return gated_reference(h, activation=activation), partial(
            gated_grad_reference, h, activation=activation
        )
    value, slope = _with_slope(activation.function, h)
    return value, lambda d_out: d_out * slope


def function_unsupported(activation: Activation) -> str | None:
    """What keeps the function from the kernels, or None."""
    if activation.function in IN_KERNELS:
        return None
    return f"the kernels have {', '.join(IN_KERNELS)}; the activation is {activation.function}"


def unsupported(h: jax.Array, *rest: jax.Array | None, activation: Activation) -> str | None:
    """What keeps these types and this activation from the kernels, or None."""
    del rest
    if not activation.gated:
        return "the activation must have a gate"
    if reason := function_unsupported(activation):
        return reason
    if h.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"h must be float32, bfloat16 or float16; it is {h.dtype}"
    return None if h.size else "there must be elements"


activation_op = Op(
    "activation",
    gated_reference,
    "... c f -> ... f",
    whole=("c",),
    roles="tokens . tp -> tokens tp",
)
gated_grad_op = Op(
    "activation_grad",
    gated_grad_reference,
    "... c f, ... f -> ... c f",
    whole=("c",),
    roles="tokens . tp, tokens tp -> tokens . tp",
    kernels=(
        Kernel.triton("expertmesh.core.kernels.triton.activation", "gated_grad", unsupported),
    ),
)


def _with_parts(h: jax.Array, activation: Activation) -> jax.Array:
    """[..., c, F], as the ops have it."""
    return h if activation.gated else jnp.expand_dims(h, -2)


def _fwd(h: jax.Array, *, activation: Activation) -> tuple[jax.Array, jax.Array]:
    return activation_op(_with_parts(h, activation), activation=activation), h


def _bwd(h: jax.Array, d_out: jax.Array, *, activation: Activation) -> tuple[jax.Array]:
    d_h = gated_grad_op(_with_parts(h, activation), d_out, activation=activation)
    return (d_h if activation.gated else jnp.squeeze(d_h, -2),)


_activate = differentiable(_fwd, _bwd)
