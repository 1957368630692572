"""8-bit weights in blocks with a scale each, as DeepSeek publishes them.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  float32 [ceil(out / 128), ceil(in / 128)];  number = weight * weight_scale_inv

The config's `quantization_config.weight_block_size` says how large a block is. It is the format of the weights of
`Float8BlockScaling(power_2_scale=False)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from expertmesh.core.quantization.quantize import quantize
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.flax_moe.models.model_fields import inner

__all__ = [
    "BLOCK",
    "block_format",
    "block_size",
    "block_size_or_default",
    "scale_name",
    "scale_shape",
    "to_blocks",
    "widened",
]

BLOCK = (128, 128)
"""The size that DeepSeek's models have."""

Block = tuple[int, int]


def scale_name(name: str) -> str:
    """Of the scales beside an array."""
    return f"{name}_scale_inv"


def scale_shape(shape: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Of the scales of an array."""
    return tuple(-(-n // b) for n, b in zip(shape, blocks, strict=True))


def block_size(hf_config: Mapping[str, Any]) -> Block | None:
    """(out, in) of a block by the config, or None."""
    block = inner(hf_config, "quantization_config").get("weight_block_size")
    return None if block is None else _two_counts(block)


def _two_counts(block: Any) -> Block:
    match block:
        case int(out), int(into) if out > 0 and into > 0:
            return out, into
    raise ValueError(
        f"hf: weight_block_size of the config's quantization_config must be two ints of at least 1; got {block!r:.80}; "
        "pass the dict of config.json"
    )


def block_size_or_default(hf_config: Mapping[str, Any]) -> Block:
    """(out, in) of a block by the config, or where it names none 128 x 128."""
    return block_size(hf_config) or BLOCK


def block_format(block: Block) -> TensorFormat:
    """What a QuantizedArray of such blocks has as its format."""
    return TensorFormat(dtype="float8_e4m3fn", block=block)


def widened(
    data: np.ndarray, scale: np.ndarray, block: Sequence[int], index: Sequence[slice]
) -> np.ndarray:
    """float32: part of an array, each number times its block's scale.

    Args:
      data: the part.
      scale: of the whole array.
      block: elements of each dimension that share a scale.
      index: which part of the array `data` is.
    """
    for axis, (size, b, part) in enumerate(zip(scale.shape, block, index, strict=True)):
        scale = scale.take(np.arange(size * b)[part][: data.shape[axis]] // b, axis)
    wide: np.ndarray = data.astype(np.float32) * scale
    return wide


def to_blocks(weight: np.ndarray, block: Block = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(float8_e4m3fn [out, in], float32 scales of its blocks) of a weight [out, in].

    The largest number of a block becomes the largest of the format, 448; a block of zeros has the scale 1.
    """
    q = quantize(jnp.asarray(weight), block_format(block), axis=-1, across=0)
    return np.asarray(q.data), np.asarray(q.scale)
