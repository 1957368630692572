"""Layers of a checkpoint, straight to device shards."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.flax_moe import hf
from expertmesh.flax_moe.checkpoint.layout import any_layout
from expertmesh.flax_moe.checkpoint.stored import StoredLayer
from expertmesh.flax_moe.models import fp4_blocks, fp8_blocks
from expertmesh.flax_moe.models.places import Ranges, ranges_of

__all__ = ["ShardedLayer", "load_sharded"]

Progress = Callable[[str, float], None]


class ShardedLayer(NamedTuple):
    """One block on devices.

    Attributes:
      params: the tree of `init_params`; with `keep_fp8` a QuantizedArray where the checkpoint has 8 bits.
      expert_bias: float32[E], a NumPy array; None for a model without one.
    """

    params: dict[str, Any]
    expert_bias: np.ndarray | None


def load_sharded(
    weights: Mapping[str, Any],
    hf_config: Mapping[str, Any],
    layer: int,
    shardings: Mapping[str, Sharding],
    *,
    dtype: DTypeLike | None = None,
    keep_fp8: bool = False,
    prefix: str = "model.",
    progress: Progress | None = None,
) -> ShardedLayer:
    """The block of one decoder layer, on the devices of `shardings`.

    Args:
      weights: a `Checkpoint`, or any mapping of names to arrays that can be sliced; under Hugging Face's names or ours.
      hf_config: the dict of `config.json`.
      layer: the decoder layer's number.
      shardings: of each parameter, such as NamedSharding(mesh, spec) of what `param_specs` gives.
      dtype: of the parameters; None: each keeps its own, bfloat16 where it is stored in 8 bits.
      keep_fp8: keep 8-bit weights with their scales, as QuantizedArrays. `dequantize` gives numbers of `dtype`.
      prefix: what stands before `layers.{layer}.`.
      progress: called with the name of what was placed, and the fraction of the layer that is there.

    Returns:
      ShardedLayer. Each process reads the slices that its own devices need, each of them once, and holds one shard of
      one parameter at a time: JAX may let go of it only when the next is moved.

    Raises:
      ValueError: as `hf.load_layer`; a parameter without a sharding; with `keep_fp8` a shard that would cut a block,
        or a parameter of which only some arrays have 8 bits.
    """
    weights = fp4_blocks.widened(weights, hf_config)
    layout = any_layout(weights, hf_config, layer, prefix=prefix)
    stored = StoredLayer(weights=weights, hf_config=hf_config, layout=layout, dtype=dtype)
    if missing := [name for name in layout.params if name not in shardings]:
        raise ValueError(
            f"load_sharded: shardings must have {', '.join(layout.params)}; got {', '.join(shardings)}, missing "
            f"{', '.join(missing)}; make them of param_specs(hf.moe_config(hf_config))"
        )
    report = _Report(layout.params, shardings, f"layer {layer}", progress)
    params: dict[str, Any] = {}
    for param in layout.params:
        kept = keep_fp8 and stored.is_fp8(param)
        params[param] = (_quantized if kept else _values)(stored, param, shardings[param], report)
    return ShardedLayer(params, hf.read_bias(weights, layout))


class _Report:
    """Counts numbers that are placed."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        shardings: Mapping[str, Sharding],
        layer: str,
        progress: Progress | None,
    ) -> None:
        parts = ((shape, _parts(shardings[name], shape)) for name, shape in shapes.items())
        self._total = sum(prod(map(len, r)) for _, ranges in parts for r in ranges)
        self._layer, self._progress, self._done = layer, progress, 0

    def placed(self, param: str, ranges: Ranges) -> None:
        self._done += prod(map(len, ranges))
        if self._progress is not None:
            self._progress(f"{self._layer}: {param}", self._done / self._total)


def _values(stored: StoredLayer, param: str, sharding: Sharding, report: _Report) -> jax.Array:
    def make(ranges: Ranges) -> np.ndarray:
        return stored.values(param, ranges)

    shape = stored.layout.params[param]
    return _placed(shape, sharding, make, lambda ranges: report.placed(param, ranges))


def _quantized(
    stored: StoredLayer, param: str, sharding: Sharding, report: _Report
) -> QuantizedArray:
    shape, block = stored.layout.params[param], stored.block()
    blocks = stored.layout.param_blocks(param, block)
    _check_blocks(param, shape, sharding, blocks)

    def data(ranges: Ranges) -> np.ndarray:
        return stored.data(param, ranges)

    def scale(ranges: Ranges) -> np.ndarray:
        return stored.scale(param, ranges)

    return QuantizedArray(
        data=_placed(shape, sharding, data, lambda ranges: report.placed(param, ranges)),
        scale=_placed(fp8_blocks.scale_shape(shape, blocks), sharding, scale, lambda ranges: None),
        block=blocks,
        format=fp8_blocks.block_format(block),
        dtype=stored.dtype_of(param).name,
    )


def _check_blocks(
    param: str, shape: tuple[int, ...], sharding: Sharding, blocks: tuple[int, ...]
) -> None:
    shard = sharding.shard_shape(shape)
    for dim, (size, part, b) in enumerate(zip(shape, shard, blocks, strict=True)):
        if part != size and part % b:
            raise ValueError(
                f"load_sharded: with keep_fp8 a shard must hold whole blocks; got {param} {shape}, {part} of dimension "
                f"{dim} on a device, blocks of {b}; shard another dimension, or leave keep_fp8 out"
            )


def _placed(
    shape: tuple[int, ...],
    sharding: Sharding,
    make: Callable[[Ranges], np.ndarray],
    placed: Callable[[Ranges], None],
) -> jax.Array:
    """An array of shards that are made and moved one by one; what several devices hold is made once."""
    shards: list[jax.Array] = []
    for ranges, devices in _parts(sharding, shape).items():
        shards += _moved(make(ranges), devices)
        placed(ranges)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _moved(part: np.ndarray, devices: list[jax.Device]) -> list[jax.Array]:
    """Copies on these devices, which are there: the caller keeps no part while it makes the next."""
    copies = [jax.device_put(part, device) for device in devices]
    jax.block_until_ready(copies)
    return copies


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> dict[Ranges, list[jax.Device]]:
    """The parts of an array that this process' devices hold, and which hold each."""
    parts: dict[Ranges, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        parts.setdefault(ranges_of(shape, index or ()), []).append(device)
    return parts
