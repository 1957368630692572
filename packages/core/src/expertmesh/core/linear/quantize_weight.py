"""A weight in the formats of a recipe: the copy that the forward reads, and the one of the input's gradient."""

import dataclasses
from typing import Any, TypeGuard

import jax
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.linear.adapted import base_of, check_weights
from expertmesh.core.mesh import current_resource
from expertmesh.core.quantization.delayed_scaling import DelayedState, quantize_delayed
from expertmesh.core.quantization.quantize import plain, quantize, quantize_square
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import (
    DelayedScaling,
    LayerFormats,
    Recipe,
    TensorFormat,
    as_recipe,
    current_recipe,
)

__all__ = ["QuantizedWeight", "quantize_weight"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight as the forward and the input gradient read it; a pytree.

    Hopper's GEMMs of 8 bits read memory along what they contract. What a program is given lies in the order of its
    dimensions; in another order it is transposed in each call.

    Attributes:
      forward: quantized along K.
      dgrad: quantized along N. None: `forward` serves both, as it can with one scale per tensor or square blocks. For
        inference it may be left out: `dataclasses.replace(quantized, dgrad=None)`.
      k_dim: the dimension K of the weight, which is the last one of `forward`; None: `forward` has the weight's shape
        (static).
    """

    forward: QuantizedArray
    dgrad: QuantizedArray | None = None
    k_dim: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        sizes = list(self.forward.shape)
        if self.k_dim is not None:
            sizes.insert(self.k_dim, sizes.pop())
        return tuple(sizes)

    def for_forward(self) -> QuantizedArray:
        """`forward` in the weight's shape."""
        return self.forward if self.k_dim is None else self.forward.move_dim(-1, self.k_dim)

    def for_dgrad(self) -> QuantizedArray:
        """What the input gradient reads, in the weight's shape."""
        return self.for_forward() if self.dgrad is None else self.dgrad


def quantize_weight(
    weight: jax.Array,
    recipe: Recipe | str | None = None,
    *,
    batch_dims: int = 0,
    state: DelayedState | None = None,
    spec: PartitionSpec | None = None,
) -> Any:
    """Quantizes a weight once for several calls of a layer, such as the microbatches of a step.

    Args:
      weight: float[K, *N] of `dense`, or float[E, K, *N] with `batch_dims=1` of `grouped_dense`; or an Adapted, whose
        weight it then is.
      recipe: of the layer; None: the one in context.
      batch_dims: leading dimensions whose elements have scales of their own.
      state: of the weight, under DelayedScaling; with E entries where `batch_dims=1`.
      spec: where `weight` is over Auto axes under a MeshResource; None: fsdp along K, ep along E.

    Returns:
      QuantizedWeight, for `weight_quantized=` of the layer. Under DelayedScaling `(QuantizedWeight, new_state)`; the
      layer then leaves the weight's state as it is.

    Raises:
      ValueError: no recipe; a state where the recipe has none, or the reverse; blocks that a shard would straddle.

    Not differentiable: the gradient goes to the layer's `weight`. Each device quantizes its shard, once for the forward
    and once for the input gradient, but where one copy serves both: under DelayedScaling, and with one scale per tensor
    or square blocks on GPUs other than Hopper's. Scales of a whole tensor are reduced over the axes that shard it;
    nothing else crosses devices.
    """
    check_weights("quantize_weight", weight=weight)
    recipe = as_recipe(recipe) or current_recipe()
    if recipe is None:
        raise ValueError(
            "quantize_weight: there must be a recipe; got recipe=None, and none in context; pass recipe= or call it "
            "under autocast(recipe)"
        )
    check_state("quantize_weight", recipe, state)
    weight = jax.lax.stop_gradient(base_of(weight))
    resource, roles = current_resource(), ("experts", "fsdp")[1 - batch_dims :]
    if spec is None and resource is not None:
        spec = PartitionSpec(*map(resource.entry, roles))
    forward, dgrad, state = weight_copies(weight, recipe, batch_dims, state, spec, for_dgrad=True)
    if not serves_both(recipe.formats()):
        return QuantizedWeight(forward, dgrad)
    if state is not None:
        return QuantizedWeight(forward), state
    if not _jax.runs_hopper_kernels():
        return QuantizedWeight(forward)
    return QuantizedWeight(forward.move_dim(batch_dims, -1), dgrad, batch_dims)


def weight_copies(
    weight: Any,
    recipe: Recipe,
    batch_dims: int,
    state: DelayedState | None,
    spec: PartitionSpec | None,
    *,
    for_dgrad: bool,
) -> tuple[QuantizedArray, QuantizedArray | None, DelayedState | None]:
    """(`forward_copy`, `dgrad_copy` if `for_dgrad`, the new state) for GEMMs of the same program.

    Where one copy serves both, the two have equal values, and without a state each lies as its GEMM reads it.
    """
    formats = recipe.formats()
    format, one = formats.weight, serves_both(formats)
    if one and state is None and not _is_own_copy(weight, format):
        dims = dict(axis=batch_dims, across=weight.ndim - 1, batch_dims=batch_dims)
        source = plain(weight, spec=spec)
        return *quantize_square(source, format, dgrad=for_dgrad, spec=spec, **dims), None
    forward, state = forward_copy(weight, recipe, batch_dims, state, spec)
    if not for_dgrad:
        return forward, None, state
    return forward, forward if one else dgrad_copy(weight, recipe, batch_dims, spec), state


def forward_copy(
    weight: Any,
    recipe: Recipe,
    batch_dims: int,
    state: DelayedState | None,
    spec: PartitionSpec | None,
) -> tuple[QuantizedArray, DelayedState | None]:
    """(the weight quantized along K, its new state); a QuantizedArray of the format is its own copy."""
    format, last = recipe.formats().weight, weight.ndim - 1
    if state is not None and isinstance(recipe, DelayedScaling):
        return quantize_delayed(plain(weight, spec=spec), state, recipe, spec=spec)
    return _copy(weight, format, (batch_dims, last), batch_dims, spec), None


def dgrad_copy(
    weight: Any, recipe: Recipe, batch_dims: int, spec: PartitionSpec | None
) -> QuantizedArray:
    """The weight quantized along the last of N; as `forward_copy`."""
    format, last = recipe.formats().weight_dgrad, weight.ndim - 1
    return _copy(weight, format, (last, batch_dims), batch_dims, spec)


def _copy(
    weight: Any,
    format: TensorFormat,
    dims: tuple[int, int],
    batch_dims: int,
    spec: PartitionSpec | None,
) -> QuantizedArray:
    """Of a weight along and across these dimensions."""
    if _is_own_copy(weight, format):
        return weight
    axis, across = dims
    options: dict[str, Any] = dict(axis=axis, across=across, batch_dims=batch_dims, spec=spec)
    return quantize(plain(weight, spec=spec), format, **options)


def _is_own_copy(weight: Any, format: TensorFormat) -> TypeGuard[QuantizedArray]:
    """Whether the weight is quantized in this format, in square blocks."""
    square = format.block is not None and format.block[0] == format.block[1]
    return isinstance(weight, QuantizedArray) and weight.format == format and square


def serves_both(formats: LayerFormats) -> bool:
    """Whether quantizing along K is quantizing along N: one scale per tensor, or square blocks."""
    block = formats.weight.block
    return formats.weight == formats.weight_dgrad and (block is None or block[0] == block[1])


def check_state(name: str, recipe: Recipe | None, state: Any) -> None:
    """Raises ValueError unless there is state exactly where the recipe needs it."""
    delayed = isinstance(recipe, DelayedScaling)
    if delayed != (state is not None):
        raise ValueError(
            f"{name}: state must be given with DelayedScaling, and with nothing else; got recipe={recipe}, "
            f"state={'None' if state is None else 'a state'}; "
            f"{'start with init_dense_state(recipe)' if delayed else 'leave it out'}"
        )
