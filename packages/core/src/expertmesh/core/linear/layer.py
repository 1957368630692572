"""What layers of GEMMs, dense and grouped, have in common: the law, options, state, residuals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.linear.quantize_weight import QuantizedWeight, check_state
from expertmesh.core.mesh import current_resource, filter_roles
from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.quantization.delayed_scaling import DelayedState, init_delayed
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.quantization.quantized import QuantizedArray, is_quantized, named
from expertmesh.core.quantization.recipe import DelayedScaling, LayerFormats, Recipe
from expertmesh.core.specs import pad_spec, spec_axes, strip_axes

__all__ = ["DenseState", "init_dense_state"]

Specs = tuple[PartitionSpec | None, PartitionSpec | None, PartitionSpec | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of a layer under DelayedScaling: a value, carried from step to step.

    Attributes:
      x, weight: DelayedState of each.
    """

    x: DelayedState
    weight: DelayedState


def init_dense_state(recipe: DelayedScaling, *, num_experts: int | None = None) -> DenseState:
    """The state of a layer that has seen nothing: multipliers of 1.

    Args:
      recipe: says how long the histories are.
      num_experts: E, of a `grouped_dense`, whose weight has one scale per expert; None for `dense`.
    """
    experts = () if num_experts is None else (num_experts,)
    return DenseState(init_delayed(recipe), init_delayed(recipe, experts))


class Term(NamedTuple):
    """The dimensions of an operand or a result, and the role of each, as a rule has them (`core/rule.py`)."""

    dims: str
    roles: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Those of y = x w; dx = dy w^T and dw = x^T dy are its permutations.

    Attributes:
      groups: of the sizes of groups, the third operand; () where rows have none.
      plan: of all three GEMMs; None: the rule's.
    """

    x: Term
    w: Term
    y: Term
    groups: tuple[Term, ...] = ()
    plan: Callable[[Query], Plan] | None = None

    def gemm(
        self,
        name: str,
        law: str,
        reference: Callable[..., Any],
        kernels: tuple[Kernel, ...],
        *more: Term,
    ) -> Op:
        """The op of `law`, such as "xw y": what both operands have and the result lacks is contracted.

        `more`: operands after them and the groups.
        """
        a, b, result = (getattr(self, letter) for letter in law.replace(" ", ""))
        terms = (a, b, *self.groups, *more, result)
        sharding, roles = (
            f"{', '.join(side[:-1])} -> {side[-1]}" for side in zip(*terms, strict=True)
        )
        common = set(a.dims.split()) & set(b.dims.split())
        return Op(
            name,
            reference,
            sharding,
            summed=tuple(sorted(common - set(result.dims.split()))),
            roles=roles,
            parameter=terms.index(self.w),
            plan=self.plan,
            kernels=kernels,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """What the three GEMMs of a layer are: y = x w, dx = dy w^T, dw = x^T dy. Of all rows, or of groups of rows.

    Attributes:
      name: of the layer, in messages.
      terms: of the GEMMs.
      fprop, dgrad, wgrad: the GEMMs; of groups their sizes are the third operand.
      fprop_low_rank, dgrad_low_rank: the first two, and a term of low rank that is part of their sums, u B and v A^T:
        its operands are the last two. None where it is a GEMM of its own.
      add_bias, bias_grad: y + bias, and the sum of dy over the tokens; of groups a bias may be times rows' weights.
      row_roles: of the dimensions of x before K (see `MeshResource.axes`).
      quantize_x: `quantize_x(x, group_sizes, state, layer, for_wgrad=) -> (along K, along the tokens, state after)`;
        x of groups, and dy, may be `Rows`.
      quantize_dy: `quantize_dy(dy, group_sizes, keys, layer, tokens=) -> Copies`; tokens: the last dimension of them,
        None where no copy along them is needed.
      cotangents: `cotangents(dy, b, group_sizes, u) -> (dy b^T, u^T dy)`, both in float32, of plain rows that are read
        once; None: two GEMMs.
    """

    name: str
    terms: Terms
    fprop: Op
    dgrad: Op
    wgrad: Op
    add_bias: Op
    bias_grad: Op
    row_roles: tuple[str, ...]
    quantize_x: Callable[..., Any]
    quantize_dy: Callable[..., Any]
    cotangents: Op | None = None
    fprop_low_rank: Op | None = None
    dgrad_low_rank: Op | None = None

    @property
    def weight_roles(self) -> tuple[str, ...]:
        """Of the dimensions of w up to K: experts, if it has them, and K."""
        return tuple(self.terms.w.roles.split()[:-1])

    @property
    def batch_dims(self) -> int:
        """Dimensions of w before K: that of experts, where rows are grouped."""
        return len(self.weight_roles) - 1

    def bias_spec(self, w_spec: PartitionSpec | None) -> PartitionSpec | None:
        """Of the bias in use, whose dimensions are those of w without K."""
        if w_spec is None:
            return None
        leading = self.batch_dims
        return filter_roles(
            (*w_spec[:leading], *w_spec[leading + 1 :]), *self.weight_roles[:-1], "tp"
        )

    def weight_options(self, w: Any) -> dict[str, Any]:
        """Of the ops that make gradients of the weight and of the bias."""
        return {"num_experts": w.shape[0]} if self.batch_dims else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The static options of a call.

    Attributes:
      law: which GEMMs.
      recipe: whose formats the GEMMs take; None: operands as they are.
      x_dtype, w_dtype: dtypes of x and w, and of their gradients; without a recipe w is cast to that of x.
      out_dtype: dtype of the result.
      reduce_dtype: of the reduction of w's gradient over devices.
      caller: specs of x, w and the result, as the caller gave them.
      resolved: where they are in use over Auto axes under a MeshResource (see `resolved_specs`); as given without one.
      clear_padding: of grouped layers; see `grouped_gemm`.
    """

    law: Linear
    recipe: Recipe | None
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype
    out_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    caller: Specs
    resolved: Specs
    clear_padding: bool = False

    @property
    def row_options(self) -> dict[str, Any]:
        """Of the GEMMs whose result is rows."""
        return {"clear_padding": self.clear_padding} if self.law.batch_dims else {}

    @property
    def formats(self) -> LayerFormats:
        """Those of the recipe, which there must be."""
        assert self.recipe is not None
        return self.recipe.formats()

    @property
    def delayed(self) -> DelayedScaling | None:
        """The recipe, if it has state."""
        return self.recipe if isinstance(self.recipe, DelayedScaling) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NonDiffOperands:
    """The operands of a call that have no gradient.

    Attributes:
      state: DenseState, under DelayedScaling.
      key: uint32[2] or typed, for stochastic rounding.
      weight_quantized: QuantizedWeight made before.
    """

    state: DenseState | None = None
    key: jax.Array | None = None
    weight_quantized: QuantizedWeight | None = None


def check_extra(name: str, weight: Any, extra: NonDiffOperands, recipe: Recipe | None) -> None:
    """Raises ValueError for state without DelayedScaling or the reverse, and for another weight's or recipe's cache."""
    check_state(name, recipe, extra.state)
    cached = extra.weight_quantized
    if recipe is None or cached is None:
        return
    formats = recipe.formats()
    got = cached.forward.format, (cached.dgrad or cached.forward).format
    if got != (formats.weight, formats.weight_dgrad) or cached.shape != weight.shape:
        raise ValueError(
            f"{name}: weight_quantized must be of the weight and of the recipe; got {cached.shape} in {got[0]} "
            f"for weight {weight.shape} and recipe={recipe}; make it with quantize_weight(weight, recipe) of that shape"
        )


def num_contracted(
    name: str,
    x: Any,
    weight: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    batch_dims: int,
) -> int:
    """How many dimensions are contracted.

    Raises:
      ValueError: not the last of x and those of the weight after the first `batch_dims`, or of other sizes.
    """
    of_x, of_weight = (
        tuple(dim + a.ndim if dim < 0 else dim for dim in dims)
        for a, dims in zip((x, weight), contracting_dims, strict=True)
    )
    count = len(of_x)
    last = tuple(range(x.ndim - count, x.ndim))
    first = tuple(range(batch_dims, batch_dims + count))
    if not count or of_x != last or of_weight != first:
        raise ValueError(
            f"{name}: contracted must be the last dimensions of x and as many of weight, in order, from dimension "
            f"{batch_dims} on; got contracting_dims={contracting_dims} of {x.shape} and {weight.shape}; transpose them"
        )
    if x.shape[x.ndim - count :] != weight.shape[batch_dims : batch_dims + count]:
        raise ValueError(
            f"{name}: the contracted dimensions must be equal; got x {x.shape}, weight {weight.shape}, "
            f"contracting_dims={contracting_dims}; transpose the weight"
        )
    return count


def resolved_specs(law: Linear, x_ndim: int, w_ndim: int, caller: Specs) -> Specs:
    """The layer's `resolved`: what is not given is where the roles say, K and N where w's tensor parallelism does."""
    resource = current_resource()
    if resource is None:
        return caller
    x_spec, w_spec, out_spec = caller
    leading = law.batch_dims
    w = pad_spec(tuple(map(resource.entry, law.weight_roles)) if w_spec is None else w_spec, w_ndim)
    tokens = pad_spec([resource.entry(role) for role in law.row_roles[: x_ndim - 1]], x_ndim - 1)
    columns = filter_roles(w[leading + 1 :], "tp")
    if x_spec is None:
        x_spec = PartitionSpec(*tokens, *filter_roles(w[leading : leading + 1], "tp"))
    x = pad_spec(x_spec, x_ndim)
    if out_spec is None:
        out_spec = PartitionSpec(*strip_axes(x[:-1], spec_axes(columns)), *columns)
    return x, w, PartitionSpec(*out_spec)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeaturesFirst:
    """What is quantized along the tokens, as Hopper's kernels write and read it, for a loop or a checkpoint to hold.

    Between programs and in a loop's stacks arrays lie in the order of their dimensions; in another one they are copied.

    Attributes:
      quantized: with the features, the last dimension, as the data's first one.
    """

    quantized: QuantizedArray

    @classmethod
    def of(cls, q: QuantizedArray) -> "FeaturesFirst":
        return cls(dataclasses.replace(q, data=jnp.moveaxis(q.data, -1, 0)))

    def read(self) -> QuantizedArray:
        q = self.quantized
        return dataclasses.replace(q, data=jnp.moveaxis(q.data, 0, -1))


def residuals(x: Any, w: Any) -> tuple[Any, Any]:
    """What the backward reads of x, by `read_residual`, and of w; what is quantized, under names for checkpoint
    policies."""

    def under(name: str, q: Any) -> Any:
        if isinstance(q, Moved):
            return dataclasses.replace(q, base=under(name, q.base))
        return named(q, [name]) if is_quantized(q) or isinstance(q, FeaturesFirst) else q

    turned = isinstance(x, QuantizedArray) and x.format.block in (None, (1, 128))
    if turned and _jax.runs_hopper_kernels():
        x = FeaturesFirst.of(x)
    return under("quantized_x", x), under("quantized_weight", w)


def read_residual(x: Any) -> Any:
    """x as it was before `residuals`."""
    return x.read() if isinstance(x, FeaturesFirst) else x


def barrier[Kept, Cotangent](kept: Kept, dy: Cotangent) -> tuple[Kept, Cotangent]:
    """Both, what is kept of the forward not before `dy` is known.

    Else the compiler takes what the forward made of it, as a weight that was gathered, for the backward's, and keeps
    that alive in between.
    """
    out: tuple[Kept, Cotangent] = jax.lax.optimization_barrier((kept, dy))
    return out


def gradient_keys(layer: Layer, key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """A key for dy along N and one for dy along the tokens; None for each where nothing is random."""
    if not layer.formats.is_stochastic:
        return None, None
    if key is None:
        raise ValueError(
            f"{layer.law.name}: a key must be given for a recipe with stochastic rounding; got key=None, "
            f"recipe={layer.recipe}; pass key=jax.random.key(...), another one in each step and layer, or "
            "disable_stochastic_rounding"
        )
    return tuple(jax.random.split(key))
