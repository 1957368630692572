"""Grouped GEMMs of rows that are read where their tokens are, for NVIDIA GPUs from compute capability 8.0.

As `grouped_gemm.py`, whose dimension key this is; T tokens.
"""

from math import prod

from expertmesh.core.kernels import grouped_gemm
from expertmesh.core.kernels.choice import grouped_gemm as choice
from expertmesh.core.kernels.choice import thin_gemm
from expertmesh.core.kernels.cuda import grouped_gemm as cuda
from expertmesh.core.kernels.device import current_device, for_device
from expertmesh.core.kernels.low_rank import LowRank, of_operands
from expertmesh.core.kernels.triton import gathered_gemm as triton
from expertmesh.core.ops.row_map import move_rows
from expertmesh.core.quantization.quantize_rows import Moved


def rows(lhs: Moved, rhs, group_sizes, *low_rank, out_dtype, clear_padding=False):
    """The forward: [1, T, K] at [1, C] x [G, K, *N] -> [1, C, *N]; `low_rank`: as of `grouped_gemm.py`."""
    K, N = rhs.shape[1], prod(rhs.shape[2:])
    options = dict(out_dtype=out_dtype, transposed=False, clear_padding=clear_padding)
    options |= dict(low_rank=of_operands(low_rank, transposed=False))
    out = _multiply_rows(lhs, rhs.reshape(-1, K, N), group_sizes[0], **options)
    return out.reshape(1, -1, *rhs.shape[2:])


def rows_dgrad(dy: Moved, rhs, group_sizes, *low_rank, out_dtype, clear_padding=False):
    """The input gradient: [1, T, *N] at [1, C] x [G, K, *N] -> [1, C, K]; `low_rank`: as of `grouped_gemm.py`."""
    N = prod(rhs.shape[2:])
    options = dict(out_dtype=out_dtype, transposed=True, clear_padding=clear_padding)
    options |= dict(low_rank=of_operands(low_rank, transposed=True))
    return _multiply_rows(dy, rhs.reshape(*rhs.shape[:2], N), group_sizes[0], **options)[None]


@for_device
def weights(lhs, dy, group_sizes, *, num_experts, out_dtype, device):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N], rows of one operand, or of both, being `Moved`.

    Only Hopper's kernel reads the rows of one where they are. Else, and of both those of dy, they are written first.
    """
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    gemm = choice.Weights(C, (K, N), num_experts, out_dtype, device)
    config = choice.choose_weights(gemm, gathers=True)
    if config.kernel != "cuda":
        options = dict(num_experts=num_experts, out_dtype=out_dtype)
        return grouped_gemm.weights(_written(lhs), _written(dy), group_sizes, **options)
    if isinstance(lhs, Moved):
        dy = _written(dy)
    gathers, moved = ("lhs", lhs) if isinstance(lhs, Moved) else ("dy", dy)
    a, b = (x.base if x is moved else x for x in (lhs, dy))
    options = dict(config=config, out_dtype=out_dtype, index=moved.index[0], gathers=gathers)
    out = cuda.launch_weights(a[0], b.reshape(b.shape[1], N), group_sizes[0], **options)
    return out.reshape(-1, K, *dy.shape[2:])


def _written(x):
    """Rows as an array."""
    return move_rows(x.base, x.row_map) if isinstance(x, Moved) else x


def _multiply_rows(
    x: Moved, rhs, group_sizes, *,
    out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None,
):  # fmt: skip
    """[T, D] at [C] x [G, D, W], or [G, W, D] if `transposed`, -> [C, W]; to which `low_rank` is added."""
    index = x.row_map.source_row[0]
    tokens = x.base.reshape(x.base.shape[1], -1)
    D, W = tokens.shape[1], rhs.shape[1 if transposed else 2]
    options = dict(out_dtype=out_dtype, transposed=transposed, clear_padding=clear_padding)
    thin = thin_gemm.choose_gathered(W)
    if thin and low_rank is None:
        return triton.launch_thin_rows(tokens, index, rhs, group_sizes, tiles=thin, **options)
    gemm = choice.Rows(
        index.shape[0], D, W, group_sizes.shape[0], tokens.dtype, out_dtype, current_device()
    )
    options |= dict(low_rank=low_rank)
    config = choice.choose_gathered(gemm)
    return triton.launch_rows(tokens, index, rhs, group_sizes, config=config, **options)
