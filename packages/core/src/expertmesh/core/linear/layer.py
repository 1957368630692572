"""What the quantized layers, dense and grouped_dense, have in common: options, state, residuals."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from expertmesh.core.linear.quantize_kernel import QuantizedKernel, check_state
from expertmesh.core.mesh import filter_roles
from expertmesh.core.ops.delayed_scaling import DelayedState, init_delayed
from expertmesh.core.quantized import QuantizedArray
from expertmesh.core.recipe import DelayedScaling, LayerFormats, Recipe, quantized_once
from expertmesh.core.specs import pad_spec, spec_axes, strip_axes

__all__ = ["DenseState", "init_dense_state"]

Specs = tuple[PartitionSpec | None, PartitionSpec | None, PartitionSpec | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of a layer under DelayedScaling: a value, carried from step to step.

    Attributes:
      x, kernel: DelayedState of each.
    """

    x: DelayedState
    kernel: DelayedState


def init_dense_state(recipe: DelayedScaling, *, num_experts: int | None = None) -> DenseState:
    """The state of a layer that has seen nothing: multipliers of 1.

    Args:
      recipe: says how long the histories are.
      num_experts: E, of a `grouped_dense`, whose kernel has one scale per expert; None for `dense`.
    """
    experts = () if num_experts is None else (num_experts,)
    return DenseState(init_delayed(recipe), init_delayed(recipe, experts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The static options of a call.

    Attributes:
      recipe: whose formats the GEMMs take.
      out_dtype: dtype of the result.
      reduce_dtype: in which devices add the kernel's gradient.
      given: specs of x, the kernel and the result, as the caller gave them.
      used: where they are in use over Auto axes under a MeshResource (see `specs_in_use`); as given without one.
      zero_rest: of grouped layers; see `grouped_gemm`.
    """

    recipe: Recipe
    out_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    given: Specs
    used: Specs
    zero_rest: bool = True

    @property
    def formats(self) -> LayerFormats:
        return self.recipe.formats()

    @property
    def delayed(self) -> DelayedScaling | None:
        """The recipe, if it has state."""
        return self.recipe if isinstance(self.recipe, DelayedScaling) else None

    @property
    def x_is_quantized_once(self) -> bool:
        """Whether what the forward reads of x serves the weight's gradient too."""
        return quantized_once(self.formats.x, self.formats.x_wgrad)

    @property
    def dy_is_quantized_once(self) -> bool:
        """Whether what the input's gradient reads of dy serves the weight's gradient too."""
        return quantized_once(self.formats.grad_dgrad, self.formats.grad_wgrad)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """The operands of a call that have no gradient.

    Attributes:
      state: DenseState, under DelayedScaling.
      key: uint32[2] or typed, for stochastic rounding.
      kernel_quantized: QuantizedKernel made before.
    """

    state: DenseState | None = None
    key: jax.Array | None = None
    kernel_quantized: QuantizedKernel | None = None


def check_extra(name: str, kernel, extra: Extra, recipe: Recipe | None) -> None:
    """Raises ValueError for state without DelayedScaling or the reverse, and for another kernel's or recipe's cache."""
    check_state(name, recipe, extra.state)
    cached = extra.kernel_quantized
    if recipe is None or cached is None:
        return
    formats = recipe.formats()
    got = cached.forward.format, cached.for_dgrad().format
    if got != (formats.kernel, formats.kernel_dgrad) or cached.forward.shape != kernel.shape:
        raise ValueError(
            f"{name}: kernel_quantized must be of the kernel and of the recipe; got {cached.forward.shape} in {got[0]} "
            f"for kernel {kernel.shape} and recipe={recipe}; make it with quantize_kernel(kernel, recipe)"
        )


def num_contracted(
    name: str, x, kernel, contracting_dims: tuple[Sequence[int], Sequence[int]], batch_dims: int
) -> int:
    """How many dimensions are contracted.

    Raises:
      ValueError: not the last of x and those of the kernel after the first `batch_dims`, or of other sizes.
    """
    of_x, of_kernel = (
        tuple(dim + a.ndim if dim < 0 else dim for dim in dims)
        for a, dims in zip((x, kernel), contracting_dims, strict=True)
    )
    count = len(of_x)
    last = tuple(range(x.ndim - count, x.ndim))
    first = tuple(range(batch_dims, batch_dims + count))
    if not count or of_x != last or of_kernel != first:
        raise ValueError(
            f"{name}: contracted must be the last dimensions of x and as many of kernel, in order, from dimension "
            f"{batch_dims} on; got contracting_dims={contracting_dims} of {x.shape} and {kernel.shape}; transpose them"
        )
    if x.shape[x.ndim - count :] != kernel.shape[batch_dims : batch_dims + count]:
        raise ValueError(
            f"{name}: the contracted dimensions must be equal; got x {x.shape}, kernel {kernel.shape}, "
            f"contracting_dims={contracting_dims}; transpose the kernel"
        )
    return count


def specs_in_use(tokens: PartitionSpec, w, batch_dims: int, x_spec, out_spec) -> Specs:
    """The specs that are not given: tokens as the roles say, K and N as the kernel's tensor parallelism does.

    Args:
      tokens: of the dimensions of x before K, by their roles.
      w: of the kernel, given or by its roles, one entry per dimension.
      batch_dims: 1 where the kernel has experts.
    """
    columns = filter_roles(w[batch_dims + 1 :], "tp")
    if x_spec is None:
        x_spec = (*tokens, *filter_roles(w[batch_dims : batch_dims + 1], "tp"))
    x = pad_spec(x_spec, len(tokens) + 1)
    if out_spec is None:
        out_spec = (*strip_axes(x[:-1], spec_axes(columns)), *columns)
    return x, w, PartitionSpec(*out_spec)


def residuals(q_x: QuantizedArray, q_kernel: QuantizedArray) -> tuple:
    """What the backward reads of x and the kernel, under names for checkpoint policies."""
    names = "quantized_x", "quantized_kernel"
    return tuple(
        jax.tree.map(lambda leaf, name=name: checkpoint_name(leaf, name), q)
        for q, name in zip((q_x, q_kernel), names, strict=True)
    )


def after(kernel: QuantizedArray, dy: QuantizedArray):
    """Both, the kernel not before `dy` is known.

    Else the compiler takes the forward's gathered weight for the backward's, and keeps it alive in between.
    """
    return jax.lax.optimization_barrier((kernel, dy))


def gradient_keys(name: str, layer: Layer, key):
    """A key for dy along N and one for dy along the tokens; None for each where nothing is random."""
    if not layer.formats.is_stochastic:
        return None, None
    if key is None:
        raise ValueError(
            f"{name}: a key must be given where the recipe rounds gradients at random; got key=None, "
            f"recipe={layer.recipe}; pass key=jax.random.key(...), another one in each step and layer, or "
            "disable_stochastic_rounding"
        )
    return tuple(jax.random.split(key))
