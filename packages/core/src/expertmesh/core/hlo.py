"""Reads the collectives out of compiled HLO text."""

import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["KINDS", "Collective", "axes_of", "collectives", "count", "num_bytes", "shapes"]

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# A type holds none of % = " once its comments are gone, so the match can't begin inside metadata.
_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT\s+)?%?[\w.\-]+ = (?P<type>[^%="]*?) '
    rf"(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)",
    re.MULTILINE,
)
_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE = re.compile(r"\b[a-z]\w*\[[\d,]*\]")
_LITERAL = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:\[(?P<shape>[\d,]+)\]<=)?\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<over>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_OVER = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: one of KINDS; "all-gather" for all-gather-start too, and the -done is not listed.
      shapes: what it returns, such as ("bf16[64,256]",); layouts are left out.
      groups: device numbers of each group, or (source, target) of each pair of a permute; () where
        the text names none, which means all devices.
      op_name: the JAX primitives it comes from, or "".
    """

    kind: str
    shapes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    op_name: str

    @property
    def group_size(self) -> int:
        """Devices per group; 0 where the text names no groups."""
        return len(self.groups[0]) if self.groups else 0


def collectives(hlo_text: str) -> list[Collective]:
    """The collectives of every computation, in the text's order; an async pair counts once."""
    found = []
    for match in _INSTRUCTION.finditer(_COMMENT.sub("", hlo_text)):
        kind, rest = match["kind"], match["rest"]
        types = _results(match["type"], kind) if match["start"] else match["type"]
        name = re.search(r'op_name="([^"]*)"', rest)
        groups = _groups(rest.split(", metadata=")[0])
        found.append(Collective(kind, shapes(types), groups, name[1] if name else ""))
    return found


def count(hlo_text: str) -> dict[str, int]:
    """How many collectives there are of each kind that occurs."""
    kinds = sorted(collective.kind for collective in collectives(hlo_text))
    return {kind: len(list(same)) for kind, same in itertools.groupby(kinds)}


def shapes(text: str) -> tuple[str, ...]:
    """Those in HLO text, such as bf16[8,16], in its order; a tuple's are those it holds."""
    return tuple(_SHAPE.findall(text))


def num_bytes(shape: str) -> int:
    """Of a shape such as f8e4m3fn[2,3]; elements of 4 bits count half a byte."""
    dtype, _, sizes = shape.rstrip("]").partition("[")
    bits = re.search(r"\d+", dtype)
    return math.prod(_integers(sizes) if sizes else ()) * (int(bits[0]) if bits else 8) // 8


def axes_of(
    groups: tuple[tuple[int, ...], ...], mesh_shape: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The axes over which groups communicate, in a mesh of devices 0, 1, ... in order; None where no axes do.

    Args:
      groups: of a Collective.
      mesh_shape: axis -> size, in the order of the mesh. Axes of size 1 are never named.
    """
    found = {frozenset(group) for group in groups}
    axes = [axis for axis, size in mesh_shape.items() if size > 1]
    sizes = [mesh_shape[axis] for axis in axes]
    for length in range(1, len(axes) + 1):
        for over in itertools.combinations(range(len(axes)), length):
            order = [d for d in range(len(axes)) if d not in over] + list(over)
            members = math.prod(sizes[d] for d in over)
            if found == set(map(frozenset, _chunks(_transpose(sizes, order), members))):
                return tuple(axes[d] for d in over)
    return None


def _results(type_text: str, kind: str) -> str:
    """The results' part of an async start's type: (operands, results, context...)."""
    parts = _split(type_text)
    flat = not any(part.startswith("(") for part in parts)
    if kind == "all-reduce" and flat:
        return type_text  # older XLA: an all-reduce-start has the type of its results
    return parts[1] if len(parts) > 1 else type_text


def _split(type_text: str) -> list[str]:
    """The elements of a tuple type, of the outermost level only."""
    if not type_text.startswith("("):
        return [type_text]
    depth, parts = 0, [""]
    for character in type_text.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    if mesh := _MESH.search(attributes):
        return _mesh_groups(mesh)
    if literal := _LITERAL.search(attributes):
        groups = re.findall(r"\{([\d,]+)\}", literal[1])
        return tuple(tuple(_integers(group)) for group in groups)
    if iota := re.search(f"replica_groups={_IOTA.pattern}", attributes):
        return _chunks(_iota(iota), _integers(iota["shape"])[-1])
    return ()


def _mesh_groups(mesh: re.Match[str]) -> tuple[tuple[int, ...], ...]:
    """Groups over some axes of a mesh: the devices that differ in those axes only."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh["axes"])}
    over = {name: (major, size) for name, major, size in _OVER.findall(mesh["over"])}
    if len(over) != len(_OVER.findall(mesh["over"])):
        raise ValueError(f"_mesh_groups: can't read two parts of one axis; got {mesh[0]!r}")
    # Each axis becomes three dimensions; part 'x':(m)s of an axis has size s below a major of m.
    dims: list[int] = []
    inner = {}
    for name, whole in sizes.items():
        major, size = over.get(name, ("", ""))
        before, part = (int(major), int(size)) if size else (1, whole)
        inner[name] = len(dims) + 1
        dims += [before, part, whole // (before * part)]
    last = [inner[name] for name in over]
    order = _transpose(dims, [d for d in range(len(dims)) if d not in last] + last)
    devices = list(range(len(order)))
    if ids := mesh["ids"]:
        iota = _IOTA.fullmatch(ids)
        devices = _iota(iota) if iota else _integers(ids)
    return _chunks([devices[i] for i in order], math.prod(dims[d] for d in last))


def _iota(match: re.Match[str]) -> list[int]:
    """The devices of `[shape]<=[dims]T(permutation)`, flat."""
    dims = _integers(match["dims"])
    return _transpose(dims, _integers(match["order"]) if match["order"] else list(range(len(dims))))


def _transpose(dims: list[int], permutation: list[int]) -> list[int]:
    """iota of shape `dims`, transposed, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    index = itertools.product(*(range(dims[d]) for d in permutation))
    return [sum(i * strides[d] for i, d in zip(at, permutation, strict=True)) for at in index]


def _chunks(values: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(values[i : i + size]) for i in range(0, len(values), size))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
