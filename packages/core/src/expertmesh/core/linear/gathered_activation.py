"""GEMMs of rows with a gated activation behind them, as one op each.

The up projection of rows that are read where their tokens are, and their activation:

    h[p, r] = lhs[p, source[p, r]] @ rhs[expert of row r]        0 where there is no such token
    a[p, r] = weights[p, r] * act(h[p, r])                       likewise

as `grouped_gemm_op` of rows that are `Moved` and `activate_rows_op` have them, h being rounded before it is activated.
And the input gradient of the down projection, with the gradient of the activation before it:

    d_a[p, r] = dy[p, r] @ rhs[expert of row r]^T

and then `activate_rows_grad_op`, d_a being rounded before it, of rows that are `Moved` or not. Hopper has a kernel for
each: the first stores h and never reads it, the second stores no d_a. Elsewhere the kernels of both ops run one after
the other. K is whole. The first is for tokens that are all on one device: axes split participants and F. They split
the experts of the second as those of a grouped GEMM.

Dimension key: P participants, C rows per participant, T tokens, K contraction, F expert width, E experts, G groups per
participant. Padding rows are undefined (`ops/groups.py`).
"""

from functools import partial
from typing import Any

import jax

from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    plain_rows_unsupported,
)
from expertmesh.core.linear.grouped_plan import plan_grouped
from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.activate_rows import (
    activate_rows_grad_reference,
    activate_rows_reference,
)
from expertmesh.core.ops.activation import Activation, unsupported
from expertmesh.core.quantization.quantize_rows import Moved

__all__ = [
    "dgrad_activation_grad_op",
    "gathered_activation",
    "gathered_activation_op",
    "gathered_activation_value_op",
]


def gathered_activation(
    lhs: Moved,
    rhs: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array,
    *,
    activation: Activation,
    keeps_h: bool,
) -> tuple[jax.Array | None, jax.Array]:
    """(h, a), or (None, a) where h is not kept.

    Args:
      lhs: tokens [P, T, K] as the rows [P, C, K] of their map.
      rhs: [E, K, 2, F] (0 gate, 1 up) in the dtype of `lhs`.
      group_sizes: int32[P, G].
      weights: float32[P, C], each row's routing weight.
      activation: with a gate.

    Has no derivative: it is a part of rules that have.
    """
    op = gathered_activation_op if keeps_h else gathered_activation_value_op
    made = op(lhs, rhs, group_sizes, weights, activation=activation)
    return made if keeps_h else (None, made)


def _reference(
    lhs: Moved,
    rhs: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array,
    *,
    activation: Activation,
    keeps_h: bool,
) -> Any:
    """(h [P, C, 2, F], a [P, C, F]), or a alone, in the dtype of `lhs`."""
    h = grouped_gemm_op.reference(lhs, rhs, group_sizes, out_dtype=lhs.dtype)
    source = lhs.row_map.source_row
    a = activate_rows_reference(h, weights, source, group_sizes, activation=activation)
    return (h, a) if keeps_h else a


def _unsupported(
    lhs: Moved,
    rhs: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array,
    *,
    activation: Activation,
) -> str | None:
    h: Any = jax.ShapeDtypeStruct((*weights.shape, *rhs.shape[2:]), lhs.dtype)
    return plain_rows_unsupported(lhs.base, rhs, group_sizes) or unsupported(
        h, activation=activation
    )


def _op(name: str, results: str, roles: str, *, keeps_h: bool) -> Op:
    kernel = Kernel.triton("expertmesh.core.kernels.gathered_activation", name, _unsupported)
    return Op(
        name,
        partial(_reference, keeps_h=keeps_h),
        f"p c k, e k two... f, p g, p c -> {results}",
        whole=("c", "e", "k", "two...", "g"),
        roles=f"participants . ., experts fsdp . tp, participants ., participants . -> {roles}",
        parameter=1,
        kernels=(kernel,),
    )


gathered_activation_op = _op(
    "gathered_activation",
    "p c two... f, p c f",
    "participants . . tp, participants . tp",
    keeps_h=True,
)
gathered_activation_value_op = _op(
    "gathered_activation_value", "p c f", "participants . tp", keeps_h=False
)


def _grad_reference(
    dy: Any,
    rhs: jax.Array,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d_h like h, float32 d_weights [P, C], and the activation again, [P, C, F], of rhs [E, F, K]."""
    d_a = grouped_gemm_dgrad_op.reference(dy, rhs, group_sizes, out_dtype=h.dtype)
    operands = h, d_a, weights, source, group_sizes
    return activate_rows_grad_reference(*operands, activation=activation)


def _grad_unsupported(
    dy: Any,
    rhs: jax.Array,
    h: jax.Array,
    weights: jax.Array,
    source: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation,
) -> str | None:
    del weights
    if not source.size:
        return "there must be rows"
    rows = dy.base if isinstance(dy, Moved) else dy
    return plain_rows_unsupported(rows, rhs, group_sizes) or unsupported(h, activation=activation)


dgrad_activation_grad_op = Op(
    "dgrad_activation_grad",
    _grad_reference,
    "p c k, e f k, p c two... f, p c, p c, p g -> p c two... f, p c, p c f",
    whole=("c", "e", "k", "two...", "g"),
    summed=("f",),
    roles="participants . ., experts tp fsdp, participants . . tp, participants ., participants ., participants . "
    "-> participants . . tp, participants ., participants . tp",
    parameter=1,
    plan=partial(plan_grouped, features=("f",)),
    kernels=(
        Kernel.triton(
            "expertmesh.core.kernels.gathered_activation",
            "dgrad_activation_grad",
            _grad_unsupported,
        ),
    ),
)
