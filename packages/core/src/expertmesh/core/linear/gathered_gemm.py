"""Grouped GEMM of permuted rows, without the copy that permutes them.

    out[p, r] = lhs[p, index[p, r]] @ rhs[expert of row r]        0 where there is no row index[p, r]

Dimension key: P participants, T source rows (tokens), C rows, K contraction, N output dimensions (any number), E
experts (weights), G groups per participant. Rows lie by group as in `linear/grouped_gemm.py`.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from expertmesh.core.linear.grouped_gemm import apply_grouped, check_operands
from expertmesh.core.operands import ANY_FLOATS, check_arrays, check_type
from expertmesh.core.ops.permute import PermutePlan
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved

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
    check_type("gathered_gemm", PermutePlan, "pass what plan_permute made", plan=plan)
    check_arrays("gathered_gemm", ANY_FLOATS, x=x, rhs=rhs)
    flat = x.ndim == 2
    if x.shape[:-1] != plan.row.shape[:-1]:
        raise ValueError(
            "gathered_gemm: x must have the tokens of its plan; "
            f"got x {x.shape}, plan.row {plan.row.shape}; use the plan that was made for it"
        )
    check_operands("gathered_gemm", x, rhs, plan.group_sizes, None)
    operands = [x, plan.row, plan.source, plan.group_sizes]
    if flat:
        operands = [a[None] for a in operands]
    x, row, source, sizes = operands
    options: dict[str, Any] = dict(
        specs=(None, w_spec, None), reduce_dtype="float32", clear_padding=True
    )
    rows = Moved(x, RowMap(row, source))
    out: jax.Array = apply_grouped("gathered_gemm", rows, rhs, sizes, None, **options)
    return out[0] if flat else out
