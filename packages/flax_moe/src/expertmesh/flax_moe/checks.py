"""What a block and its stages refuse, and which experts they hold. Errors name `function`."""

import dataclasses
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import AbstractMesh, AxisType

from expertmesh.core.mesh import current_resource
from expertmesh.core.operands import FLOATS, INTEGERS, check_arrays, check_numbers
from expertmesh.core.specs import axes_of_type, entry_axes, mesh_of
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import GATE, GATE_BIAS, Params

__all__ = [
    "Coefficient",
    "check_expert_bias",
    "check_latent",
    "check_outside",
    "check_tokens",
    "coefficient",
    "ep_axes",
    "experts_held",
    "is_on",
    "type_of",
]

Coefficient = float | jax.Array

TOKENS = dataclasses.replace(FLOATS, remedy="cast it to config.dtype")


def check_tokens(function: str, x: jax.Array) -> None:
    """Raises unless x is float[..., D] with tokens, its sizes numbers."""
    check_arrays(function, TOKENS, x=x)
    if x.ndim < 2:
        raise ValueError(
            f"{function}: x must be [..., D] with tokens; got x.shape={x.shape}; add x[None]"
        )
    if any(map(is_symbolic_dim, x.shape)):
        raise ValueError(
            f"{function}: sizes must be numbers, by which tokens are divided over devices; got x.shape={x.shape}; "
            "export it once for each size, and pad"
        )


def check_expert_bias(
    function: str, config: MoEConfig, expert_bias: jax.Array | None, topk_idx: jax.Array | None
) -> None:
    """Raises where the config has a bias and neither it nor choices are given."""
    if config.use_expert_bias and expert_bias is None and topk_idx is None:
        raise ValueError(
            f"{function}: expert_bias must be given under use_expert_bias; got expert_bias=None; start with "
            "jnp.zeros(E), or leave use_expert_bias out"
        )


def check_outside(
    function: str,
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    logits: jax.Array | None,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None,
    aux_loss_coeff: Coefficient | None,
    z_loss_coeff: Coefficient | None,
) -> None:
    """Raises unless what a router outside gives is of x's tokens, and one router alone gives logits."""
    coeffs = dict(aux_loss_coeff=aux_loss_coeff, z_loss_coeff=z_loss_coeff)
    _check_coefficients(function, coeffs)
    check_arrays(function, FLOATS, optional=True, logits=logits, topk_weights=topk_weights)
    check_arrays(function, INTEGERS, optional=True, topk_idx=topk_idx)
    _check_of_tokens(function, x, "E", config.num_candidates, logits=logits)
    gate = [name for name in GATE + GATE_BIAS if name in params]
    if logits is not None and gate:
        raise ValueError(
            f"{function}: logits must be given to a block without a gate, which would have no gradient; "
            f"got logits and {', '.join(gate)}; leave one of them out, as by MoEConfig(use_gate=False)"
        )
    if topk_weights is None:
        return
    if topk_idx is None:
        raise ValueError(
            f"{function}: topk_weights must go with topk_idx, the choices that they weigh; got topk_idx=None; "
            "pass both, or logits"
        )
    choices = dict(topk_idx=topk_idx, topk_weights=topk_weights)
    _check_of_tokens(function, x, "K", config.top_k, **choices)
    if logits is None and "gate_kernel" not in params:
        _check_no_losses(function, config, coeffs)


def _check_of_tokens(
    function: str, x: jax.Array, dim: str, size: int, **arrays: jax.Array | None
) -> None:
    for name, array in arrays.items():
        if array is not None and array.shape != (*x.shape[:-1], size):
            raise ValueError(
                f"{function}: {name} must be [..., {dim}] for the tokens of x, {dim} = {size}; "
                f"got {name}.shape={array.shape}, x.shape={x.shape}; pass one number per token and {dim}"
            )


def _check_no_losses(
    function: str, config: MoEConfig, coeffs: Mapping[str, Coefficient | None]
) -> None:
    for name, value in coeffs.items():
        coeff = coefficient(config, name, value)
        if is_on(coeff):
            raise ValueError(
                f"{function}: {name} must be 0 where there are neither a gate_kernel nor logits, whose loss it is; "
                f"got {name}={coeff}; pass logits, or add the loss yourself"
            )


def _check_coefficients(function: str, coeffs: Mapping[str, Any]) -> None:
    for name, value in coeffs.items():
        if value is not None and not isinstance(value, int | float | np.number | jax.Array):
            raise TypeError(
                f"{function}: {name} must be a number or a jax.Array; got {name}={value!r}; "
                f"pass jnp.float32({name})"
            )
        if isinstance(value, int | float | np.number):
            check_numbers(function, "0 turns it off", least=0, **{name: value})
        if isinstance(value, jax.Array) and value.shape:
            raise ValueError(
                f"{function}: {name} must be one number; got {name}.shape={value.shape}; pass a scalar"
            )


def coefficient(config: MoEConfig, name: str, value: Coefficient | None) -> Coefficient:
    """The one that is given, else the config's."""
    kept: float = getattr(config, name)
    return kept if value is None else value


def is_on(coeff: Coefficient) -> bool:
    """Whether there is a loss: what is traced may be other than 0."""
    return isinstance(coeff, jax.Array) or coeff != 0


def check_latent(function: str, config: MoEConfig, x: jax.Array) -> None:
    """Raises unless x is as wide as the experts, if those work at a latent width."""
    if config.latent_dim not in (None, x.shape[-1]):
        raise ValueError(
            f"{function}: x must be [..., L] with L = latent_dim; got x.shape={x.shape}, "
            f"latent_dim={config.latent_dim}; pass what stages.to_latent returns"
        )


def ep_axes(function: str, params: Params, config: MoEConfig) -> tuple[str, ...]:
    """The axes of the EP group; () for none."""
    if config.ep_axis is not None:
        return entry_axes(config.ep_axis)
    resource = current_resource()
    if resource is not None:
        return entry_axes(resource.ep_resource)
    wi = params.get("wi")
    spec = () if wi is None else tuple(type_of(wi).sharding.spec)
    if config.shard_exp_on_fsdp and spec and spec[0]:
        raise ValueError(
            f"{function}: under shard_exp_on_fsdp ep_axis must be given, or a MeshResource in context; "
            f"got ep_axis=None, wi over {spec}; pass MoEConfig(ep_axis=...), its first axes"
        )
    return entry_axes(spec[0]) if spec else ()


def type_of(weight: Any) -> Any:
    """JAX's type of a weight; of a frozen or a quantized one that of its data."""
    return jax.typeof(jax.tree.leaves(weight)[0])


def experts_held(function: str, x: jax.Array, config: MoEConfig, ep_axis: tuple[str, ...]) -> int:
    """Experts in the weights as the caller sees them: all, or one shard's where the EP axis is Manual."""
    mesh = mesh_of(x)
    manual = axes_of_type(mesh, AxisType.Manual)
    ranks: int = prod(mesh.shape[axis] for axis in manual if axis in ep_axis)
    if config.num_experts % ranks:
        raise ValueError(
            f"{function}: num_experts must be divisible by the EP size; "
            f"got num_experts={config.num_experts}, ep_size={ranks}, axis={ep_axis!r}; change one of them"
        )
    held = config.num_experts // ranks
    if config.shard_exp_on_fsdp:
        _check_experts_split(function, held, mesh, ep_axis, manual)
    return held


def _check_experts_split(
    function: str, held: int, mesh: AbstractMesh, ep_axis: tuple[str, ...], manual: Collection[str]
) -> None:
    """Raises unless ep and fsdp, as far as they are not Manual, divide the experts."""
    resource = current_resource()
    fsdp = () if resource is None else resource.axes("fsdp")
    split = {axis: mesh.shape.get(axis, 1) for axis in (*ep_axis, *fsdp) if axis not in manual}
    if held % prod(split.values()):
        raise ValueError(
            f"{function}: under shard_exp_on_fsdp num_experts must be divisible by the sizes of ep and fsdp together; "
            f"got num_experts={held}, sizes={split}; change one of them, or leave shard_exp_on_fsdp out"
        )
