"""Custom VJPs whose cotangents always have the dtype and the sharding of their primals."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import _jax
from expertmesh.core.mesh import MeshResource, current_resource, global_shard_guard
from expertmesh.core.specs import axes_of_type, merge_known


@jax.tree_util.register_static
class _Types(tuple[Any, ...]):
    """Types of the primals: a static leaf of the residuals."""


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static half of a call: JAX traces the rules when it pleases, and not always where the call is.

    Attributes:
      options: name and value of each.
      resource: in context at the call.
    """

    options: tuple[tuple[str, object], ...]
    resource: MeshResource | None

    @contextlib.contextmanager
    def context(self) -> Iterator[dict[str, Any]]:
        """The options, under the resource."""
        with global_shard_guard(self.resource):
            yield dict(self.options)


def differentiable[Out](
    fwd: Callable[..., tuple[Out, Any]],
    bwd: Callable[..., tuple[Any, ...]],
    value: Callable[..., Out] | None = None,
) -> Callable[..., Out]:
    """Makes one function of a forward and a backward rule. Call it at module level.

    Args:
      fwd: `fwd(*operands, **options) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent, **options) -> one cotangent per operand`. None stands for no cotangent: of
        integers, of an absent operand, or of a part of a pytree.
      value: `value(*operands, **options) -> out`, where no derivative is asked for; None: `fwd` without its residuals.

    Returns:
      `f(*operands, **options) -> out`. Operands are arrays, pytrees of arrays or None; options are hashable and
      keyword-only. A repeated call with equal types and options is not traced again. Cotangents are cast to the dtype
      of their primal and, over Explicit mesh axes, resharded to its spec. Both rules run under the MeshResource that is
      in context at the call. A second derivative is a NotImplementedError that names the op.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(static: _Static, *operands: Any) -> Out:
        with static.context() as options:
            if value is not None:
                return value(*operands, **options)
            return fwd(*operands, **options)[0]

    def call_fwd(static: _Static, *operands: Any) -> tuple[Out, tuple[Any, _Types]]:
        with static.context() as options:
            out, residuals = fwd(*operands, **options)
        return out, (residuals, _Types(map(_jax.operand_types, operands)))

    def call_bwd(static: _Static, carried: tuple[Any, _Types], cotangent: Out) -> tuple[Any, ...]:
        residuals, types = carried
        with static.context() as options:
            cotangents = bwd(residuals, cotangent, **options)
        return tuple(_like_primal(*pair) for pair in zip(cotangents, types, strict=True))

    call.defvjp(call_fwd, call_bwd)
    jitted = jax.jit(call, static_argnums=0)

    def public(*operands: Any, **options: Any) -> Out:
        static = _Static(tuple(sorted(options.items())), current_resource())
        # Outside the custom VJP, so that the cast's transpose sums the cotangent of a replicated operand.
        out: Out = jitted(static, *_jax.match_varying(operands))
        return out

    return public


def _like_primal(cotangent: Any, types: Any) -> Any:
    return jax.tree.map(_cast, cotangent, types, is_leaf=lambda part: part is None)


def _cast(cotangent: jax.Array | None, primal: Any) -> jax.Array | None:
    if cotangent is None:
        return None
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return cotangent
    cotangent = cotangent.astype(primal.dtype)
    # A primal that was on no mesh, beside operands that are on one, counts as whole on each of its devices.
    mesh = (
        jax.typeof(cotangent).sharding.mesh if primal.sharding.mesh.empty else primal.sharding.mesh
    )
    if AxisType.Explicit in mesh.axis_types and jax.typeof(cotangent).sharding != primal.sharding:
        cotangent = jax.sharding.reshard(cotangent, NamedSharding(mesh, primal.sharding.spec))
    axes = frozenset(primal.manual_axis_type.varying)
    cotangent = _jax.match_varying(cotangent, axes)
    return cotangent


def at_rest(x: jax.Array, spec: PartitionSpec | None) -> PartitionSpec | None:
    """Where a gradient is wanted: where its primal is, by its type over Explicit axes, by `spec` over Auto ones."""
    typed, mesh = _jax.explicit_spec(x), jax.typeof(x).sharding.mesh
    if typed is None or spec is None:
        return typed if spec is None else spec
    return merge_known(typed, spec, axes_of_type(mesh, AxisType.Auto), x.ndim)


def not_differentiable(x: jax.Array, remedy: str) -> jax.Array:
    """`x`; NotImplementedError that says `remedy` where a derivative of it is asked for."""
    out: jax.Array = _opaque(remedy, x)
    return out


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _opaque(remedy: str, x: jax.Array) -> jax.Array:
    del remedy
    return x


@_opaque.defjvp
def _opaque_jvp(remedy: str, primals: object, tangents: object) -> NoReturn:
    del primals, tangents
    name, _, remedy = remedy.partition(": ")
    raise NotImplementedError(
        f"{name}: it has no derivative; got a differentiated operand; {remedy}, or stop_gradient"
    )
