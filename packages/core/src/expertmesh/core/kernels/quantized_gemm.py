"""GEMMs of quantized operands for NVIDIA GPUs: grouped GEMMs of one group, which holds all tokens.

Dimension key as in `linear/gemm.py`; T: all tokens.
"""

import dataclasses
from math import prod

import jax.numpy as jnp

from expertmesh.core.kernels import quantized_grouped_gemm as grouped


def fprop(x, w, *, out_dtype):
    """[*t, K] x [K, *N] -> [*t, *N]."""
    *tokens, _ = x.shape
    out = grouped.rows(_rows(x, 1), _one_expert(w), _group(tokens), out_dtype=out_dtype)
    return out.reshape(*tokens, *w.shape[1:])


def dgrad(dy, w, *, out_dtype):
    """[*t, *N] x [K, *N] -> [*t, K]."""
    n = w.ndim - 1
    tokens = dy.shape[: dy.ndim - n]
    operands = _rows(dy, n), _one_expert(w), _group(tokens)
    return grouped.rows_dgrad(*operands, out_dtype=out_dtype).reshape(*tokens, w.shape[0])


def wgrad(x, dy, *, out_dtype):
    """[*t, K] x [*t, *N] -> [K, *N]."""
    *tokens, _ = x.shape
    operands = _rows(x, 1), _rows(dy, dy.ndim - len(tokens)), _group(tokens)
    return grouped.weights(*operands, num_experts=1, out_dtype=out_dtype)[0]


def _rows(q, width_dims: int):
    """[*t, *W] -> [1, T, *W], and its scales likewise, or [1, 1]; blocks lie along one of the widths, or along the last
    dimension of tokens."""
    scale = _flat(q.scale, width_dims) if q.scale.ndim else q.scale[None, None]
    total = None if q.tensor_scale is None else q.tensor_scale[None, None]
    block = q.block and (1, *(1, *q.block)[-1 - width_dims :])
    data = _flat(q.data, width_dims)
    return dataclasses.replace(q, data=data, scale=scale, tensor_scale=total, block=block)


def _flat(x, width_dims: int):
    split = x.ndim - width_dims
    return x.reshape(1, prod(x.shape[:split]), *x.shape[split:])


def _one_expert(q):
    block = q.block and (1, *q.block)
    parts = {
        name: None if (x := getattr(q, name)) is None else x[None]
        for name in ("data", "scale", "tensor_scale")
    }
    return dataclasses.replace(q, **parts, block=block)


def _group(tokens):
    # Not an array of NumPy: a constant would be an error in a partitioned op.
    return jnp.full((1, 1), prod(tokens), jnp.int32)
