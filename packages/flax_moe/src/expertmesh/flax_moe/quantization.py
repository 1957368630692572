"""State that a quantized block carries from step to step, and weights that it quantizes once per step.

The *layers* of a block are its GEMMs with a parameter that a recipe quantizes: `wi`, `wo`, and with shared experts
`shared_wi`, `shared_wo`, at a latent width `latent_down`, `latent_up`. The router's is not one of them.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core.linear.layer import DenseState, init_dense_state
from expertmesh.core.linear.quantize_weight import QuantizedWeight, quantize_weight
from expertmesh.core.mesh import current_resource
from expertmesh.core.quantization.recipe import DelayedScaling, Recipe, current_recipe
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import (
    EXPERTS,
    LATENT,
    LAYERS,
    SHARED,
    Params,
    whole_params,
    whole_specs,
)

__all__ = [
    "Quantization",
    "init_quant_state",
    "layers_of",
    "output_and_state",
    "placed_like",
    "quantize_weights",
]


def layers_of(config: MoEConfig) -> tuple[str, ...]:
    """Of the block."""
    shared, latent = config.shared_expert_dim is not None, config.latent_dim is not None
    return EXPERTS + SHARED * shared + LATENT * latent


def init_quant_state(config: MoEConfig) -> dict[str, DenseState] | None:
    """The initial state of a block's quantizers.

    Args:
      config: see MoEConfig; without a recipe of its own, under the one in context.

    Returns:
      Under DelayedScaling one `DenseState` per layer, with a multiplier and a history of its input and of its weight;
      of `wi` and `wo`, for each expert. It is the same on every mesh, and replicated. None under any other recipe, and
      without one.
    """
    MoEConfig.check("init_quant_state", config=config)
    recipe = config.under(current_recipe()).recipe
    if not isinstance(recipe, DelayedScaling):
        return None
    return {
        name: init_dense_state(recipe, num_experts=config.num_experts if name in EXPERTS else None)
        for name in layers_of(config)
    }


def quantize_weights(params: Params, config: MoEConfig) -> dict[str, QuantizedWeight]:
    """Quantizes a block's weights once for all calls between two updates, such as the microbatches of a step.

    Args:
      params, config: as for `moe`.

    Returns:
      One QuantizedWeight per layer, laid out like its parameter: the `weights_quantized` of `moe`, which gives the same
      result as without. Not differentiable; the gradients still go to `params`.

    Raises:
      ValueError: no recipe; DelayedScaling, whose scales change with each call; blocks that a weight or its shards are
        not made of.

    Costs what `expertmesh.core.quantize_weight` costs: each device quantizes its shards.
    """
    MoEConfig.check("quantize_weights", config=config)
    recipe = config.under(current_recipe()).recipe
    if recipe is None or isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"quantize_weights: there must be a recipe without state; got recipe={recipe}; "
            "leave weights_quantized out"
        )
    params = whole_params("quantize_weights", params)
    specs = {} if current_resource() is None else whole_specs(config)
    return {
        name: quantize_weight(
            params[name],
            recipe,
            batch_dims=int(name in EXPERTS),
            spec=specs.get(name),
        )
        for name in layers_of(config)
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantization:
    """What the layers of a call are given besides tokens and weights.

    Attributes:
      state: of `init_quant_state`, or None.
      weights: of `quantize_weights`, or None.
      key: for stochastic rounding, or None.
    """

    state: Mapping[str, Any] | None = None
    weights: Mapping[str, Any] | None = None
    key: jax.Array | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a stage."""
        return dict(quant_state=self.state, weights_quantized=self.weights, key=self.key)

    def of(self, names: Collection[str]) -> "Quantization":
        """Of some layers only."""
        state, weights = (
            each and {name: value for name, value in each.items() if name in names}
            for each in (self.state, self.weights)
        )
        return Quantization(state, weights, self.key)

    def checked(self, function: str, config: MoEConfig, layers: Collection[str]) -> "Quantization":
        """The same, its state without a derivative; `config` is the one under the recipe in context.

        Raises:
          ValueError: something that the recipe needs is missing or has no use, or is not of these layers.
        """
        _check_state(function, config.recipe, self.state)
        _check_weights(function, config.recipe, self.weights)
        _check_layers(function, layers, quant_state=self.state, weights_quantized=self.weights)
        _check_key(function, config.recipe, self.key)
        return dataclasses.replace(self, state=jax.lax.stop_gradient(self.state))

    def with_weights(self, params: Params, config: MoEConfig) -> "Quantization":
        """With the weights quantized once, for several parts; where there is a state, it may change with each part."""
        if config.recipe is None or self.state is not None or self.weights is not None:
            return self
        return dataclasses.replace(self, weights=quantize_weights(params, config))

    def of_part(self, state: Any, number: jax.Array) -> "Quantization":
        """Of one part of the tokens, after the parts before it have left `state`."""
        key = None if self.key is None else jax.random.fold_in(self.key, len(LAYERS) + number)
        return dataclasses.replace(self, state=state, key=key)

    def layer(self, name: str) -> dict[str, Any]:
        """The arguments of one layer; its random numbers are its own."""
        return dict(
            state=self.state and self.state[name],
            weight_quantized=self.weights and self.weights[name],
            key=None if self.key is None else jax.random.fold_in(self.key, LAYERS.index(name)),
        )


def _check_state(function: str, recipe: Recipe | None, state: Any) -> None:
    delayed = isinstance(recipe, DelayedScaling)
    if delayed != (state is not None):
        raise ValueError(
            f"{function}: quant_state must be given with DelayedScaling, and with nothing else; got recipe={recipe}, "
            f"quant_state {'None' if state is None else 'given'}; "
            f"{'start with init_quant_state(config)' if delayed else 'leave it out'}"
        )


def _check_weights(function: str, recipe: Recipe | None, weights: Any) -> None:
    if weights is not None and (recipe is None or isinstance(recipe, DelayedScaling)):
        raise ValueError(
            f"{function}: weights_quantized must go with a recipe without state; got recipe={recipe}; leave it out"
        )


def _check_key(function: str, recipe: Recipe | None, key: jax.Array | None) -> None:
    if key is None and recipe is not None and recipe.formats().is_stochastic:
        raise ValueError(
            f"{function}: key must be given for a recipe with stochastic rounding; got key=None, recipe={recipe}; "
            "pass a new jax.random.key for each call"
        )


def _check_layers(function: str, layers: Collection[str], **trees: Any) -> None:
    for name, tree in trees.items():
        if tree is not None and set(tree) != set(layers):
            raise ValueError(
                f"{function}: {name} must have the layers {', '.join(sorted(layers))}; "
                f"got {', '.join(sorted(tree))}; make it for this config"
            )


def output_and_state(output: Any, state: Any) -> tuple[jax.Array, Any]:
    """(y, next state) of what a layer returns that was given `state`, or None."""
    if state is None:
        return output, None
    y, new = output
    return y, placed_like(jax.lax.stop_gradient(new), state)


def placed_like(new: Any, old: Any) -> Any:
    """The new state where the old one was, so that a carry keeps its type; over Auto axes on every device."""
    return jax.tree.map(_placed_like, new, old)


def _placed_like(new: jax.Array, old: jax.Array) -> jax.Array:
    mesh, spec = jax.typeof(new).sharding.mesh, jax.typeof(old).sharding.spec
    if AxisType.Explicit in mesh.axis_types:
        new = jax.sharding.reshard(new, NamedSharding(mesh, spec))
    elif AxisType.Auto in mesh.axis_types:
        new = jax.lax.with_sharding_constraint(new, NamedSharding(mesh, PartitionSpec()))
    return new
