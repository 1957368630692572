"""Grouped GEMM of permuted rows, without the copy that permutes them.

    out[p, r] = lhs[p, index[p, r]] @ rhs[expert of row r]        0 where there is no row index[p, r]

Dimension key: P participants, T source rows (tokens), C rows, K contraction, N output dimensions (any number), E
experts (weights), G groups per participant. Rows lie by group as in `linear/grouped_gemm.py`.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.linear.grouped_gemm import (
    check_operands,
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.mesh import cast_sharded
from expertmesh.core.operands import FLOATS, check_arrays, check_out_dtype
from expertmesh.core.ops.permute import PermutePlan
from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.vjp import at_rest, differentiable

__all__ = ["gathered_gemm"]


def gathered_gemm(
    x: jax.Array, rhs: jax.Array, plan: PermutePlan, *, w_spec: PartitionSpec | None = None
) -> jax.Array:
    """`grouped_gemm(permute(x, plan), rhs, plan.group_sizes)`, without writing the permuted rows if a kernel can.

    Args:
      x: float[P, T, K], or [T, K] for a plan without P.
      rhs: float[E, K, *N]; cast to the dtype of `x`, its gradient is accumulated and returned in its own.
      plan: of `plan_permute`, with the same P and T.
      w_spec: where `rhs` is, for Auto axes under a MeshResource; None: P(ep, fsdp).

    Returns:
      [P, C, *N] (or [C, *N]) in the dtype of `x`, accumulated in float32 and rounded once. Padding rows and rows
      without a token are zeros.

    Raises:
      ValueError: `x`, `rhs` and `plan` do not fit.

    Differentiable in `x` and `rhs`. Kept for the backward: `x`. Sharded as `grouped_gemm`, with the tokens of a
    participant held whole. On a GPU the forward reads each row where it is, once for each tile of 256 columns. On
    Hopper the weight's gradient does so too; other GPUs permute first, as the reference always does.
    """
    check_arrays("gathered_gemm", FLOATS, x=x, rhs=rhs)
    flat = x.ndim == 2
    if x.shape[:-1] != plan.row.shape[:-1]:
        raise ValueError(
            "gathered_gemm: x must have the tokens of its plan; "
            f"got x {x.shape}, plan.row {plan.row.shape}; use the plan that was made for it"
        )
    check_operands("gathered_gemm", x, rhs, plan.group_sizes, None)
    check_out_dtype("gathered_gemm", x.dtype)
    operands = [x, plan.row, plan.source, plan.group_sizes]
    if flat:
        operands = [a[None] for a in operands]
    out = _gathered_gemm(*operands, rhs, rhs_dtype=rhs.dtype, w_spec=w_spec)
    return out[0] if flat else out


def _fwd(
    x: jax.Array,
    row: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    rhs: jax.Array,
    *,
    rhs_dtype: DTypeLike,
    w_spec: PartitionSpec | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    del rhs_dtype
    rhs = cast_sharded(rhs, x.dtype, w_spec, ("experts", "fsdp"))
    rows = Moved(x, RowMap(row, source))
    options = dict(out_dtype=x.dtype, operand_specs=(None, w_spec, None))
    out = grouped_gemm_op(rows, rhs, group_sizes, clear_padding=True, **options)
    return out, (rows, rhs, group_sizes)


def _bwd(
    residuals: Any, d_out: jax.Array, *, rhs_dtype: DTypeLike, w_spec: PartitionSpec | None
) -> tuple[jax.Array | None, ...]:
    rows, rhs, group_sizes = residuals
    options = dict(out_dtype=rows.dtype, operand_specs=(None, w_spec, None))
    d_rows = grouped_gemm_dgrad_op(d_out, rhs, group_sizes, **options)
    d_rhs = grouped_gemm_wgrad_op(
        rows,
        d_out,
        group_sizes,
        num_experts=rhs.shape[0],
        out_dtype=rhs_dtype,
        result_specs=(at_rest(rhs, w_spec),),
    )
    return move_rows(d_rows, rows.row_map.inverse), None, None, None, d_rhs


_gathered_gemm = differentiable(_fwd, _bwd)
