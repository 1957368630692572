"""Tokens that are quantized once, with one scale, for all rows that they are.

    scale = amax(tokens that have a row) / max
    data  = tokens / scale, saturated and rounded

A format without blocks gives rows that were moved a scale for each group. Where their tokens are here, the scale of
all groups is one: a token is then quantized once, not for each of its rows, and what reads rows, or copies them along
the rows, reads 8 bits. Dimension key: P participants, S tokens, K places of a token, C rows per participant, D
features, G groups per participant.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.groups import expand_trailing
from expertmesh.core.quantization.quantize import (
    check_source,
    quantize_unsupported,
    quantized_array,
)
from expertmesh.core.quantization.quantize_rows import (
    Moved,
    checked_groups,
    participant_unsupported,
)
from expertmesh.core.quantization.quantized import QuantizedArray, quantized_like
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.vjp import not_differentiable

__all__ = ["quantize_moved"]


def quantize_moved(rows: Moved, group_sizes: jax.Array, format: TensorFormat) -> Moved:
    """The rows of quantized tokens, by the module's formulas.

    Args:
      rows: of tokens [P, S, D], float32, bfloat16 or float16.
      group_sizes: int32[P, G], rows of each group.
      format: without blocks.

    Returns:
      `Moved` of a QuantizedArray of the tokens, whose `scale` is that of the rows' groups, float32[P, G], equal for all
      of them. The data of a token without a row are not to be read; whatever it holds enters no scale.

    Raises:
      As `quantize` and `grouped_quantize`; ValueError: a format with blocks.

    Under sharding P keeps its axes; S and D are held whole.
    """
    name, tokens = "quantize_moved", rows.base
    check_source(name, tokens, format)
    group_sizes = checked_groups(name, rows.shape, group_sizes)
    if format.block is not None:
        raise ValueError(
            f"{name}: format must be without blocks; got {format}; use quantize, whose blocks lie along D"
        )
    row = rows.row_map.row
    (q,) = quantize_tokens_op(
        not_differentiable(tokens, f"{name}: use grouped_dense"),
        row if row.ndim == 3 else row[..., None],
        group_sizes,
        format=format,
    )
    return dataclasses.replace(rows, base=dataclasses.replace(q, group_sizes=group_sizes))


def _reference(
    x: jax.Array, row: jax.Array, group_sizes: jax.Array, *, format: TensorFormat
) -> tuple[QuantizedArray]:
    has_row = jnp.any(row >= 0, axis=2, keepdims=True)

    def amax(magnitudes: jax.Array) -> jax.Array:
        out: jax.Array = jnp.max(jnp.where(has_row, magnitudes, 0), axis=(1, 2), initial=0)
        return out

    of_all = partial(expand_trailing, ndim=x.ndim)
    options: dict[str, Any] = dict(amax=amax, of_elements=of_all, of_blocks=of_all)
    q, _ = quantized_array(x, format, (), None, None, **options)
    of_groups = jnp.ones_like(group_sizes, jnp.float32) * q.scale[:, None]
    return (dataclasses.replace(q, scale=of_groups),)


def _results_like(
    x: jax.Array, row: jax.Array, group_sizes: jax.Array, *, format: TensorFormat
) -> tuple[QuantizedArray]:
    del row
    return (quantized_like(x.shape, x.dtype, format, (), group_sizes.shape),)


def _unsupported(
    x: jax.Array, row: jax.Array, group_sizes: jax.Array, *, format: TensorFormat
) -> str | None:
    """What keeps these types from the kernels, or None."""
    del row
    return participant_unsupported(x, group_sizes) or quantize_unsupported(x, format, ())


quantize_tokens_op = Op(
    "quantize_moved",
    _reference,
    "p s d, p s k, p g -> p s d",
    whole=("s", "d", "k", "g"),
    roles="participants . ., participants . ., participants . -> participants . .",
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.triton.grouped_quantize", "quantize_tokens", _unsupported
        ),
    ),
    results_like=_results_like,
)
