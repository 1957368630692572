"""GEMMs of rows with a gated activation, or its gradient, behind them, for NVIDIA GPUs from 8.0.

Dimension key as in `linear/gathered_activation.py`.
"""

from typing import Any

from expertmesh.core.kernels import gathered_gemm, grouped_gemm
from expertmesh.core.kernels.choice import gathered_activation as choice
from expertmesh.core.kernels.cuda import gathered_activation as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.triton import activate_rows
from expertmesh.core.ops.groups import selected
from expertmesh.core.ops.row_map import holds_token
from expertmesh.core.quantization.quantize_rows import Moved, index_of, tokens_of


def gathered_activation(lhs: Moved, rhs, group_sizes, weights, *, activation):
    """[1, T, K] at [1, C] x [G, K, 2, F], times [1, C] -> [1, C, 2, F] and [1, C, F]."""
    return _run(lhs, rhs, group_sizes, weights, activation=activation, keeps_h=True)


def gathered_activation_value(lhs: Moved, rhs, group_sizes, weights, *, activation):
    """The second result of `gathered_activation`."""
    return _run(lhs, rhs, group_sizes, weights, activation=activation, keeps_h=False)


@for_device
def _run(lhs: Moved, rhs, group_sizes, weights, *, activation, keeps_h: bool, device):
    source = lhs.row_map.source_row
    tokens = lhs.base.reshape(lhs.base.shape[1], -1)
    (T, K), (G, _, _, F) = tokens.shape, rhs.shape
    projection = choice.Projection(
        rows=source.shape[1], tokens=T, contraction=K, width=F, groups=G, dtype=lhs.dtype,
        function=activation.function, device=device,
    )  # fmt: skip
    config = choice.choose(projection)
    if config is None:
        h = gathered_gemm.rows(lhs, rhs, group_sizes, out_dtype=lhs.dtype)
        a = activate_rows.value(h, weights, source, group_sizes, activation=activation)
        return (h, a) if keeps_h else a
    operands = tokens, source[0], rhs, weights[0], group_sizes[0]
    out = cuda.launch(*operands, config=config, activation=activation, keeps_h=keeps_h)
    return (out[0][None], out[1][None]) if keeps_h else out[None]


@for_device
def dgrad_activation_grad(dy, rhs, h, weights, source, group_sizes, *, activation, device):
    """[1, C, D], or [1, T, D] at [1, C], x [G, F, D]; [1, C, 2, F], [1, C] -> [1, C, 2, F], [1, C], [1, C, F]."""
    gathers = isinstance(dy, Moved)
    # `source` has places of tokens, of which there are several; of rows side by side it says which hold one.
    rows, index = tokens_of(dy), index_of(dy, source)
    (P, C), (G, F, D) = source.shape, rhs.shape
    projection = choice.Projection(
        rows=C, tokens=rows.shape[1], contraction=D, width=F, groups=G, dtype=h.dtype,
        function=activation.function, device=device,
    )  # fmt: skip
    config = choice.choose_grad(projection)
    if config is None or P > 1:
        of: Any = gathered_gemm if gathers else grouped_gemm
        d_out = of.rows_dgrad(dy, rhs, group_sizes, out_dtype=h.dtype)
        return activate_rows.grad(h, d_out, weights, source, group_sizes, activation=activation)
    operands = rows[0], index[0], rhs, h[0], weights[0], group_sizes[0]
    options = dict(config=config, activation=activation, gathers=gathers)
    d_h, a, dots = cuda.launch_grad(*operands, **options)
    return d_h[None], selected(holds_token(source), dots.sum(0)[None]), a[None]
