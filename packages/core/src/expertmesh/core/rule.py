"""Sharding rules: one string of named factors, and the plan that follows from it. Pure; tested without devices.

`"p t d, p n k -> p n d"` names each dimension of each operand and result. Equal names are equal factors. `...` stands
for the same leading or trailing dimensions in every term that has it; `n...` is a second such group, and one that has
an option's name is as long as the option says; `()` is a term of rank 0. A factor is "free" (it may be split;
`f(shard(x)) == shard(f(x))` along it), "whole" (a shard must hold all of it) or "summed" (it may be split; results that
lack it are sums over its shards).

Roles are written in the same form, one for each name: what axes a MeshResource gives to a dimension (see
`MeshResource.axes`). Without them `...` and `t...` are tokens, `p` is participants, `e` is experts, and all else has
none. The role of a group is that of its first dimension. Of a term's dimensions of tokens, in one group or in two, the
second is the sequence. A group that is a whole array has the role `rows`: tokens, sequence, and a last dimension of
features.
"""

import dataclasses
import itertools
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from expertmesh.core.mesh import MeshResource
from expertmesh.core.specs import (
    Entry,
    Spec,
    common_axes,
    dividing_axes,
    entry_axes,
    filter_axes,
    make_entry,
    pad_spec,
    spec_axes,
)

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A parsed sharding string whose groups are expanded to the operands' ranks: one name per dimension."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    groups: tuple[tuple[str, int], ...] = ()

    def expand(self, names: Sequence[str]) -> frozenset[str]:
        """`names`, which may hold groups, as names of dimensions."""
        dims = itertools.chain(*self.operands, *self.results)
        return frozenset(dim for dim in dims if re.sub(r"_\d+$", "...", dim) in names)


@dataclasses.dataclass(frozen=True)
class Query:
    """What is known when an op is to be partitioned.

    Attributes:
      operand_specs: how each operand is sharded, one entry per dimension.
      shapes: global shapes of the operands.
      result_specs: where the results are wanted, one per result; None where nothing is known.
      results_decided: the compiler has fixed `result_specs`; departing from them costs a reshard of a result.
      mesh_shape: mesh axis -> size, of the axes that may be used.
      options: the op's options.
      resource: the MeshResource in context, or None.
      rule, whole, summed, parameter: the op's own, its rule for operands of these ranks.
    """

    operand_specs: tuple[PartitionSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    result_specs: tuple[PartitionSpec, ...] | None
    mesh_shape: Mapping[str, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    results_decided: bool = False
    resource: MeshResource | None = None
    rule: Rule = Rule((), ())
    whole: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    parameter: int | None = None

    def wanted(self, rule: Rule) -> tuple[PartitionSpec, ...]:
        """`result_specs`, unsharded where nothing is known."""
        return self.result_specs or tuple(pad_spec((), len(names)) for names in rule.results)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an op runs on shards.

    Attributes:
      operand_specs: the layout in which each operand is handed to the local function; anything else of an
        operand's sharding is gathered.
      result_specs: the layout of each result.
      summed_axes: per result, the mesh axes over which the local results are partial sums; () for none. An axis that
        the result's spec names is reduce-scattered into that dimension, the others are all-reduced.
      options: what replaces options of the op in the local call, such as axis names or local sizes.
      idle_axes: axes that shard an operand in a way that the op has no use for; each is worth a warning.
    """

    operand_specs: tuple[PartitionSpec, ...]
    result_specs: tuple[PartitionSpec, ...]
    summed_axes: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    idle_axes: tuple[str, ...] = ()


def parse_terms(side: str) -> tuple[Names, ...]:
    """`"p t d, ..."` to one tuple of names per term."""
    return tuple(() if term.strip() == "()" else tuple(term.split()) for term in side.split(","))


def parse_rule(
    sharding: str,
    ndims: Sequence[int | None],
    options: Mapping[str, Any] = types.MappingProxyType({}),
) -> Rule:
    """The rule for operands of these ranks, None of an absent one, and of an op with these options.

    Raises:
      ValueError: the string and the ranks do not fit.
    """
    left, arrow, right = sharding.partition("->")
    terms, results = parse_terms(left), parse_terms(right)
    if not arrow or len(terms) != len(ndims):
        raise ValueError(
            f"sharding rule: it must have one term per operand and '->'; got {sharding!r} for {len(ndims)} operands; "
            "pass every operand of the op"
        )
    groups = _group_sizes(terms, ndims, options)
    rule = Rule(
        tuple(_expand(term, groups) for term in terms),
        tuple(_expand(term, groups) for term in results),
        tuple(groups.items()),
    )
    ranks = zip(map(len, rule.operands), ndims, strict=True)
    if any(ndim is not None and rank != ndim for rank, ndim in ranks):
        raise ValueError(
            f"sharding rule: operand ranks must fit {sharding!r}; got ranks {tuple(ndims)}; "
            "reshape the operand that has another rank"
        )
    return rule


def _group_sizes(
    terms: Sequence[Names], ndims: Sequence[int | None], options: Mapping[str, Any]
) -> dict[str, int]:
    """Number of dimensions of each group, from the options or the terms in which it is the only unknown one."""
    names = {name for term in terms for name in term if name.endswith("...")}
    groups: dict[str, int] = {name: options[name[:-3]] for name in names if name[:-3] in options}
    for _ in terms:
        for term, ndim in zip(terms, ndims, strict=True):
            unknown = names & set(term) - set(groups)
            if len(unknown) == 1 and ndim is not None:
                known = sum(groups.get(name, 0) if name.endswith("...") else 1 for name in term)
                groups[unknown.pop()] = max(ndim - known, 0)
    return groups


def _expand(term: Names, groups: Mapping[str, int]) -> Names:
    expanded: list[str] = []
    for name in term:
        # A group that no operand has is empty.
        indices = range(groups.get(name, 0)) if name.endswith("...") else None
        expanded += [name] if indices is None else [f"{name[:-3]}_{i}" for i in indices]
    return tuple(expanded)


_ROLES = {"...": "tokens", "t...": "tokens", "p": "participants", "e": "experts"}


def role_names(
    roles: str, sharding: str, rule: Rule
) -> tuple[tuple[Names, ...], tuple[Names, ...]]:
    """The role of every dimension of the operands and of the results.

    Args:
      roles: one role for each name of `sharding`, in its form; "" for the default.
      rule: `sharding`, parsed.
    """
    sides = [parse_terms(side) for side in sharding.split("->")]
    role_terms = map(parse_terms, roles.split("->")) if roles else map(_default_roles, sides)
    groups = dict(rule.groups)
    operands, results = (
        tuple(_roles_of_term(*pair, groups) for pair in zip(terms, firsts, strict=True))
        for terms, firsts in zip(sides, role_terms, strict=True)
    )
    return operands, results


def _default_roles(terms: Iterable[Names]) -> tuple[Names, ...]:
    return tuple(tuple(_ROLES.get(name, ".") for name in term) for term in terms)


def _roles_of_term(names: Names, firsts: Names, groups: Mapping[str, int]) -> Names:
    """The role of each dimension, of those of its names; a group has that of its first dimension."""
    counts = (groups.get(name, 0) if name.endswith("...") else 1 for name in names)
    pairs = zip(firsts, counts, strict=True)
    roles = (role for first, count in pairs for role in _group_roles(first, count))
    of_tokens = itertools.chain(("tokens", "sequence"), itertools.repeat("."))
    return tuple(next(of_tokens) if role == "tokens" else role for role in roles)


def _group_roles(first: str, length: int) -> Names:
    if first == "tokens":
        return ("tokens",) * length
    if first == "rows":
        return (*["tokens"] * (length - 1), ".") if length > 1 else ("tokens",) * length
    return (first, *["."] * length)[:length]


def factor_sizes(rule: Rule, shapes: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Every size with which a factor occurs in the operands."""
    sizes: dict[str, list[int]] = {}
    for names, shape in zip(rule.operands, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes.setdefault(name, []).append(size)
    return sizes


class Split:
    """Factors and the mesh axes that split them, each axis at most once, each shard of equal size."""

    def __init__(self, query: Query, sizes: Mapping[str, Sequence[int]]) -> None:
        self._mesh_shape = query.mesh_shape
        self.sizes = sizes
        self.axes: dict[str, tuple[str, ...]] = {}

    def used(self) -> set[str]:
        return {axis for axes in self.axes.values() for axis in axes}

    def add(self, names: Names, spec: Spec, allowed: frozenset[str]) -> None:
        """Splits each allowed factor that nothing splits yet as `spec` says, where the axes are still free."""
        for name, entry in zip(names, spec, strict=True):
            if name in allowed and name in self.sizes and not self.axes.get(name):
                free = [
                    a for a in entry_axes(entry) if a in self._mesh_shape and a not in self.used()
                ]
                self.axes[name] = dividing_axes(free, self.sizes[name], self._mesh_shape)

    def spec(self, names: Names) -> PartitionSpec:
        return PartitionSpec(*(make_entry(self.axes.get(name, ())) for name in names))


def lead_by_parameter(
    query: Query, rule: Rule, split: Split, parameter: int, allowed: frozenset[str]
) -> None:
    """Splits the parameter's dimensions by its tensor-parallel axes, before any other operand is asked.

    Its other axes say where it is at rest; the axes of the resource's role tp say how it is used: by columns (its
    output dimensions) or by rows (its contraction).

    Args:
      parameter: index of its term among the operands and results.
      allowed: factors that may be split.
    """
    if query.resource is None:
        return
    terms = rule.operands + rule.results
    specs = query.operand_specs + query.wanted(rule)
    tensor = filter_axes(specs[parameter], query.resource.axes("tp"))
    split.add(terms[parameter], tensor, allowed)


def plan_by_rule(
    query: Query,
    rule: Rule,
    whole: frozenset[str],
    summed: frozenset[str],
    parameter: int | None = None,
) -> Plan:
    """The plan of an op whose sharding string says everything.

    The first operand leads: it keeps its layout wherever a factor may be split. Then wanted results, then (unless the
    compiler has decided the results) the other operands, each as far as its axes are still free. A summed factor
    follows the first operand that has it. An axis that does not cut a dimension into equal shards is dropped.
    Before all of them comes the tensor parallelism of a `parameter` (see `lead_by_parameter`).
    """
    split = Split(query, factor_sizes(rule, query.shapes))
    every = frozenset(name for names in rule.operands for name in names)
    free = every - whole - summed
    if parameter is not None:
        lead_by_parameter(query, rule, split, parameter, free | summed)
    split.add(rule.operands[0], query.operand_specs[0], free | summed)
    for names, spec in zip(rule.results, query.result_specs or (), strict=False):
        split.add(names, spec, free)
    for i, (names, spec) in enumerate(
        zip(rule.operands[1:], query.operand_specs[1:], strict=True), 1
    ):
        first = frozenset(n for n in names if all(n not in term for term in rule.operands[:i]))
        split.add(names, spec, (summed & first) | (frozenset() if query.results_decided else free))
    operand_specs = tuple(map(split.spec, rule.operands))
    partial = [
        tuple(a for name in sorted(summed - set(names)) for a in split.axes.get(name, ()))
        for names in rule.results
    ]
    return scatter_sums(query, rule, split, operand_specs, partial)


def scatter_sums(
    query: Query,
    rule: Rule,
    split: Split,
    operand_specs: tuple[PartitionSpec, ...],
    partial: Sequence[tuple[str, ...]],
) -> Plan:
    """Completes a plan: partial sums are scattered into the dimensions where the results are wanted so."""
    result_specs = []
    for names, want, axes in zip(rule.results, query.wanted(rule), partial, strict=True):
        entries: list[Entry] = []
        for name, entry in zip(names, want, strict=True):
            kept = split.axes.get(name, ())
            extra = [a for a in common_axes(entry, axes) if a not in spec_axes(entries)]
            # A dimension of unknown size, as of the results only, nothing more may cut.
            axes_of_dim = (
                dividing_axes((*kept, *extra), split.sizes[name], query.mesh_shape)
                if name in split.sizes
                else kept
            )
            entries.append(make_entry(axes_of_dim))
        result_specs.append(PartitionSpec(*entries))
    return Plan(operand_specs, tuple(result_specs), tuple(map(tuple, partial)))
