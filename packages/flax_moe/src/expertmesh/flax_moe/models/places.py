"""Where the arrays of a checkpoint lie in the parameters of a block: the law that loading and exporting share.

    param[at] = array.mT[..., columns]      (without `.mT` where the array is not transposed)

A checkpoint has [out, in] where it is transposed; the tree of `init_params` has [in, out].
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from expertmesh.flax_moe.params import EXPERTS, SHARED

__all__ = ["Index", "Layout", "Place", "assemble", "extract", "matrices_of", "ranges_of", "whole"]

Index = tuple[int | slice, ...]
Slices = tuple[slice, ...]
Ranges = tuple[range, ...]


class Place(NamedTuple):
    """Where one array, or a part of it, lies.

    Attributes:
      name: of the array in the checkpoint.
      param: the parameter, a name of the tree of `init_params`.
      at: one entry for each dimension of the parameter: a number, or `slice(None)` for a dimension of the array.
      columns: the part of the array, of the dimension that is the parameter's last.
      transposed: whether the array's last two dimensions are the parameter's the other way round.
      ones: how many dimensions of size one the array has before these.
    """

    name: str
    param: str
    at: Index
    columns: slice = slice(None)
    transposed: bool = True
    ones: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a checkpoint calls the arrays of one block, and where they lie.

    Attributes:
      block: what all names begin with.
      places: of all arrays but the expert bias; they cover the parameters.
      params: shape of each parameter, in the order of the tree.
      matrices: of each parameter that is made of matrices, which two of its dimensions are one's [in, out].
      bias: the place of the expert bias [E], or None.
      outside: names of the block's arrays that are no parameters: of a router outside.
    """

    block: str
    places: tuple[Place, ...]
    params: dict[str, tuple[int, ...]]
    matrices: dict[str, tuple[int, int]]
    bias: Place | None
    outside: tuple[str, ...] = ()

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array, in the order of the places, the expert bias last."""
        shapes = {name: self._shape(places) for name, places in self.by_name.items()}
        if self.bias is None:
            return shapes
        num_experts = self.params["gate_kernel"][-1:]
        return shapes | {self.bias.name: (1,) * self.bias.ones + num_experts}

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
        return tuple(_swapped(own) if place.transposed else own)

    def param_blocks(self, param: str, block: tuple[int, int]) -> tuple[int, ...]:
        """The same of a parameter's dimensions."""
        blocks = [1] * len(self.params[param])
        columns, rows = self.matrices[param]
        blocks[columns], blocks[rows] = block[1], block[0]
        return tuple(blocks)

    @functools.cached_property
    def modules(self) -> dict[str, bool]:
        """The parts of the block, and whether they hold matrices of experts, shared ones too."""
        start = len(self.block)
        return {
            self.block + place.name[start:].split(".")[0]: place.param in EXPERTS + SHARED
            for place in self.places
        }

    def _shape(self, places: list[Place]) -> tuple[int, ...]:
        first = places[0]
        sizes = zip(first.at, self.params[first.param], strict=True)
        *leading, last = (size for at, size in sizes if not isinstance(at, int))
        own = [*leading, len(places) * last]
        return (1,) * first.ones + tuple(_swapped(own) if first.transposed else own)


def matrices_of(places: Iterable[Place]) -> dict[str, tuple[int, int]]:
    """The `matrices` of a layout: of each place with two dimensions and more, the last two that are the array's.

    Biases are no matrices, whatever their number of dimensions.
    """
    return {
        place.param: (own[-2], own[-1])
        for place in places
        for own in [[dim for dim, at in enumerate(place.at) if not isinstance(at, int)]]
        if len(own) > 1 and not place.param.endswith("_bias")
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
        part = part.reshape(part.shape[place.ones :])
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
    first, *others = places
    part = of_param(first.param, first.at)
    own = [*part.shape[:-1], (1 + len(others)) * part.shape[-1]]
    out = np.empty(_swapped(own) if first.transposed else own, part.dtype)
    for place in (first, *others):
        if place is not first:
            part = of_param(place.param, place.at)
        (out.mT if place.transposed else out)[..., place.columns] = part
        del part  # before the next is made
    return out.reshape((1,) * first.ones + out.shape)


def _swapped[T](dims: list[T]) -> list[T]:
    """The last two the other way round."""
    return [*dims[:-2], dims[-1], dims[-2]]


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
    index = [slice(r.start, r.stop) for r in ranges]
    first, step = place.columns.start or 0, place.columns.step or 1
    last = ranges[-1]
    index[-1] = slice(first + step * last.start, first + step * (last.stop - 1) + 1, step)
    return (slice(None),) * place.ones + tuple(_swapped(index) if place.transposed else index)
