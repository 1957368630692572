"""Rows in groups that are quantized along their features, quantized again along the rows.

    out = grouped_quantize(dequantize(q), group_sizes, format, axis=1)

A weight's gradient contracts these rows if they arrive quantized and exist in no other form. If their tokens are here,
one pass moves them and quantizes them again. Dimension key: P participants, C rows per participant, K features, G
groups per participant, S tokens.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.row_map import move_rows
from expertmesh.core.quantization.quantize import blocks_unsupported
from expertmesh.core.quantization.quantize_rows import (
    Copies,
    Formats,
    Moved,
    Rows,
    participant_unsupported,
    quantize_rows,
    quantize_rows_op,
    quantizes_both_at_once,
    reference,
    tokens_of,
    with_rows,
)
from expertmesh.core.quantization.quantized import QuantizedArray, check_quantized
from expertmesh.core.quantization.recipe import TensorFormat

__all__ = ["grouped_requantize", "move_quantized"]


def grouped_requantize(
    q: QuantizedArray | Moved,
    group_sizes: jax.Array,
    format: TensorFormat,
    *,
    spec: PartitionSpec | None = None,
) -> QuantizedArray:
    """`grouped_quantize(dequantize(q), group_sizes, format, axis=1)`.

    Args:
      q: of [P, C, K], its blocks along K; or `Moved` of such tokens, which are read where they are.
      group_sizes: int32[P, G], rows of each group.
      format: of the result.
      spec: where the rows are, for Auto axes under a MeshResource.

    Returns:
      A QuantizedArray of [P, C, K], undefined in padding rows. Where both formats are one of 8 bits with blocks, one
      byte is read and one is written per number, in place of three and three at 16 bits between the steps; the bits are
      the same.

    Raises:
      As `dequantize` and `grouped_quantize`. Under sharding as `grouped_quantize`.
    """
    name, tokens = "grouped_requantize", tokens_of(q)
    check_quantized(name, tokens)
    source: Any = Dequantized(q)
    if isinstance(q, Moved):
        fused = quantizes_both_at_once(tokens.format, format)
        source = MovedQuantized(q.base, q.row_map) if fused else Dequantized(move_quantized(q))
    out: QuantizedArray = quantize_rows(
        name, source, group_sizes, (None, format), spec=spec
    ).along_rows
    return out


def move_quantized(rows: Moved) -> QuantizedArray:
    """Quantized tokens moved to their rows: `move_rows` of their data and of their scales.

    Args:
      rows: of quantized tokens [P, S, K], in blocks along K or with one scale.

    Returns:
      A QuantizedArray of [P, C, K], zeros in a row without a token. S is held whole; no communication else.

    Raises:
      TypeError, ValueError: the tokens are not quantized, or do not fit the map.
    """
    check_quantized("move_quantized", rows.base)
    out: QuantizedArray = with_rows(rows.base, partial(move_rows, row_map=rows.row_map))
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


def _kernel(function: str) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.grouped_requantize", function, _unsupported),)


_op = dataclasses.replace(
    quantize_rows_op,
    name="grouped_requantize",
    kernels=_kernel("grouped_requantize"),
)


def _move_reference(source: "MovedQuantized", *operands: Any, **options: Any) -> Copies:
    copies: Copies = reference(Dequantized(source.rows()), *operands, **options)
    return copies


_move_op = dataclasses.replace(
    quantize_rows_op,
    name="move_requantize",
    reference=_move_reference,
    kernels=_kernel("move_requantize"),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MovedQuantized(Moved):
    """Rows of quantized tokens, quantized again along the rows."""

    op: ClassVar[Op] = _move_op

    def fuses(self, formats: Formats) -> bool:
        del formats
        return True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dequantized(Rows):
    """`dequantize(base)`."""

    op: ClassVar[Op] = _op

    def fuses(self, formats: Formats) -> bool:
        at_once = formats[0] is None and quantizes_both_at_once(self.base.format, formats[1])
        return at_once and self.ndim == 3 and self.block[1] == 1
