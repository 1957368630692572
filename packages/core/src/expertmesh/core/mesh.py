"""Which mesh axes play which role: MeshResource, and the resource in context."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.specs import (
    Entry,
    Spec,
    axes_of_type,
    constrain,
    entry_axes,
    filter_axes,
    make_entry,
    spec_axes,
)

# A user context is part of jit's key: a function traced under one resource is traced again under another.
_context = jax.make_user_context(default_value=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshResource:
    """Names the mesh axes of each role; each field is an axis name, a tuple of names (major first) or None.

    Attributes:
      dp_resource: data parallelism; weights replicated.
      fsdp_resource: data parallelism; weights sharded and gathered for use.
      tp_resource: tensor parallelism.
      tpsp_resource: tensor parallelism whose axis also shards the sequence between layers.
      ep_resource: expert parallelism; also shards the tokens, innermost.
      pp_resource: pipeline stages; never used by an op.
      cp_resource: context (sequence) parallelism.

    Field names and meaning are Transformer Engine's.

    Raises:
      ValueError: an axis appears twice.
      TypeError: a field is neither None, a string nor a tuple of strings.
    """

    dp_resource: Entry = None
    fsdp_resource: Entry = None
    tp_resource: Entry = None
    tpsp_resource: Entry = None
    ep_resource: Entry = None
    pp_resource: Entry = None
    cp_resource: Entry = None

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for field in dataclasses.fields(MeshResource):
            value = getattr(self, field.name)
            if not (value is None or isinstance(value, str | tuple)) or not all(
                isinstance(axis, str) for axis in entry_axes(value)
            ):
                raise TypeError(
                    f"MeshResource: a role must be an axis name, a tuple of names or None; "
                    f"got {field.name}={value!r}; write for example {field.name}='{field.name[:2]}'"
                )
            for axis in entry_axes(value):
                if axis in owner:
                    raise ValueError(
                        f"MeshResource: an axis must be named once; got axis {axis!r} in {owner[axis]} "
                        f"and {field.name}; give each role its own axis"
                    )
                owner[axis] = field.name

    @classmethod
    def of(cls, resource: object) -> "MeshResource":
        """Accepts a MeshResource or any object with (some of) its attributes, such as Transformer Engine's."""
        if isinstance(resource, cls):
            return resource
        names = [field.name for field in dataclasses.fields(cls)]
        if not any(hasattr(resource, name) for name in names):
            raise TypeError(
                f"MeshResource: a resource must have at least one of {', '.join(names)}; "
                f"got {resource!r}; pass expertmesh.core.MeshResource(...)"
            )
        return cls(**{name: getattr(resource, name, None) for name in names})

    def axes(self, role: str) -> tuple[str, ...]:
        """Mesh axes of a role of an array dimension: tokens, participants, experts, fsdp, tp, sequence, '.' for none.

        Tokens are sharded over (dp, fsdp, ep), so that the EP axis is innermost; so are the participants of an exchange
        (P of [P, C, ...]), unless `with_participants` says otherwise.
        """
        ep = entry_axes(self.ep_resource)
        fsdp = entry_axes(self.fsdp_resource)
        roles = {
            ".": (),
            "tokens": entry_axes(self.dp_resource) + fsdp + ep,
            "participants": entry_axes(self.dp_resource) + fsdp + ep,
            "experts": ep,
            "fsdp": fsdp,
            "tp": entry_axes(self.tp_resource) + entry_axes(self.tpsp_resource),
            "sequence": entry_axes(self.cp_resource),
        }
        if role not in roles:
            raise ValueError(
                f"MeshResource.axes: role must be one of {', '.join(roles)}; got role={role!r}; choose one of these"
            )
        return roles[role]

    def entry(self, role: str) -> Entry:
        """`axes(role)` as an entry of a PartitionSpec."""
        return make_entry(self.axes(role))

    def with_participants(self, axes: tuple[str, ...]) -> "MeshResource":
        """This resource with participants over `axes`, major first, for an exchange whose sequences are split."""
        roles = {f.name: getattr(self, f.name) for f in dataclasses.fields(MeshResource)}
        return _WithParticipants(**roles, participants=axes)

    def all_axes(self) -> tuple[str, ...]:
        """Every axis that plays a role."""
        return tuple(
            axis
            for field in dataclasses.fields(MeshResource)
            for axis in entry_axes(getattr(self, field.name))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithParticipants(MeshResource):
    participants: tuple[str, ...]

    def axes(self, role: str) -> tuple[str, ...]:
        return self.participants if role == "participants" else super().axes(role)


@contextlib.contextmanager
def global_shard_guard(resource: Any) -> Iterator[MeshResource | None]:
    """Puts `resource` (ours, Transformer Engine's, or None) in context; restores the previous one on exit."""
    resource = None if resource is None else MeshResource.of(resource)
    with _context(resource):
        yield resource


def current_resource() -> MeshResource | None:
    """The MeshResource of the innermost `global_shard_guard`, or None."""
    resource: MeshResource | None = _context.value
    return resource


def filter_roles(spec: Spec, *roles: str) -> PartitionSpec:
    """The spec with only the axes that play one of `roles` in the resource in context."""
    resource = current_resource()
    axes = () if resource is None else [axis for role in roles for axis in resource.axes(role)]
    return filter_axes(spec, axes)


def cast_sharded(
    x: jax.Array, dtype: DTypeLike, spec: Spec | None, roles: tuple[str, ...]
) -> jax.Array:
    """`x.astype(dtype)`, laid out as `x` is at rest: the copy is gathered for use, not the original.

    Left alone, the compiler gives the copy the layout that its consumer wants, and gathers the original for that.

    Args:
      x: a parameter.
      dtype: the narrower dtype in which it is used.
      spec: where `x` is over Auto axes; None: what the resource in context says of `roles`.
      roles: of the first dimensions.
    """
    narrow, resource = x.astype(dtype), current_resource()
    if narrow.dtype == x.dtype or resource is None:
        return narrow
    auto = axes_of_type(jax.typeof(x).sharding.mesh, AxisType.Auto)
    spec = tuple(map(resource.entry, roles)) if spec is None else spec
    at_rest = filter_axes(spec, auto)
    return constrain(narrow, at_rest) if spec_axes(at_rest) else narrow
