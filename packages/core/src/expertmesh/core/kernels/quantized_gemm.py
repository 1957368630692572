"""GEMMs of 8-bit operands for NVIDIA GPUs: grouped GEMMs of one group, which holds all tokens.

Dimension key as in `ops/quantized_gemm.py`; T: all tokens.
"""

from math import prod

import jax.numpy as jnp

from expertmesh.core.kernels import quantized_grouped_gemm as grouped


def fprop(x, x_scale, w, w_scale, *, blocks, out_dtype):
    """[*t, K] x [K, *N] -> [*t, *N]."""
    *tokens, _ = x.shape
    operands = *_rows(x, x_scale, 1), *_one_expert(w, w_scale), _group(tokens)
    blocks = _of_rows(blocks[0], 1), _of_expert(blocks[1])
    out = grouped.rows(*operands, blocks=blocks, out_dtype=out_dtype)
    return out.reshape(*tokens, *w.shape[1:])


def dgrad(dy, dy_scale, w, w_scale, *, blocks, out_dtype):
    """[*t, *N] x [K, *N] -> [*t, K]."""
    n = w.ndim - 1
    tokens = dy.shape[: dy.ndim - n]
    operands = *_rows(dy, dy_scale, n), *_one_expert(w, w_scale), _group(tokens)
    blocks = _of_rows(blocks[0], n), _of_expert(blocks[1])
    out = grouped.rows_dgrad(*operands, blocks=blocks, out_dtype=out_dtype)
    return out.reshape(*tokens, w.shape[0])


def wgrad(x, x_scale, dy, dy_scale, *, blocks, out_dtype):
    """[*t, K] x [*t, *N] -> [K, *N]."""
    *tokens, _ = x.shape
    n = dy.ndim - len(tokens)
    operands = *_rows(x, x_scale, 1), *_rows(dy, dy_scale, n), _group(tokens)
    blocks = _of_rows(blocks[0], 1), _of_rows(blocks[1], n)
    return grouped.weights(*operands, num_experts=1, blocks=blocks, out_dtype=out_dtype)[0]


def _rows(data, scale, width_dims: int):
    """[*t, *W] -> [1, T, *W], and its scales likewise, or [1, 1]."""
    return _flat(data, width_dims), _flat(scale, width_dims) if scale.ndim else scale[None, None]


def _flat(x, width_dims: int):
    split = x.ndim - width_dims
    return x.reshape(1, prod(x.shape[:split]), *x.shape[split:])


def _one_expert(data, scale):
    return data[None], scale[None]


def _group(tokens):
    # Not an array of NumPy: a constant would be an error in a partitioned op.
    return jnp.full((1, 1), prod(tokens), jnp.int32)


def _of_rows(block, width_dims: int):
    """Blocks lie along one of the widths, or along the last dimension of tokens."""
    return block and (1, *(1, *block)[-1 - width_dims :])


def _of_expert(block):
    return block and (1, *block)
