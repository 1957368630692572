"""Grouped GEMMs of quantized operands: each step of a group's rows is dequantized, multiplied, accumulated in float32.

Groups, participants and experts as in grouped_gemm. Rows have a scale per group ([P, G]) or scales of blocks, which
restart at row 0 of a participant; experts have a scale each ([E]) or scales of blocks. Dimension key: P participants,
C rows per participant, K contraction, N output dimensions (any number), E experts, G groups per participant,
R participants that share one set of weights.
"""

import dataclasses
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel
from expertmesh.core.operands import check_out_dtype
from expertmesh.core.ops.grouped_gemm import (
    accumulate_weights,
    empty_result,
    flattened,
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
    multiply_rows,
    per_participant,
    rows_reader,
)
from expertmesh.core.ops.quantized_gemm import check_pair, rows_unsupported, unsupported
from expertmesh.core.quantization.quantize import dequantize_values
from expertmesh.core.quantization.quantized import QuantizedArray

__all__ = [
    "quantized_grouped_gemm",
    "quantized_grouped_gemm_dgrad",
    "quantized_grouped_gemm_wgrad",
]

_HIGHEST = jax.lax.Precision.HIGHEST


def _wide_rows(data_CD, scale, tensor_scale_G=None, *, block, step):
    """A reader (see `rows_reader`) of one participant's rows, float32[step, flattened D].

    Args:
      data_CD, scale, tensor_scale_G: one participant's; without blocks `scale` is [G].
      block: of [P, C, *D], or ().
    """
    read = rows_reader(data_CD, step)
    if not block:
        return lambda first, group: flattened(
            dequantize_values(read(first, group), scale[group]), 1
        )

    def rows(first, group):
        # A step may end within a block, and read beyond the last one.
        blocks = (first + jnp.arange(step)) // block[1]
        of_rows = jnp.take(scale, blocks, axis=0, mode="clip")
        per_group = None if tensor_scale_G is None else tensor_scale_G[group]
        wide = dequantize_values(read(first, group), of_rows, per_group, block=(1, *block[2:]))
        return flattened(wide, 1)

    return rows


def _wide_weight(data_GKN, scale_G, tensor_scale_G=None, *, block, group):
    """One expert's weight, float32[K, flattened N]."""
    one = [
        None if x is None else jax.lax.dynamic_index_in_dim(x, group, keepdims=False)
        for x in (data_GKN, scale_G, tensor_scale_G)
    ]
    return flattened(dequantize_values(*one, block=block[1:]), 1)


def _rows_reference(lhs, rhs, group_sizes_PG, *, contract_rhs, out_dtype, zero_rest=True):
    del zero_rest
    E, K, *N = rhs.shape
    P, C = lhs.shape[:2]
    result = tuple(N) if contract_rhs == 1 else (K,)
    of_rows, of_weight = jax.tree.leaves(lhs), jax.tree.leaves(rhs)
    if lhs.data.size == 0 or rhs.data.size == 0:
        return empty_result((P, C, *result), out_dtype, *of_rows, *of_weight, group_sizes_PG)
    num_groups = group_sizes_PG.shape[1]
    num_sets = E // num_groups
    sets = [x.reshape(num_sets, num_groups, *x.shape[1:]) for x in of_weight]

    def one(r, *of_participant):
        *lhs_C, group_sizes_G = of_participant
        weights = [x[0] if num_sets == 1 else x[r] for x in sets]
        return multiply_rows(
            lambda step: _wide_rows(*lhs_C, block=lhs.block, step=step),
            lambda group: _wide_weight(*weights, block=rhs.block, group=group),
            group_sizes_G,
            (C, prod(result)),
            (*lhs_C, *weights),
            contract_rhs=contract_rhs,
            out_dtype=out_dtype,
            precision=_HIGHEST,
        )

    return per_participant(one, num_sets, *of_rows, group_sizes_PG).reshape(P, C, *result)


def _wgrad_reference(lhs, dy, group_sizes_PG, *, num_experts, out_dtype):
    shape = (num_experts, lhs.shape[2], *dy.shape[2:])
    of_lhs, of_dy = jax.tree.leaves(lhs), jax.tree.leaves(dy)
    if lhs.data.size == 0 or dy.data.size == 0:
        return empty_result(shape, out_dtype, *of_lhs, *of_dy, group_sizes_PG)

    def one(_, *of_participant):
        *both, group_sizes_G = of_participant
        sides = (both[: len(of_lhs)], lhs.block), (both[len(of_lhs) :], dy.block)
        lhs_reader, dy_reader = (partial(_reader, parts, block) for parts, block in sides)
        return accumulate_weights(
            lhs_reader,
            dy_reader,
            group_sizes_G,
            lhs.shape[1],
            (shape[1], prod(shape[2:])),
            both,
            _HIGHEST,
        )

    num_sets = num_experts // group_sizes_PG.shape[1]
    dw_PGKN = per_participant(one, num_sets, *of_lhs, *of_dy, group_sizes_PG)
    return dw_PGKN.reshape(-1, *shape).sum(axis=0).astype(out_dtype)


def _reader(parts, block, step):
    return _wide_rows(*parts, block=block, step=step)


def _rows_supported(rows, rhs, group_sizes, *, out_dtype, **options) -> str | None:
    """For the forward (rows x weights) and the input gradient (dy x weights)."""
    del options
    return _one_participant(group_sizes, rhs.shape[0]) or rows_unsupported(
        rows, rhs, rhs.shape[1:], out_dtype
    )


def _weights_supported(lhs, dy, group_sizes, *, num_experts, out_dtype) -> str | None:
    widths = lhs.shape[2], prod(dy.shape[2:])
    return _one_participant(group_sizes, num_experts) or unsupported(
        lhs, dy, widths, (1, 1), out_dtype
    )


def _one_participant(group_sizes, num_experts: int) -> str | None:
    if group_sizes.shape == (1, num_experts):
        return None
    return f"a device must hold one participant and its experts; it holds {group_sizes.shape}"


def _triton(function: str, supports) -> tuple[Kernel, ...]:
    module = "expertmesh.core.kernels.quantized_grouped_gemm"
    return (Kernel.triton(module, function, supports),)


# Where operands and results lie is the law of the GEMMs that are not quantized.
_fprop_op = dataclasses.replace(
    grouped_gemm_op,
    name="quantized_grouped_gemm",
    reference=partial(_rows_reference, contract_rhs=1),
    kernels=_triton("rows", _rows_supported),
)
_dgrad_op = dataclasses.replace(
    grouped_gemm_dgrad_op,
    name="quantized_grouped_gemm_dgrad",
    reference=partial(_rows_reference, contract_rhs=2),
    kernels=_triton("rows_dgrad", _rows_supported),
)
_wgrad_op = dataclasses.replace(
    grouped_gemm_wgrad_op,
    name="quantized_grouped_gemm_wgrad",
    reference=_wgrad_reference,
    kernels=_triton("weights", _weights_supported),
)


def quantized_grouped_gemm(
    lhs: QuantizedArray, rhs: QuantizedArray, group_sizes, *, out_dtype, specs, out_spec=None,
    zero_rest=True,
):  # fmt: skip
    """out[p, r] = lhs[p, r] @ rhs[expert of the row's group]; rows after the last group are zeros.

    Args:
      lhs: [P, C, K], its blocks along K.
      rhs: [E, K, *N], its blocks along K.
      group_sizes: int[P, G].
      out_dtype: dtype of the result.
      specs: of `lhs` and `rhs` over Auto axes, or None for each.
      out_spec: where the result is wanted.
      zero_rest: see `grouped_gemm`.

    Returns:
      [P, C, *N], accumulated in float32, rounded once.

    Raises:
      ValueError: formats, blocks or scales that do not fit.

    Under sharding as `grouped_gemm`; what is gathered of the weight is its data and its scales.
    """
    check_pair("grouped_gemm", (lhs, 2), (rhs, 1))
    check_tensor_scales(lhs, rhs, group_sizes)
    return _call(_fprop_op, lhs, rhs, group_sizes, out_dtype, specs, out_spec, zero_rest=zero_rest)


def quantized_grouped_gemm_dgrad(
    dy: QuantizedArray, rhs: QuantizedArray, group_sizes, *, out_dtype, specs, out_spec=None,
    zero_rest=True,
):  # fmt: skip
    """dlhs[p, r] = dy[p, r] @ rhs[expert]^T; blocks along the last of N. Otherwise as `quantized_grouped_gemm`."""
    check_pair("grouped_gemm's input gradient", (dy, dy.ndim - 1), (rhs, rhs.ndim - 1))
    check_tensor_scales(dy, rhs, group_sizes)
    return _call(_dgrad_op, dy, rhs, group_sizes, out_dtype, specs, out_spec, zero_rest=zero_rest)


def quantized_grouped_gemm_wgrad(
    lhs: QuantizedArray,
    dy: QuantizedArray,
    group_sizes,
    *,
    num_experts: int,
    out_dtype,
    specs,
    out_spec=None,
    reduce_dtype="float32",
):
    """drhs[e] = sum of lhs[p, r]^T dy[p, r] over the expert's rows; blocks along the rows of a participant.

    Experts without rows have a gradient of exact zeros. Devices add their parts in `reduce_dtype`. Otherwise as
    `quantized_grouped_gemm`.
    """
    check_pair("grouped_gemm's weight gradient", (lhs, 1), (dy, 1), multiple=False)
    check_tensor_scales(lhs, dy, group_sizes)
    options = dict(num_experts=num_experts, reduce_dtype=reduce_dtype)
    return _call(_wgrad_op, lhs, dy, group_sizes, out_dtype, specs, out_spec, **options)


def _call(op, a, b, group_sizes, out_dtype, specs, out_spec, **options):
    # Groups have one size for both operands, which the op takes once.
    a, b = (dataclasses.replace(q, group_sizes=None) for q in (a, b))
    return op(
        a,
        b,
        group_sizes,
        out_dtype=check_out_dtype("grouped_gemm", out_dtype),
        operand_specs=(*specs, None),
        result_specs=(out_spec,),
        **options,
    )


def check_tensor_scales(a: QuantizedArray, b: QuantizedArray, group_sizes) -> None:
    """Raises ValueError unless a scale of rows is [P, G], and of weights [E]."""
    for q in (a, b):
        scale = q.scale if not q.block else q.tensor_scale
        weights = q.group_sizes is None
        want = q.shape[:1] if weights else group_sizes.shape
        if scale is not None and scale.shape != want:
            raise ValueError(
                f"grouped_gemm: there must be one scale per {'expert' if weights else 'group'}, {want}; got scale "
                f"{scale.shape} of data {q.shape}; make it with expertmesh.core."
                f"{'quantize(..., batch_dims=1)' if weights else 'grouped_quantize'}"
            )
