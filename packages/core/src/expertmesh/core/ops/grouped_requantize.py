"""Rows in groups that are quantized along their features, quantized again along the rows.

    out = grouped_quantize(dequantize(q), group_sizes, format, axis=1)

What a weight's gradient contracts, where rows arrive quantized and nowhere else exist. Dimension key: P participants,
C rows per participant, K features, G groups per participant.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.grouped_quantize import (
    both_reference,
    check_groups,
    grouped_quantize,
    plan_blocks,
    quantizes_both_at_once,
)
from expertmesh.core.ops.quantize import (
    block_shape,
    dequantize,
    dequantize_values,
    why_no_blocks,
)
from expertmesh.core.quantized import QuantizedArray, check_quantized
from expertmesh.core.recipe import TensorFormat
from expertmesh.core.vjp import not_differentiable

__all__ = ["grouped_requantize"]


def grouped_requantize(
    q: QuantizedArray,
    group_sizes: jax.Array,
    format: TensorFormat,
    *,
    spec: PartitionSpec | None = None,
    zero_rest: bool = True,
) -> QuantizedArray:
    """`grouped_quantize(dequantize(q), group_sizes, format, axis=1)`.

    Args:
      q: of [P, C, K], its blocks along K.
      group_sizes: int32[P, G], rows of each group; those after the last one are zeros, whatever q holds there.
      format: of the result.
      spec: where q is, for Auto axes under a MeshResource.
      zero_rest: False if nobody reads the rows after the last group: their data and scales may then be anything.

    Returns:
      A QuantizedArray of [P, C, K]. Where both formats are one of 8 bits with blocks, one byte is read and one is
      written per number, in place of three and three at 16 bits between the steps; the bits are the same.

    Raises:
      As `dequantize` and `grouped_quantize`. Under sharding as `grouped_quantize`.
    """
    name = "grouped_requantize"
    check_quantized(name, q)
    at_once = quantizes_both_at_once(q.format, format) and not format.stochastic and q.ndim == 3
    if not at_once or q.block[1] > 1:
        return grouped_quantize(dequantize(q, spec=spec), group_sizes, format, axis=1, spec=spec)
    check_groups(name, q.data, group_sizes)
    block = block_shape(name, q.shape, format, 1, None, 1)
    of_groups = None if spec is None else PartitionSpec(*tuple(spec)[:1])
    data, scale = _op(
        not_differentiable(q.data, f"{name}: use grouped_dense"),
        q.scale,
        group_sizes,
        operand_specs=(spec, spec, of_groups),
        format=format,
        blocks=(q.block, block),
        dtype=jnp.dtype(q.dtype),
        zero_rest=zero_rest,
    )
    return QuantizedArray(data, scale, None, None, block, format, q.dtype)


def _reference(data, scale, group_sizes, *, format, blocks, dtype, zero_rest=True, **options):
    """(data, scale) in the second of `blocks`, of numbers in the first."""
    first, second = blocks
    x = dequantize_values(data, scale, block=first, dtype=dtype)
    return both_reference(x, group_sizes, format=format, blocks=(second,), **options)


def _why_not(data, scale, group_sizes, *, blocks, **options) -> str | None:
    """What keeps these types from the kernel, or None."""
    del scale, options
    if data.shape[0] != 1 or group_sizes.shape[1] == 0:
        return f"a device must hold one participant with groups; it holds {group_sizes.shape}"
    return next(filter(None, (why_no_blocks(data, block) for block in blocks)), None)


_op = Op(
    "grouped_requantize",
    _reference,
    "d0 d1 d2, d0 d1 d2, d0 g -> d0 d1 d2, d0 d1 d2",
    whole=("d1", "g"),
    roles="participants . ., participants . ., participants . -> participants . ., participants . .",
    plan=plan_blocks,
    kernels=(
        Kernel.triton("expertmesh.core.kernels.grouped_requantize", "grouped_requantize", _why_not),
    ),
)
