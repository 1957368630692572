"""Where the arrays of a checkpoint lie in the parameters of a block: the law that loading and exporting share.

    param[at] = array[..., rows, :].mT      (without `.mT` where the array is not transposed)

A checkpoint has [out, in], the tree of `init_params` [in, out].
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["Index", "Layout", "Place", "assemble", "extract", "matrices_of", "ranges_of", "whole"]

Index = tuple[int | slice, ...]
Slices = tuple[slice, ...]
Ranges = tuple[range, ...]


class Place(NamedTuple):
    """Where one array, or some rows of it, lie.

    Attributes:
      name: of the array in the checkpoint.
      param: the parameter, a name of the tree of `init_params`.
      at: one entry for each dimension of the parameter: a number, or `slice(None)` for a dimension of the array.
      rows: of the array's dimension before the last.
      transposed: whether the array's last two dimensions are the parameter's the other way round.
    """

    name: str
    param: str
    at: Index
    rows: slice = slice(None)
    transposed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a checkpoint calls the arrays of one block, and where they lie.

    Attributes:
      block: what all names begin with.
      places: of all arrays but the expert bias; they cover the parameters.
      params: shape of each parameter, in the order of the tree.
      matrices: which two dimensions of each parameter are a matrix's [in, out]; the others count matrices.
      bias: the name of the expert bias [E], or None.
    """

    block: str
    places: tuple[Place, ...]
    params: dict[str, tuple[int, ...]]
    matrices: dict[str, tuple[int, int]]
    bias: str | None

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array, in the order of the places, the expert bias last."""
        shapes = {name: self._shape(places) for name, places in self.by_name.items()}
        if self.bias is None:
            return shapes
        return shapes | {self.bias: self.params["gate_kernel"][-1:]}

    @functools.cached_property
    def by_name(self) -> dict[str, list[Place]]:
        """The places of each array."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.name, []).append(place)
        return found

    def places_of(self, param: str) -> list[Place]:
        """Those in one parameter."""
        return [place for place in self.places if place.param == param]

    def blocks(self, name: str, block: tuple[int, int]) -> tuple[int, ...]:
        """How many elements of each dimension of an array are in a block of a matrix's (out, in)."""
        place = self.by_name[name][0]
        blocks = self.param_blocks(place.param, block)
        own = [b for at, b in zip(place.at, blocks, strict=True) if not isinstance(at, int)]
        return (*own[:-2], own[-1], own[-2]) if place.transposed else tuple(own)

    def param_blocks(self, param: str, block: tuple[int, int]) -> tuple[int, ...]:
        """The same of a parameter's dimensions."""
        blocks = [1] * len(self.params[param])
        columns, rows = self.matrices[param]
        blocks[columns], blocks[rows] = block[1], block[0]
        return tuple(blocks)

    def _shape(self, places: list[Place]) -> tuple[int, ...]:
        first = places[0]
        sizes = zip(first.at, self.params[first.param], strict=True)
        *lead, rows, columns = (size for at, size in sizes if not isinstance(at, int))
        if first.transposed:
            rows, columns = columns, rows
        return (*lead, len(places) * rows, columns)


def matrices_of(places: Iterable[Place]) -> dict[str, tuple[int, int]]:
    """The `matrices` of a layout of transposed places: of each, the last two dimensions that are the array's."""
    return {
        place.param: (own[-2], own[-1])
        for place in places
        for own in [[dim for dim, at in enumerate(place.at) if not isinstance(at, int)]]
    }


def assemble(
    places: Iterable[Place],
    ranges: Ranges,
    read: Callable[[str, Slices], np.ndarray],
) -> np.ndarray:
    """Part of a parameter, from no more of the checkpoint than it is made of; one array after the other.

    Args:
      places: of the parameter; together they cover it.
      ranges: the part: of each dimension, in steps of one.
      read: the part of an array, from its name and one slice for each of its dimensions.

    Raises:
      ValueError: arrays of several dtypes.
    """
    out: np.ndarray | None = None
    for place, target, index in _overlaps(places, ranges):
        part = read(place.name, index)
        if out is None:
            out = np.empty([len(r) for r in ranges], part.dtype)
        if part.dtype != out.dtype:
            raise ValueError(
                f"hf: the arrays of {place.param} must have one dtype; got {place.name} of {part.dtype}, others of "
                f"{out.dtype}; pass dtype"
            )
        out[target] = part.mT if place.transposed else part
    assert out is not None, "the places cover the parameter"
    return out


def extract(places: Iterable[Place], of_param: Callable[[str, Index], np.ndarray]) -> np.ndarray:
    """The array of the checkpoint that lies at these places; `of_param` gives `param[at]`.

    The result is contiguous, and nothing else refers to it.
    """
    parts = [
        part.mT if place.transposed else part
        for place in places
        for part in [of_param(place.param, place.at)]
    ]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
    return np.array(whole, order="C")


def ranges_of(shape: tuple[int, ...], index: Index) -> Ranges:
    """What an index takes of each dimension."""
    return tuple(
        range(i, i + 1) if isinstance(i, int) else range(size)[i]
        for size, i in zip(shape, index, strict=True)
    )


def whole(shape: tuple[int, ...]) -> Ranges:
    """All of a parameter."""
    return tuple(map(range, shape))


def _overlaps(places: Iterable[Place], ranges: Ranges) -> Iterator[tuple[Place, Index, Slices]]:
    """Each place that has a share in a part: its index in the part, and the array's index."""
    for place in places:
        numbers = [(a, r) for a, r in zip(place.at, ranges, strict=True) if isinstance(a, int)]
        if any(a not in r for a, r in numbers):
            continue
        pairs = list(zip(place.at, ranges, strict=True))
        target = tuple(a - r.start if isinstance(a, int) else a for a, r in pairs)
        yield place, target, _of_array(place, [r for a, r in pairs if not isinstance(a, int)])


def _of_array(place: Place, ranges: list[range]) -> Slices:
    """The index of an array, from the ranges of the parameter's dimensions that are its own."""
    if place.transposed:
        ranges[-2:] = ranges[-1], ranges[-2]
    index = [slice(r.start, r.stop) for r in ranges]
    first, step = place.rows.start or 0, place.rows.step or 1
    rows = ranges[-2]
    index[-2] = slice(first + step * rows.start, first + step * (rows.stop - 1) + 1, step)
    return tuple(index)
