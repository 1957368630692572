"""Grouped GEMM for NVIDIA GPUs from compute capability 8.0. Dimension key as in `linear/grouped_gemm.py`."""

from math import prod

from expertmesh.core.kernels.choice import grouped_gemm as choice
from expertmesh.core.kernels.cuda import grouped_gemm as cuda
from expertmesh.core.kernels.device import for_device
from expertmesh.core.kernels.low_rank import LowRank, of_operands
from expertmesh.core.kernels.triton import grouped_gemm as triton

ROOMS = {"triton": triton, "cuda": cuda}


def rows(lhs, rhs, group_sizes, *low_rank, out_dtype, clear_padding=False):
    """The forward: [1, C, K] x [G, K, *N] -> [1, C, *N]; `low_rank`: [1, C, R] and [G, R, *N], or nothing."""
    K, N = lhs.shape[2], prod(rhs.shape[2:])
    options = dict(out_dtype=out_dtype, transposed=False, clear_padding=clear_padding)
    options |= dict(low_rank=of_operands(low_rank, transposed=False))
    out = multiply_rows(lhs[0], rhs.reshape(-1, K, N), group_sizes[0], **options)
    return out.reshape(1, lhs.shape[1], *rhs.shape[2:])


def rows_dgrad(dy, rhs, group_sizes, *low_rank, out_dtype, clear_padding=False):
    """The input gradient: [1, C, *N] x [G, K, *N] -> [1, C, K]; `low_rank`: [1, C, R] and [G, K, R], or nothing."""
    C, N = dy.shape[1], prod(dy.shape[2:])
    options = dict(out_dtype=out_dtype, transposed=True, clear_padding=clear_padding)
    options |= dict(low_rank=of_operands(low_rank, transposed=True))
    return multiply_rows(
        dy.reshape(C, N), rhs.reshape(*rhs.shape[:2], N), group_sizes[0], **options
    )[None]


@for_device
def weights(lhs, dy, group_sizes, *, num_experts, out_dtype, device):
    """The weight gradient: [1, C, K] x [1, C, *N] -> [G, K, *N]."""
    (_, C, K), N = lhs.shape, prod(dy.shape[2:])
    config = choice.choose_weights(choice.Weights(C, (K, N), num_experts, out_dtype, device))
    launch = ROOMS[config.kernel].launch_weights
    out = launch(lhs[0], dy.reshape(C, N), group_sizes[0], config=config, out_dtype=out_dtype)
    return out.reshape(-1, K, *dy.shape[2:])


@for_device
def multiply_rows(
    lhs, rhs, group_sizes, *,
    out_dtype, transposed: bool, clear_padding: bool, low_rank: LowRank | None = None, device,
):  # fmt: skip
    """[C, D] x [G, D, W], or [G, W, D] if `transposed`, -> [C, W]; to which `low_rank`, in their dtype, is added."""
    (C, D), W, G = lhs.shape, rhs.shape[1 if transposed else 2], group_sizes.shape[0]
    gemm = choice.Rows(C, D, W, G, lhs.dtype, out_dtype, device)
    config = choice.choose_rows(gemm)
    options = dict(out_dtype=out_dtype, transposed=transposed, clear_padding=clear_padding)
    options |= dict(low_rank=low_rank)
    return ROOMS[config.kernel].launch_rows(lhs, rhs, group_sizes, config=config, **options)
