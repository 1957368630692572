"""The cotangents of an adapter's inner rows and of its second weight, for NVIDIA GPUs from compute capability 8.0.

Dimension key as in `linear/grouped_gemm.py`; T the adapter's rank.
"""

from math import prod

import jax.numpy as jnp

from expertmesh.core.kernels import grouped_gemm
from expertmesh.core.kernels.choice import thin_gemm as choice
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.triton import grouped_cotangents as triton


def cotangents(dy, b, group_sizes, u):
    """[1, C, *N], [E, T, *N], [1, C, T] -> float32 [1, C, T] and [E, T, *N]."""
    (E, T), N = b.shape[:2], prod(b.shape[2:])
    slabs = choice.choose_both(T, current_device())
    if slabs is None:
        options = dict(out_dtype=jnp.float32)
        v = grouped_gemm.rows_dgrad(dy, b, group_sizes, **options)
        return v, grouped_gemm.weights(u, dy, group_sizes, num_experts=E, **options)
    operands = dy.reshape(-1, N), b.reshape(E, T, N), u[0], group_sizes[0]
    v, d_b = triton.launch(*operands, slabs=slabs)
    return v[None], d_b.reshape(b.shape)
