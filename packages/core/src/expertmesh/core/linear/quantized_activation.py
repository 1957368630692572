"""The up projection of quantized rows on one device, its activation, and the quantization of that, as one op.

    h[p, r] = lhs[p, r] @ rhs[expert of row r]
    a[p, r] = weights[p, r] * act(h[p, r])                       0 where the row holds no token
    q       = grouped_quantize(a, ...) along the features and along the rows

as `grouped_gemm_op` of quantized rows, which may be `Moved`, and `Activated` rows have them: h is rounded before it is
activated, a before it is quantized. Hopper has one kernel for contractions up to 4096 in blocks of 128, which stores h
and never reads it. Where the backward keeps h in 8 bits, h is quantized along its features, too, and a is along its
features alone. Elsewhere the kernels of both run one after the other. It is for tokens that are all on one device:
axes split participants alone.

Dimension key: P participants, C rows per participant, T tokens, K contraction, F expert width, E experts, G groups per
participant. Padding rows are undefined (`ops/groups.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.linear.grouped_gemm import grouped_gemm_op, quantized_rows_unsupported
from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activation import Activation
from expertmesh.core.quantization.activate_quantize import (
    Activated,
    activate_quantize_unsupported,
    in_blocks_unsupported,
)
from expertmesh.core.quantization.quantize import block_shape
from expertmesh.core.quantization.quantize_rows import (
    Formats,
    Moved,
    Rows,
    quantizes_both_at_once,
    reference,
    tokens_of,
)
from expertmesh.core.quantization.quantized import QuantizedArray, is_quantized, quantized_like
from expertmesh.core.quantization.recipe import TensorFormat

__all__ = ["quantized_activation", "quantized_activation_op", "quantizes_activation"]

_Both = tuple[jax.Array | QuantizedArray, QuantizedArray, QuantizedArray | None]


def quantized_activation(
    lhs: QuantizedArray | Moved,
    rhs: QuantizedArray,
    group_sizes: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
    narrow: bool = False,
) -> _Both:
    """(h, a along its features, a along its rows).

    Args:
      lhs: quantized rows [P, C, K], in blocks along K; or quantized tokens [P, T, K], `Moved` to them.
      rhs: quantized [E, K, 2, F] (0 gate, 1 up), in blocks along K.
      group_sizes: int32[P, G].
      weights: float32[P, C], each row's routing weight.
      source: int32[P, C], the place of the row's token, -1 where it holds none.
      activation: with a gate.
      format: of both copies of a: of 8 bits, in blocks.
      narrow: whether h is quantized in the format, too; a has no copy along the rows then.

    Returns:
      h [P, C, 2, F] in the dtype that the rows had, or a QuantizedArray of it in blocks along F, if `narrow`; two
      QuantizedArrays of a [P, C, F], zeros in a row without a token, whatever its weight, or one and None. The last
      rows of a block along the rows, behind the last group, count as rows without a token.

    Has no derivative: it is a part of rules that have.
    """
    options: dict[str, Any] = dict(activation=activation, format=format, narrow=narrow)
    out: _Both = quantized_activation_op(lhs, rhs, group_sizes, weights, source, **options)
    return out


def quantizes_activation(lhs: Any, activation: Activation, formats: Formats) -> bool:
    """Whether the op is for these rows, and for copies of their activation in these formats.

    One half of it alone must not keep the other from its kernel.
    """
    tokens = tokens_of(lhs)
    return (
        is_quantized(tokens)
        and max(tokens.block, default=0) == 128
        and activation.gated
        and in_blocks_unsupported(activation) is None
        and quantizes_both_at_once(*formats)
    )


def _blocks(shape: tuple[int, ...], format: TensorFormat) -> tuple[tuple[int, ...], ...]:
    """Of a [P, C, F] along its features and along its rows."""
    name = "quantized_activation"
    return tuple(block_shape(name, shape, format, axis, None, 1) for axis in (2, 1))


def _block_of_h(format: TensorFormat) -> tuple[int, ...]:
    assert format.block is not None
    return (1, 1, 1, format.block[1])


def _shape_of_a(weights: jax.Array, rhs: QuantizedArray) -> tuple[int, ...]:
    return (*weights.shape, rhs.shape[-1])


def _reference(
    lhs: QuantizedArray | Moved,
    rhs: QuantizedArray,
    group_sizes: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
    narrow: bool,
) -> _Both:
    h = grouped_gemm_op.reference(lhs, rhs, group_sizes, out_dtype=jnp.dtype(lhs.dtype))
    copies = reference(
        Activated(h, weights, source, activation),
        group_sizes,
        None,
        None,
        format=format,
        blocks=_blocks(_shape_of_a(weights, rhs), format),
        directions=(0,) if narrow else (0, 1),
    )
    if not narrow:
        return h, copies.along_features, copies.along_rows
    blocks = _block_of_h(format), ()
    options: dict[str, Any] = dict(format=format, blocks=blocks, directions=(0,))
    kept = reference(Rows(h), group_sizes, None, None, **options)
    return kept.along_features, copies.along_features, None


def _results_like(
    lhs: QuantizedArray | Moved,
    rhs: QuantizedArray,
    group_sizes: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
    narrow: bool,
) -> tuple[Any, QuantizedArray, QuantizedArray | None]:
    del source, activation
    shape, h = _shape_of_a(weights, rhs), _h_like(lhs, rhs, weights)
    first, second = (
        quantized_like(shape, lhs.dtype, format, block, group_sizes.shape)
        for block in _blocks(shape, format)
    )
    if not narrow:
        return h, first, second
    kept = quantized_like(h.shape, h.dtype, format, _block_of_h(format), group_sizes.shape)
    return kept, first, None


def _h_like(lhs: QuantizedArray | Moved, rhs: QuantizedArray, weights: jax.Array) -> Any:
    return jax.ShapeDtypeStruct((*weights.shape, *rhs.shape[2:]), jnp.dtype(lhs.dtype))


def _unsupported(
    lhs: QuantizedArray | Moved,
    rhs: QuantizedArray,
    group_sizes: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
    narrow: bool,
) -> str | None:
    """What keeps these types from the kernels, or None."""
    del narrow
    h, blocks = _h_like(lhs, rhs, weights), _blocks(_shape_of_a(weights, rhs), format)
    activated = Activated(h, weights, source, activation)
    return quantized_rows_unsupported(
        tokens_of(lhs), rhs, group_sizes, out_dtype=h.dtype
    ) or activate_quantize_unsupported(activated, group_sizes, None, None, blocks=blocks)


quantized_activation_op = Op(
    "quantized_activation",
    _reference,
    "p c k, e k two... f, p g, p c, p c -> p c two... f, p c f, p c f",
    whole=("c", "e", "k", "two...", "f", "g", "s", "j"),  # the last two: of `Moved`
    roles="participants . ., experts fsdp . ., participants ., participants ., participants . "
    "-> participants . . ., participants . ., participants . .",
    parameter=1,
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.quantized_activation", "quantized_activation", _unsupported
        ),
    ),
    results_like=_results_like,
)
