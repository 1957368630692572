"""GEMMs of quantized rows, the activation behind them, and the quantization of that, as one op each.

The up projection, and its activation:

    h[p, r] = lhs[p, r] @ rhs[expert of row r]
    a[p, r] = weights[p, r] * act(h[p, r])                       0 where the row holds no token
    q       = grouped_quantize(a, ...) along the features and along the rows

as `grouped_gemm_op` of quantized rows, which may be `Moved`, and `Activated` rows have them: h is rounded before it is
activated, a before it is quantized. Hopper has one kernel for contractions up to 4096 in blocks of 128, which stores h
and never reads it. Where the backward keeps h in 8 bits, h is quantized along its features, too, and a is along its
features alone. With a scale per group, whose amax is that of all its rows, one kernel stores h and a, with each row's
amax, and a pass quantizes a.

The input gradient of the down projection, with the gradient of the activation before it, with a scale per group:

    d_a[p, r] = dy[p, r] @ rhs[expert of row r]^T
    q         = grouped_quantize(d_h, ...) along the features and along the rows

as `grouped_gemm_dgrad_op` and `ActivatedGrad` rows have them, d_a being rounded before it. One kernel stores d_h, with
each row's amax, and no d_a. Elsewhere the kernels of both run one after the other.

K is whole. Axes split experts as those of a grouped GEMM, and F, in whole blocks of a; a scale per group is of the amax
of all its parts, which are reduced over the axes of F, as the gradient of the weights is.

Dimension key: P participants, C rows per participant, T tokens, K contraction, F expert width, E experts, G groups per
participant. Padding rows are undefined (`ops/groups.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    quantized_rows_unsupported,
)
from expertmesh.core.linear.grouped_plan import plan_grouped
from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.ops.activation import Activation, function_unsupported
from expertmesh.core.quantization.activate_quantize import (
    Activated,
    ActivatedGrad,
    activate_quantize_unsupported,
    in_blocks_unsupported,
)
from expertmesh.core.quantization.quantize import block_shape, check_blocks
from expertmesh.core.quantization.quantize_rows import (
    Copies,
    Formats,
    Moved,
    Rows,
    per_group,
    quantizes_both_at_once,
    reference,
    tokens_of,
    with_groups,
)
from expertmesh.core.quantization.quantized import QuantizedArray, is_quantized, quantized_like
from expertmesh.core.quantization.recipe import TensorFormat
from expertmesh.core.specs import entry_axes

__all__ = [
    "quantized_activation",
    "quantized_activation_grad",
    "quantized_activation_grad_op",
    "quantized_activation_op",
    "quantizes_activation",
    "quantizes_activation_grad",
]

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
      lhs: quantized rows [P, C, K], in blocks along K or with a scale per group; or such tokens [P, T, K], `Moved` to
        them.
      rhs: quantized [E, K, 2, F] (0 gate, 1 up), in blocks along K or with a scale per expert.
      group_sizes: int32[P, G].
      weights: float32[P, C], each row's routing weight.
      source: int32[P, C], the place of the row's token, -1 where it holds none.
      activation: with a gate.
      format: of both copies of a: of 8 bits, in blocks, or without for rows without.
      narrow: whether h is quantized in the format, which has blocks, too; a has no copy along the rows then.

    Returns:
      h [P, C, 2, F] in the dtype that the rows had, or a QuantizedArray of it in blocks along F, if `narrow`; two
      QuantizedArrays of a [P, C, F], zeros in a row without a token, whatever its weight, or one and None. The last
      rows of a block along the rows, behind the last group, count as rows without a token.

    Raises:
      ValueError: mesh axes of F cut a block of the format.

    Has no derivative: it is a part of rules that have.
    """
    options: dict[str, Any] = dict(activation=activation, format=format, narrow=narrow)
    h, first, second = quantized_activation_op(lhs, rhs, group_sizes, weights, source, **options)
    return h, with_groups(first, group_sizes), second and with_groups(second, group_sizes)


def quantized_activation_grad(
    dy: QuantizedArray | Moved,
    rhs: QuantizedArray,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
) -> Copies:
    """Copies of d_h in both directions, and the gradient of the weights.

    Args:
      dy: quantized rows [P, C, D], with a scale per group; or such tokens [P, T, D], `Moved` to them.
      rhs: quantized [E, F, D], with a scale per expert.
      h: float[P, C, 2, F] (0 gate, 1 up), the result's dtype before it is quantized.
      weights, source, group_sizes, activation: as of `quantized_activation`.
      format: of both copies of d_h: of 8 bits, without blocks.

    Returns:
      Copies of [P, C, 2, F], and float32[P, C]; zeros in a row without a token, whatever it and its weight hold.

    Has no derivative: it is a part of rules that have.
    """
    operands, options = (dy, rhs, h, weights, source, group_sizes), dict(activation=activation)
    first, second, d_weights = quantized_activation_grad_op(*operands, **options, format=format)
    first, second = (with_groups(q, group_sizes) for q in (first, second))
    return Copies(first, second, None, d_weights)


# Of the contraction, the least that a kernel takes of rows with a scale per group.
_WHOLE = 128


def _of_groups(rows: Any, activation: Activation, formats: Formats) -> bool:
    """Whether rows and both copies have scales per group, and one kernel may make the amax of these copies."""
    return (
        is_quantized(tokens_of(rows))
        and not rows.block
        and rows.shape[-1] % _WHOLE == 0
        and None not in formats
        and per_group(*formats)
        and activation.gated
        and function_unsupported(activation) is None
    )


def quantizes_activation_grad(dy: Any, h: Any, activation: Activation, formats: Formats) -> bool:
    """Whether `quantized_activation_grad` is for these rows, this h, and copies of its gradient in these formats."""
    return not is_quantized(h) and _of_groups(dy, activation, formats)


def quantizes_activation(lhs: Any, activation: Activation, formats: Formats) -> bool:
    """Whether `quantized_activation` is for these rows, and for copies of their activation in these formats.

    One half of it alone must not keep the other from its kernel.
    """
    tokens = tokens_of(lhs)
    return _of_groups(lhs, activation, formats) or (
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


def _plan(query: Query) -> Plan:
    """That of a grouped op that splits F, too, between blocks; the op reduces the amax of groups over the parts."""
    plan = plan_grouped(query, features=("f",))
    assert query.parameter is not None
    shape, names = query.shapes[query.parameter], query.rule.operands[query.parameter]
    entries, block = tuple(plan.operand_specs[query.parameter]), query.options["format"].block
    blocks = [block[1] if block and name == "f" else 1 for name in names]
    check_blocks("quantized_activation", shape, blocks, entries, query.mesh_shape)
    return dataclasses.replace(plan, options={"amax_axes": entry_axes(entries[names.index("f")])})


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
    amax_axes: tuple[str, ...] = (),
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
        amax_axes=amax_axes,
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
    **options: Any,
) -> str | None:
    """What keeps these types from the kernels, or None."""
    del options
    h, blocks = _h_like(lhs, rhs, weights), _blocks(_shape_of_a(weights, rhs), format)
    activated = Activated(h, weights, source, activation)
    return quantized_rows_unsupported(
        tokens_of(lhs), rhs, group_sizes, out_dtype=h.dtype
    ) or activate_quantize_unsupported(activated, group_sizes, None, None, blocks=blocks)


quantized_activation_op = Op(
    "quantized_activation",
    _reference,
    "p c k, e k two... f, p g, p c, p c -> p c two... f, p c f, p c f",
    whole=("c", "e", "k", "two...", "g", "s", "j"),  # the last two: of `Moved`
    roles="participants . ., experts fsdp . tp, participants ., participants ., participants . "
    "-> participants . . tp, participants . tp, participants . tp",
    parameter=1,
    plan=_plan,
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.quantized_activation", "quantized_activation", _unsupported
        ),
    ),
    results_like=_results_like,
)


def _grad_reference(
    dy: QuantizedArray | Moved,
    rhs: QuantizedArray,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
    amax_axes: tuple[str, ...] = (),
) -> tuple[Any, Any, Any]:
    d_a = grouped_gemm_dgrad_op.reference(dy, rhs, group_sizes, out_dtype=h.dtype)
    gradient = ActivatedGrad(h, weights, source, activation, d_a)
    options: dict[str, Any] = dict(format=format, blocks=((), ()), directions=(0, 1))
    copies = reference(gradient, group_sizes, None, None, **options, amax_axes=amax_axes)
    return copies.along_features, copies.along_rows, copies.d_weights


def _grad_results_like(
    dy: QuantizedArray | Moved,
    rhs: QuantizedArray,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
    format: TensorFormat,
) -> tuple[Any, Any, Any]:
    del dy, rhs, source, activation
    copy = quantized_like(h.shape, h.dtype, format, (), group_sizes.shape)
    return copy, copy, weights


def _grad_unsupported(
    dy: QuantizedArray | Moved,
    rhs: QuantizedArray,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
    **options: Any,
) -> str | None:
    """What keeps these types from the kernels, or None."""
    del options
    gradient = Activated(h, weights, source, activation)
    return quantized_rows_unsupported(
        tokens_of(dy), rhs, group_sizes, out_dtype=h.dtype
    ) or activate_quantize_unsupported(gradient, group_sizes, None, None, blocks=((), ()))


quantized_activation_grad_op = Op(
    "quantized_activation_grad",
    _grad_reference,
    "p c k, e f k, p c two... f, p c, p c, p g -> p c two... f, p c two... f, p c",
    whole=("c", "e", "k", "two...", "g", "s", "j"),  # the last two: of `Moved`
    summed=("f",),
    roles="participants . ., experts tp fsdp, participants . . tp, participants ., participants ., participants . "
    "-> participants . . tp, participants . . tp, participants .",
    parameter=1,
    plan=_plan,
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.quantized_activation",
            "quantized_activation_grad",
            _grad_unsupported,
        ),
    ),
    results_like=_grad_results_like,
)
