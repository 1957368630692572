"""What a block and its stages refuse, and which experts they hold. Errors name `function`."""

from collections.abc import Collection
from math import prod

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import AbstractMesh, AxisType

from expertmesh.core.mesh import current_resource
from expertmesh.core.specs import axes_of_type, entry_axes, mesh_of
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import Params, check_array

__all__ = ["check_expert_bias", "check_latent", "check_tokens", "ep_axes", "experts_held"]


def check_tokens(function: str, x: jax.Array) -> None:
    """Raises unless x is float[..., D] with tokens, its sizes numbers."""
    check_array(function, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{function}: x must be floating point; got dtype={x.dtype}; cast it to config.dtype"
        )
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
    spec = () if wi is None else tuple(jax.typeof(wi).sharding.spec)
    if config.shard_exp_on_fsdp and spec and spec[0]:
        raise ValueError(
            f"{function}: under shard_exp_on_fsdp ep_axis must be given, or a MeshResource in context; "
            f"got ep_axis=None, wi over {spec}; pass MoEConfig(ep_axis=...), its first axes"
        )
    return entry_axes(spec[0]) if spec else ()


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
