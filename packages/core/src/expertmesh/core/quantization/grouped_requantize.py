"""Rows in groups that are quantized along their features, quantized again along the rows.

    out = grouped_quantize(dequantize(q), group_sizes, format, axis=1)

A weight's gradient contracts these rows if they arrive quantized and exist in no other form. Dimension key: P
participants, C rows per participant, K features, G groups per participant.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.quantization.quantize import blocks_unsupported, dequantize, dequantize_values
from expertmesh.core.quantization.quantize_rows import (
    Formats,
    Rows,
    participant_unsupported,
    quantize_rows,
    quantize_rows_op,
    quantizes_both_at_once,
)
from expertmesh.core.quantization.quantized import QuantizedArray, check_quantized
from expertmesh.core.quantization.recipe import TensorFormat

__all__ = ["grouped_requantize"]


def grouped_requantize(
    q: QuantizedArray,
    group_sizes: jax.Array,
    format: TensorFormat,
    *,
    spec: PartitionSpec | None = None,
) -> QuantizedArray:
    """`grouped_quantize(dequantize(q), group_sizes, format, axis=1)`.

    Args:
      q: of [P, C, K], its blocks along K.
      group_sizes: int32[P, G], rows of each group.
      format: of the result.
      spec: where q is, for Auto axes under a MeshResource.

    Returns:
      A QuantizedArray of [P, C, K], undefined in padding rows. Where both formats are one of 8 bits with blocks, one
      byte is read and one is written per number, in place of three and three at 16 bits between the steps; the bits are
      the same.

    Raises:
      As `dequantize` and `grouped_quantize`. Under sharding as `grouped_quantize`.
    """
    check_quantized("grouped_requantize", q)
    of = Dequantized(q), group_sizes, (None, format)
    out: QuantizedArray = quantize_rows("grouped_requantize", *of, spec=spec).along_rows
    return out


def _unsupported(
    source: Rows,
    group_sizes: jax.Array,
    multiplier: jax.Array | None,
    key: jax.Array | None,
    *,
    blocks: tuple[tuple[int, ...], ...],
    **options: Any,
) -> str | None:
    """What keeps these types from the kernel, or None."""
    del multiplier, key, options
    reasons = (blocks_unsupported(source.base.data, block) for block in blocks)
    return participant_unsupported(source, group_sizes) or next(filter(None, reasons), None)


_op = dataclasses.replace(
    quantize_rows_op,
    name="grouped_requantize",
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.grouped_requantize", "grouped_requantize", _unsupported
        ),
    ),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dequantized(Rows):
    """`dequantize(base)`."""

    op: ClassVar[Op] = _op

    def per_leaf(self, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
        out: tuple[tuple[Any, ...], ...] = self.base.per_leaf(of_data, of_groups)
        return out

    def rows(self) -> jax.Array:
        q = self.base
        out: jax.Array = dequantize_values(q.data, q.scale, block=q.block, dtype=q.dtype)
        return out

    def apart(
        self, group_sizes: jax.Array, spec: PartitionSpec | None
    ) -> tuple[jax.Array, jax.Array | None]:
        return dequantize(self.base, spec=spec), None

    def fuses(self, formats: Formats) -> bool:
        at_once = formats[0] is None and quantizes_both_at_once(self.base.format, formats[1])
        return at_once and self.ndim == 3 and self.block[1] == 1
