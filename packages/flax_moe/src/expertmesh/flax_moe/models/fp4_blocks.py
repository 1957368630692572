"""4-bit weights in blocks of 32 numbers with a power of two each (MXFP4), as gpt-oss is published.

    {name}_blocks   uint8 [E, out, in / 32, 16]   two numbers (e2m1) in a byte, the first in its lower half
    {name}_scales   uint8 [E, out, in / 32]       number = e2m1 * 2^(scale - 127)

Both together are the array `name`, bfloat16 [E, in, out], which is there only as far as it is sliced. 8-bit weights are
in `fp8_blocks`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from expertmesh.flax_moe.models.model_fields import inner

__all__ = ["METHOD", "is_packed", "widened"]

METHOD = "mxfp4"
"""`quant_method` of the config's `quantization_config`."""

_BLOCKS, _SCALES = "_blocks", "_scales"
_BFLOAT16: np.dtype = np.dtype(ml_dtypes.bfloat16)
_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(_BFLOAT16)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # of each byte


def is_packed(hf_config: Mapping[str, Any]) -> bool:
    """Whether the config says that experts have 4 bits."""
    return inner(hf_config, "quantization_config").get("quant_method") == METHOD


def widened(weights: Mapping[str, Any], hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights, with the array that two others are in place of these, if the config says that there are some."""
    return _Widened(weights) if is_packed(hf_config) else weights


class _Widened(Mapping[str, Any]):
    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        starts = {name.removesuffix(_BLOCKS) for name in weights if name.endswith(_BLOCKS)}
        self._packed = {start for start in starts if start + _SCALES in weights}

    def __getitem__(self, name: str) -> Any:
        if name not in self._packed:
            return self._weights[name]
        return _Matrices(self._weights[name + _BLOCKS], self._weights[name + _SCALES])

    def __iter__(self) -> Iterator[str]:
        parts = {start + end for start in self._packed for end in (_BLOCKS, _SCALES)}
        yield from (name for name in self._weights if name not in parts)
        yield from sorted(self._packed)

    def __len__(self) -> int:
        return len(self._weights) - len(self._packed)


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """Of all experts, [E, in, out]; what is sliced is read and widened, one expert after the other."""

    blocks: Any
    scales: Any

    @property
    def dtype(self) -> np.dtype:
        return _BFLOAT16

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, width, groups, half = np.shape(self.blocks)
        return num_experts, groups * half * 2, width

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, rows, columns = (range(size)[i] for size, i in zip(self.shape, index, strict=True))
        out = np.empty((len(experts), len(rows), len(columns)), self.dtype)
        for part, expert in zip(out, experts, strict=True):
            part[...] = self._of_expert(expert, rows, index[2]).T
        return out

    def _of_expert(self, expert: int, rows: range, columns: slice) -> np.ndarray:
        """[out, in], of the blocks that hold these rows of [in, out]."""
        size = 2 * np.shape(self.blocks)[-1]
        groups = slice(rows.start // size, -(-rows.stop // size))
        numbers = _PAIRS[np.asarray(self.blocks[expert, columns, groups])]
        scales = np.asarray(self.scales[expert, columns, groups]).view(ml_dtypes.float8_e8m0fnu)
        wide = numbers.reshape(*scales.shape, size) * scales.astype(_BFLOAT16)[..., None]
        flat: np.ndarray = wide.reshape(len(wide), -1)
        first = groups.start * size
        return flat[:, rows.start - first : rows.stop - first]
