"""What the experts' layers are given where spare slots hold copies: the weights of all slots, in order of slots."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from expertmesh import ep
from expertmesh.core.linear.adapted import Adapted
from expertmesh.core.linear.quantize_weight import quantize_weight
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import EXPERTS, Params
from expertmesh.flax_moe.quantization import Quantization

__all__ = ["with_copies"]


def with_copies(
    params: Params,
    given: Quantization,
    copies: ep.Copies | None,
    config: MoEConfig,
    *,
    specs: Mapping[str, PartitionSpec],
) -> tuple[Params, Quantization]:
    """Parameters and what the layers are given, of all slots.

    Weights are rounded to what is computed in before they travel: to `config.dtype`, or under a recipe to its format,
    so that what arrives is what the expert's own rank computes with. Their cotangents travel in float32.

    Args:
      params: `wi`, `wo`, and the biases if there are any.
      given: of these layers.
      copies: of `expertmesh.ep.balance`; None where there are none, and nothing changes.
      config: under the recipe in context.
      specs: where parameters are, for Auto axes under a MeshResource.
    """
    if copies is None:
        return params, given
    if config.recipe is not None:
        weights = given.weights or {
            name: quantize_weight(params[name], config.recipe, batch_dims=1, spec=specs.get(name))
            for name in EXPERTS
        }
        copied = {name: _copied(w, copies, spec=specs.get(name)) for name, w in weights.items()}
        given = dataclasses.replace(given, weights=copied)
    dtypes = dict.fromkeys(EXPERTS, config.dtype)
    of_slots = {
        name: _copied(w, copies, dtype=dtypes.get(name), spec=specs.get(name))
        for name, w in params.items()
    }
    return of_slots, given


def _copied(tree: Any, copies: ep.Copies, *, spec: PartitionSpec | None, dtype: Any = None) -> Any:
    """A weight in any form, each of its arrays [E, ...]; a frozen one has no cotangents."""
    if isinstance(tree, Adapted):
        frozen = jax.lax.stop_gradient(tree.weight)
        weight = _copied(frozen, copies, spec=spec, dtype=dtype)
        a, b = (_copied(x, copies, spec=None, dtype=dtype) for x in (tree.a, tree.b))
        return dataclasses.replace(tree, weight=weight, a=a, b=b)
    if isinstance(tree, jax.Array):
        return ep.copy_experts(tree, copies, dtype=dtype, spec=spec)

    def copy(x: jax.Array) -> jax.Array:
        of_leaf = spec if spec is not None and len(spec) == x.ndim else None
        return ep.copy_experts(x, copies, spec=of_leaf)

    return jax.tree.map(copy, tree)
