"""A layer as the tensors of a checkpoint, under either names, in 16 bits and more or in blocks of 8 bits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.flax_moe import hf
from expertmesh.flax_moe.checkpoint.files import Tensors
from expertmesh.flax_moe.checkpoint.stored import StoredLayer
from expertmesh.flax_moe.models import fp8_blocks
from expertmesh.flax_moe.models.fp8_blocks import Block
from expertmesh.flax_moe.models.places import Index, Layout, Place, extract, ranges_of
from expertmesh.flax_moe.params import EXPERTS, SHARED

__all__ = ["StoredMatrices", "bias_tensor", "export_tensors", "layer_tensors"]

Blocks = tuple[np.ndarray, np.ndarray]
_FP8 = np.dtype(jnp.float8_e4m3fn)
_FLOAT32 = np.dtype(np.float32)


class _Matrices(Protocol):
    """What the tensors of a layer are made of. `at` is a place's, of a matrix [in, out] or of several."""

    def dtype_of(self, param: str) -> np.dtype:
        """Of `values`."""

    def values(self, param: str, at: Index) -> np.ndarray:
        """`param[at]`."""

    def blocks(self, param: str, at: Index, block: Block) -> Blocks:
        """(8 bits, scales) of one matrix: as it is held, or its values quantized."""


@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """Of a layer in a checkpoint."""

    stored: StoredLayer

    def dtype_of(self, param: str) -> np.dtype:
        """Of `values`."""
        return self.stored.dtype_of(param)

    def values(self, param: str, at: Index) -> np.ndarray:
        """`param[at]`, read and dequantized."""
        shape = self.stored.layout.params[param]
        return self.stored.values(param, ranges_of(shape, at))[_only(at)]

    def blocks(self, param: str, at: Index, block: Block) -> Blocks:
        """(8 bits, scales) of one matrix."""
        if not self.stored.is_fp8(param):
            return _quantized(self.values(param, at), block)
        layout = self.stored.layout
        shape = layout.params[param]
        scales = fp8_blocks.scale_shape(shape, layout.param_blocks(param, block))
        data = self.stored.data(param, ranges_of(shape, at))
        return data[_only(at)], self.stored.scale(param, ranges_of(scales, at))[_only(at)]


@dataclasses.dataclass(frozen=True)
class _HeldMatrices:
    """Of a tree of parameters, QuantizedArrays among them."""

    params: Mapping[str, Any]
    dtype: DTypeLike | None

    def dtype_of(self, param: str) -> np.dtype:
        return np.dtype(self.params[param].dtype if self.dtype is None else self.dtype)

    def values(self, param: str, at: Index) -> np.ndarray:
        held = self.params[param]
        if not isinstance(held, QuantizedArray):
            return _on_host(held, at).astype(self.dtype_of(param))
        data, scale = self._parts(held, at)
        block = [b for b, i in zip(held.block, at, strict=True) if not isinstance(i, int)]
        whole = (slice(None),) * data.ndim
        return fp8_blocks.widened(data, scale, block, whole).astype(self.dtype_of(param))

    def blocks(self, param: str, at: Index, block: Block) -> Blocks:
        held = self.params[param]
        if isinstance(held, QuantizedArray) and held.format.block == block:
            return self._parts(held, at)
        return _quantized(self.values(param, at), block)

    def _parts(self, held: QuantizedArray, at: Index) -> Blocks:
        return _on_host(held.data, at), _on_host(held.scale, at).astype(np.float32)


def _on_host(array: Any, at: Index) -> np.ndarray:
    """`array[at]`, of what its shards have of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[at])
    kept = [size for size, i in zip(array.shape, at, strict=True) if not isinstance(i, int)]
    out = np.empty(kept, array.dtype)
    shards = {ranges_of(array.shape, shard.index): shard for shard in array.addressable_shards}
    for ranges, shard in shards.items():
        pairs = list(zip(at, ranges, strict=True))
        if all(i in r for i, r in pairs if isinstance(i, int)):
            here = tuple(i - r.start if isinstance(i, int) else i for i, r in pairs)
            there = tuple(slice(r.start, r.stop) for i, r in pairs if not isinstance(i, int))
            out[there] = np.asarray(shard.data[here])
    return out


def _only(at: Index) -> tuple[int | slice, ...]:
    """Of an array of just the parts of an index: without the dimensions that it numbers."""
    return tuple(0 if isinstance(i, int) else slice(None) for i in at)


def _quantized(matrix: np.ndarray, block: Block) -> Blocks:
    """Of [in, out]; a checkpoint's blocks are of [out, in]."""
    data, scale = fp8_blocks.to_blocks(matrix.T, block)
    return data.T, scale.T


def export_tensors(
    params: Mapping[str, Any],
    hf_config: Mapping[str, Any],
    layer: int,
    *,
    expert_bias: Any = None,
    dtype: DTypeLike | None = None,
    fp8: bool = False,
    prefix: str = "model.",
) -> list[Tensors]:
    """The block of one decoder layer under Hugging Face's names, for `write_checkpoint`.

    Args:
      params: as of `load_sharded`; of each the process holds all shards. Matrices are copied from the devices one by
        one, when they are written.
      hf_config: the dict of `config.json`.
      layer: the decoder layer's number.
      expert_bias: float[E]; given if and only if the model has one.
      dtype: of the arrays that are not in 8 bits; None: each parameter's own.
      fp8: experts and shared experts in 8 bits, by blocks of the config's `weight_block_size` (else 128 x 128); bit for
        bit the QuantizedArrays of `load_sharded` where there are some.
      prefix: what stands before `layers.{layer}.`.

    Raises:
      ValueError: a parameter that is missing, unknown, or of another shape than the config says, biases, and an expert
        bias that is missing or too many.
    """
    layout = hf.layer_layout(hf_config, layer, prefix=prefix)
    types = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
    hf.check_export("export_tensors", types, hf_config, expert_bias)
    block = fp8_blocks.block_size_or_default(hf_config)
    made = layer_tensors(_HeldMatrices(params, dtype), layout, layout, block if fp8 else None)
    return [*made, *bias_tensor(layout, expert_bias)]


def layer_tensors(
    source: _Matrices, target: Layout, matrices: Layout, block: Block | None
) -> list[Tensors]:
    """Those of a layer under the names of `target`, but for the expert bias.

    Args:
      source: what they are made of.
      target: the names.
      matrices: a layout whose places are matrices: Hugging Face's of a checkpoint.
      block: (out, in) of 8-bit blocks; None: in 16 bits and more.
    """
    made = []
    for name, places in target.by_name.items():
        if block is None or places[0].param not in EXPERTS + SHARED:
            made.append(_plain(source, name, target, places))
        else:
            made.append(_in_blocks(source, name, target, matrices, block))
    return made


def bias_tensor(layout: Layout, bias: Any) -> list[Tensors]:
    """The expert bias under the name of a layout; none where there is none."""
    made = hf.bias_array(layout, bias)
    types = {name: (array.shape, array.dtype) for name, array in made.items()}
    return [Tensors(types=types, make=lambda: made)] if made else []


def _plain(source: _Matrices, name: str, target: Layout, places: list[Place]) -> Tensors:
    shape, first = target.shapes[name], places[0]

    def make() -> dict[str, np.ndarray]:
        if len(places) > 1 or first.transposed:
            return {name: extract(places, source.values)}
        return {name: source.values(first.param, first.at).reshape(shape)}  # without a copy

    return Tensors(types={name: (shape, source.dtype_of(first.param))}, make=make)


def _unsplit(name: str, layout: Layout, *, matrix: bool = False) -> list[Place]:
    """The places of an array that has blocks of its own: of a whole parameter, or a matrix."""
    places = layout.by_name[name]
    shape = layout.shapes[name]
    if len(places) > 1 or (matrix and len(shape) > 2):
        raise ValueError(
            f"checkpoint: with fp8 the files of a model must have an array for each matrix; got {name} {shape}; "
            "leave fp8 out"
        )
    return places


def _in_blocks(
    source: _Matrices, name: str, target: Layout, matrices: Layout, block: Block
) -> Tensors:
    (place,) = _unsplit(name, target)
    _unsplit(matrices.places_of(place.param)[0].name, matrices, matrix=True)
    shape, beside = target.shapes[name], fp8_blocks.scale_name(name)
    scales = fp8_blocks.scale_shape(shape, target.blocks(name, block))

    def make() -> dict[str, np.ndarray]:
        if place.transposed:
            data, scale = source.blocks(place.param, place.at, block)
            return {name: data.T, beside: scale.T}
        data, scale = np.empty(shape, _FP8), np.empty(scales, _FLOAT32)
        for each in matrices.places_of(place.param):
            data[each.at], scale[each.at] = source.blocks(place.param, each.at, block)
        return {name: data, beside: scale}

    return Tensors(types={name: (shape, _FP8), beside: (scales, _FLOAT32)}, make=make)
