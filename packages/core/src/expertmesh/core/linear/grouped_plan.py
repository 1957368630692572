"""How the ops of `grouped_gemm.py`, and those with something behind their GEMM, are partitioned.

Dimension key as in `grouped_gemm.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from expertmesh.core.op import Plan, Query
from expertmesh.core.quantization.quantize import are_scales_of_groups
from expertmesh.core.rule import (
    Rule,
    Split,
    factor_sizes,
    lead_by_parameter,
    scatter_sums,
)
from expertmesh.core.specs import axis_size, dividing_axes, entry_axes, spec_axes

__all__ = ["expert_axes", "plan_grouped"]


def expert_axes(
    participant_axes: tuple[str, ...],
    num_participants: int,
    num_sets: int,
    mesh_shape: Mapping[str, int],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which axes may shard the participants, and which of them then shard the experts.

    Participants are sharded over `participant_axes` (major first) and share weights modulo `num_sets`. The experts
    follow the innermost of these axes, as many as make one shard of experts belong to one shard of participants.
    """
    axes = dividing_axes(participant_axes, [num_participants], mesh_shape)
    for end in range(len(axes), -1, -1):
        kept = axes[:end]
        local = num_participants // axis_size(mesh_shape, kept)
        if local and local % num_sets == 0:
            return kept, ()
        for start in range(end - 1, -1, -1):
            if axis_size(mesh_shape, kept[start:]) * local == num_sets:
                return kept, kept[start:]
    return (), ()


def plan_grouped(query: Query, *, features: Sequence[str] = ("k", "n...")) -> Plan:
    """The plan of a grouped op: participants and experts by `expert_axes`, `features` by the rule of the GEMMs."""
    rule, sizes = query.rule, factor_sizes(query.rule, query.shapes)
    num_experts = query.options.get("num_experts") or sizes["e"][0]
    p_axes, e_axes = expert_axes(
        _participant_axes(query),
        query.shapes[0][0],
        num_experts // max(sizes["g"][0], 1),
        query.mesh_shape,
    )
    split = Split(query, sizes | {"e": [num_experts]})
    split.axes |= {"p": p_axes, "e": e_axes}
    _split_features(query, split, query.rule.expand(features))
    of_sets = tuple(axis for axis in p_axes if axis not in e_axes)
    partial = [_summed_axes(query, split, names, of_sets) for names in rule.results]
    specs = tuple(map(split.spec, rule.operands))
    local: dict[str, Any] = {}
    if "num_experts" in query.options:
        local["num_experts"] = num_experts // axis_size(query.mesh_shape, e_axes)
    if "r" in sizes:
        (local["summed_axes"],) = partial
    return dataclasses.replace(
        scatter_sums(query, rule, split, specs, partial),
        options=local,
        idle_axes=_idle_axes(query, rule, specs, p_axes),
    )


def _participant_axes(query: Query) -> tuple[str, ...]:
    """Those of the first operand whose participants are sharded: of rows `Moved` here the tokens may not be."""
    terms = zip(query.rule.operands, query.operand_specs, strict=True)
    axes = (entry_axes(spec[0]) for names, spec in terms if names[:1] == ("p",))
    return next(filter(None, axes), ())


def _summed_axes(
    query: Query, split: Split, names: tuple[str, ...], of_sets: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes over which a result's parts are added; `of_sets`: those of participants with the same weights."""
    if are_scales_of_groups(names):
        return ()
    if "p" not in names:
        return of_sets
    summed = sorted(query.summed - set(names))
    return tuple(axis for name in summed for axis in split.axes.get(name, ()))


def _split_features(query: Query, split: Split, free: frozenset[str]) -> None:
    """Splits `free`: the parameter and the first operand lead, then wanted results, then the other operands."""
    rule = query.rule
    if query.parameter is not None:
        lead_by_parameter(query, rule, split, query.parameter, free)
    split.add(rule.operands[0], query.operand_specs[0], free)
    for names, spec in zip(rule.results, query.result_specs or (), strict=False):
        split.add(names, spec, free)
    for names, spec in zip(rule.operands[1:], query.operand_specs[1:], strict=True):
        contracted = frozenset(n for n in names if n not in rule.results[0])
        split.add(names, spec, frozenset() if query.results_decided else free - contracted)


def _idle_axes(
    query: Query, rule: Rule, specs: Sequence[PartitionSpec], p_axes: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes that shard an operand but not the work, and have no role in which they may."""
    known = set(p_axes)
    if query.resource is not None:
        known |= set(query.resource.all_axes())
    idle = [
        axis
        for names, present, spec in zip(rule.operands, query.operand_specs, specs, strict=True)
        for axis in spec_axes(present)
        if query.mesh_shape.get(axis, 1) > 1
        and axis not in known | set(spec_axes(spec))
        and names != ("p", "g")
    ]
    return tuple(dict.fromkeys(idle))
