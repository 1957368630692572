"""Causal attention of each sequence by `jax.nn.dot_product_attention`, and the choice of its implementation.

JAX by itself takes XLA everywhere, so this module names cuDNN's flash attention if JAX accepts the call; JAX raises
while tracing if it does not. Each device attends to its own sequences, inside a `shard_map`: the type of cuDNN's call
has no sharding, so over Explicit axes its result would be gathered.

Dimension key: B sequences, S positions, H heads, d head width.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax

from expertmesh.core.support import platform_of
from expertmesh.train.mesh import on_shards

Implementation = Literal["cudnn", "xla"]


def attend(
    q_BSHd: jax.Array, k_BSHd: jax.Array, v_BSHd: jax.Array, scale: float, *, number: int = 0
) -> jax.Array:
    """softmax(scale q k^T) v over each position and those before it; [B, S, H, d]. Softmax is float32.

    `number`: of the call among those of equal types in a program. XLA of jax 0.11.2 loses the second of two equal
    gradients of cuDNN where it excludes nondeterministic ops (openxla/xla#46500), and fails when it runs. So that no
    two are equal, each call's scale is another double, and all are the same in float32, which cuDNN reads.
    """
    chosen = implementation(platform_of(q_BSHd), q_BSHd.dtype, q_BSHd.shape[3])
    scale = math.nextafter(scale, math.inf, steps=number)
    attention = functools.partial(
        jax.nn.dot_product_attention, scale=scale, is_causal=True, implementation=chosen
    )
    return on_shards(attention, q_BSHd, k_BSHd, v_BSHd)


def implementation(platform: str, dtype: Any, head_dim: int) -> Implementation:
    """cuDNN's flash attention on NVIDIA GPUs, where it has heads of that dtype and width; else XLA's GEMMs."""
    return "cudnn" if platform == "cuda" and cudnn_unsupported(dtype, head_dim) is None else "xla"


def cudnn_unsupported(dtype: Any, head_dim: int) -> str | None:
    """Why JAX does not hand such heads to cuDNN; None where it does.

    It needs 16 bits, a width that is a multiple of 8 and at most 128 (256 on this process' own Hopper), and cuDNN.
    """
    head = jax.ShapeDtypeStruct((1, 8, 1, head_dim), dtype)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    try:
        jax.eval_shape(attention, head, head, head)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None
