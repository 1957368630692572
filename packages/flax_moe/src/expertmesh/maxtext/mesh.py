"""Which axes of MaxText's mesh play which role, by its logical axis rules and the axes of a layer's weights."""

import dataclasses

from maxtext.layers import moe
from maxtext.utils.sharding import get_logical_axis_rules, logical_to_mesh_axes

from expertmesh.core import MeshResource
from expertmesh.core.specs import entry_axes, make_entry

__all__ = ["Layout", "layout_of"]

_TOKENS = ("activation_batch_moe", "activation_length_moe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What the block is told of a mesh.

    Attributes:
      resource: the role of each axis of more than one device.
      ep_axis: axes that split the experts and exchange tokens; None: there are none.
      shard_exp_on_fsdp: whether fsdp splits the weights by experts, see `expertmesh.flax_moe.MoEConfig`.
    """

    resource: MeshResource
    ep_axis: tuple[str, ...] | None
    shard_exp_on_fsdp: bool


def layout_of(layer: moe.RoutedMoE) -> Layout:
    """The layout of a layer, derived from the logical axis rules in context, or without those the config's.

    Of the dimensions [E, D, F] of the layer's `wi_kernel_axes`: the axes of E that are those of `activation_exp` too
    are expert parallelism; others of E, or those of D, are fsdp; those of F are tensor parallelism. Axes that split
    the tokens alone are data or context parallelism. Axes of one device have no role.

    Args:
      layer: MaxText's layer, of a mesh.

    Raises:
      ValueError: the rules split E and D over axes of fsdp at once, or E by fsdp outside of expert parallelism.
    """
    experts, embed, mlp = _mesh_axes(layer, layer.wi_kernel_axes)
    (exchanged,) = _mesh_axes(layer, ("activation_exp",))
    ep = tuple(axis for axis in experts if axis in exchanged)
    by_expert = tuple(axis for axis in experts if axis not in ep)
    if experts != ep + by_expert or (by_expert and embed):
        raise ValueError(
            "expertmesh.maxtext: logical_axis_rules must split weights [E, D, F] over expert parallelism, then fsdp, "
            f"along E, or over fsdp along D; got E over {experts}, of which {ep} are of activation_exp, and D over "
            f"{embed}; change custom_mesh_and_rule, or give one of the axes one device"
        )
    weights = {*experts, *embed, *mlp}
    batch, length = (
        make_entry(tuple(axis for axis in axes if axis not in weights))
        for axes in _mesh_axes(layer, _TOKENS)
    )
    resource = MeshResource(
        dp_resource=batch,
        fsdp_resource=make_entry(by_expert or embed),
        ep_resource=make_entry(ep),
        tp_resource=make_entry(mlp),
        cp_resource=length,
    )
    return Layout(resource=resource, ep_axis=ep or None, shard_exp_on_fsdp=bool(by_expert))


def _mesh_axes(layer: moe.RoutedMoE, names: tuple[str | None, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of more than one device of each logical name, each axis once."""
    rules = get_logical_axis_rules() or layer.config.logical_axis_rules
    return tuple(map(entry_axes, logical_to_mesh_axes(names, layer.mesh, rules=rules)))
