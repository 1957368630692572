"""What the ops of `grouped_gemm.py` compute, in JAX: on CPU, and what kernels are checked against.

Rows are multiplied a block at a time, so that the weights of all rows are nowhere side by side. Dimension key as in
`grouped_gemm.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from expertmesh.core import _jax
from expertmesh.core.linear.pair import dequantized, precision_of
from expertmesh.core.ops.groups import (
    cleared,
    expand_trailing,
    group_of,
    of_rows,
    row_groups,
    selected,
)
from expertmesh.core.quantization.quantize import dequantize_values
from expertmesh.core.quantization.quantize_rows import written
from expertmesh.core.quantization.quantized import QuantizedArray

__all__ = [
    "add_bias_reference",
    "bias_grad_reference",
    "bias_weights_grad_reference",
    "cotangents_reference",
    "rows_reference",
    "wgrad_reference",
]

_MAX_BLOCK = 128


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per step of the reference: near the mean group, so that few rows of a step belong to no group."""
    if export.is_symbolic_dim(num_rows):
        return _MAX_BLOCK
    mean = max(num_rows // max(num_groups, 1), 8)
    return min(1 << (mean - 1).bit_length(), _MAX_BLOCK)


def _blocks(
    group_sizes_G: jax.Array, block: int
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """Number of steps, and a function from a step to (group, first row, rows that belong to the group)."""
    ends_G = jnp.cumsum(group_sizes_G)
    # XLA fails to compile a loop for GPUs whose number of steps is a constant that it has to find.
    group_sizes_G = jax.lax.optimization_barrier(group_sizes_G)
    steps_G = (group_sizes_G + block - 1) // block
    last_step_G = jnp.cumsum(steps_G)
    return last_step_G[-1], partial(_locate, group_sizes_G, ends_G, steps_G, last_step_G, block)


@partial(jax.jit, static_argnums=4)
def _locate(
    group_sizes_G: jax.Array,
    ends_G: jax.Array,
    steps_G: jax.Array,
    last_step_G: jax.Array,
    block: int,
    step: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, first row, rows that belong to the group) of a step."""
    group = group_of(last_step_G, step)
    first = (
        ends_G[group] - group_sizes_G[group] + (step - last_step_G[group] + steps_G[group]) * block
    )
    return group, first, ends_G[group] - first


def _rows_reader(x: Any, step: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function from a step's first row and group to its rows of one participant, [step, flattened D].

    The last step may read beyond the end; rows [C, *D] that are quantized are dequantized, their blocks being those of
    [P, C, *D].
    """
    quantized = isinstance(x, QuantizedArray)
    data = x.data if quantized else x
    data = jnp.pad(data, ((0, step), *[(0, 0)] * (data.ndim - 1)))

    def read(first: jax.Array, group: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(data, first, step)
        return _flattened(_dequantized_rows(x, rows, first, group) if quantized else rows, 1)

    return read


def _dequantized_rows(
    q: QuantizedArray, data: jax.Array, first: jax.Array, group: jax.Array
) -> jax.Array:
    """`data`, rows of `q` from `first` on."""
    if not q.block:
        values: jax.Array = dequantize_values(data, q.scale[group])
        return values
    # A step may end within a block, and read beyond the last one.
    blocks = (first + jnp.arange(data.shape[0])) // q.block[1]
    scale = jnp.take(q.scale, blocks, axis=0, mode="clip")
    per_group = None if q.tensor_scale is None else q.tensor_scale[group]
    values = dequantize_values(data, scale, per_group, block=(1, *q.block[2:]))
    return values


def _weight_of(w: Any, group: jax.Array) -> jax.Array:
    """One expert's weight of [G, K, *N], [K, flattened N]."""
    one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False), w)
    if isinstance(one, QuantizedArray):
        one = dequantized(dataclasses.replace(one, block=one.block[1:]))
    return _flattened(one, 1)


def _multiply_rows(
    lhs: Any,
    rhs: Any,
    group_sizes_G: jax.Array,
    low_rank: Sequence[jax.Array],
    shape: tuple[int, int],
    *,
    contract_rhs: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """One participant. A step's rows beyond its group are overwritten by the next step; the last ones are padding.

    Args:
      lhs: [C, *D].
      rhs: [G, K, *N].
      low_rank: as of `rows_reference`, u [C, R].
      shape: (C, N) of the result.
    """
    C, N = shape
    block = _block_rows(C, group_sizes_G.shape[0])
    pairs = [(lhs, rhs), *([low_rank] if low_rank else [])]
    factors = [
        (_rows_reader(rows, block), weight, precision_of(rows, weight)) for rows, weight in pairs
    ]
    num_steps, locate = _blocks(group_sizes_G, block)
    dims = (((1,), (contract_rhs - 1,)), ((), ()))

    def body(step: jax.Array, out_CN: jax.Array) -> jax.Array:
        group, first, _ = locate(step)
        products = (
            jax.lax.dot_general(
                *_of_one_dtype(rows_of(first, group), _weight_of(weight, group)),
                dims,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for rows_of, weight, precision in factors
        )
        y = functools.reduce(jnp.add, products)
        return jax.lax.dynamic_update_slice_in_dim(out_CN, y.astype(out_dtype), first, 0)

    out_CN = _vary_like(jnp.zeros((C + block, N), out_dtype), lhs, rhs)
    out: jax.Array = jax.lax.fori_loop(0, num_steps, body, out_CN)[:C]
    return out


def _of_one_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands of a GEMM; what was quantized is float32, and so is then the other."""
    return (a, b) if a.dtype == b.dtype else (a.astype(jnp.float32), b.astype(jnp.float32))


def _accumulate_weights(
    lhs: Any, dy: Any, group_sizes_G: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """One participant's weight gradients, float32[G, K, N], of [C, *K] and [C, *N]; `shape`: (K, N)."""
    G = group_sizes_G.shape[0]
    block = _block_rows(lhs.shape[0], G)
    readers = _rows_reader(lhs, block), _rows_reader(dy, block)
    precision = precision_of(lhs, dy)
    num_steps, locate = _blocks(group_sizes_G, block)

    def body(step: jax.Array, dw_GKN: jax.Array) -> jax.Array:
        group, first, count = locate(step)
        live = jnp.arange(block) < count
        rows = (selected(live, rows_of(first, group)) for rows_of in readers)
        dims = (((0,), (0,)), ((), ()))
        dw_KN = jax.lax.dot_general(
            *_of_one_dtype(*rows),
            dims,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        old_KN = jax.lax.dynamic_index_in_dim(dw_GKN, group, keepdims=False)
        out: jax.Array = jax.lax.dynamic_update_index_in_dim(dw_GKN, old_KN + dw_KN, group, 0)
        return out

    dw_GKN = _vary_like(jnp.zeros((G, *shape), jnp.float32), lhs, dy)
    out: jax.Array = jax.lax.fori_loop(0, num_steps, body, dw_GKN)
    return out


def _per_participant(
    function: Callable[..., jax.Array], num_sets: int, *operands: Any
) -> jax.Array:
    """Calls `function(set, *operands[p])` for each participant p, one after the other; set = p % num_sets."""
    P = operands[0].shape[0]
    if P == 1:
        return function(0, *jax.tree.map(lambda x: x[0], operands))[None]
    out: jax.Array = jax.lax.map(
        lambda args: function(*args), (jnp.arange(P) % num_sets, *operands)
    )
    return out


def _flattened(x: jax.Array, keep: int) -> jax.Array:
    """Merges all dimensions after the first `keep`."""
    return x.reshape(*x.shape[:keep], prod(x.shape[keep:]))


def _vary_like(x: jax.Array, *operands: Any) -> jax.Array:
    """`x` over the Manual axes over which the operands vary."""
    out: jax.Array = _jax.match_varying((x, *jax.tree.leaves(operands)))[0]
    return out


def rows_reference(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    *low_rank: jax.Array,
    contract_rhs: int,
    out_dtype: DTypeLike,
    clear_padding: bool = False,
) -> jax.Array:
    """Of the forward (contract_rhs = 1), or of the input gradient (2).

    Args:
      low_rank: u [P, C, R], and [E, R, *N] (1) or [E, K, R] (2); or nothing.
    """
    lhs = written(lhs)
    (P, C), (E, K, *N), G = lhs.shape[:2], rhs.shape, group_sizes.shape[1]
    shape = P, C, *(N if contract_rhs == 1 else (K,))
    if 0 in (*lhs.shape, *rhs.shape):  # XLA:CPU crashes on loops over empty buffers
        return _vary_like(jnp.zeros(shape, out_dtype), lhs, rhs, group_sizes)
    num_sets = E // G
    u, b = low_rank[:1], low_rank[1:]
    sets = jax.tree.map(lambda x: x.reshape(num_sets, G, *x.shape[1:]), (rhs, b))
    multiply = partial(_multiply_rows, contract_rhs=contract_rhs, out_dtype=out_dtype)

    def one(r: int | jax.Array, lhs_C: Any, group_sizes_G: jax.Array, *u_C: jax.Array) -> jax.Array:
        rhs_r, b_r = jax.tree.map(lambda x: x[0] if num_sets == 1 else x[r], sets)
        return multiply(lhs_C, rhs_r, group_sizes_G, (*u_C, *b_r), (C, prod(shape[2:])))

    out = _per_participant(one, num_sets, lhs, group_sizes, *u).reshape(shape)
    return cleared(out, group_sizes) if clear_padding else out


def wgrad_reference(
    lhs: Any, dy: Any, group_sizes: jax.Array, *, num_experts: int, out_dtype: DTypeLike
) -> jax.Array:
    lhs, dy = written(lhs), written(dy)
    shape = (num_experts, lhs.shape[2], *dy.shape[2:])
    if 0 in (*lhs.shape, *dy.shape):
        return _vary_like(jnp.zeros(shape, out_dtype), lhs, dy, group_sizes)

    def one(_: Any, lhs_C: Any, dy_C: Any, group_sizes_G: jax.Array) -> jax.Array:
        return _accumulate_weights(lhs_C, dy_C, group_sizes_G, (shape[1], prod(shape[2:])))

    num_sets = num_experts // group_sizes.shape[1]
    dw_PGKN = _per_participant(one, num_sets, lhs, dy, group_sizes)
    return dw_PGKN.reshape(-1, *shape).sum(axis=0).astype(out_dtype)


def cotangents_reference(
    dy: jax.Array, b: jax.Array, group_sizes: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array]:
    v = rows_reference(dy, b, group_sizes, contract_rhs=2, out_dtype=jnp.float32)
    of_weight = dict(num_experts=b.shape[0], out_dtype=jnp.float32)
    return v, wgrad_reference(u, dy, group_sizes, **of_weight)


def add_bias_reference(
    y: jax.Array, bias: jax.Array, group_sizes: jax.Array, weights: jax.Array | None
) -> jax.Array:
    if y.size == 0:
        return y
    added = _bias_of_rows(bias, group_sizes, y)
    if weights is not None:
        added = expand_trailing(weights, y.ndim) * added
    return (y.astype(jnp.float32) + added).astype(y.dtype)


def bias_weights_grad_reference(
    dy: jax.Array, bias: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    product = dy.astype(jnp.float32) * _bias_of_rows(bias, group_sizes, dy)
    return cleared(jnp.sum(product, axis=tuple(range(2, dy.ndim))), group_sizes)


def _bias_of_rows(bias: jax.Array, group_sizes: jax.Array, y: jax.Array) -> jax.Array:
    """float32, like y: the bias of each row's expert, 0 for padding rows."""
    P, G = group_sizes.shape
    num_sets = bias.shape[0] // max(G, 1)
    bias_PGN = jnp.tile(
        bias.reshape(num_sets, G, *bias.shape[1:]), (P // num_sets, *[1] * bias.ndim)
    )
    bias_PGN = bias_PGN.reshape(P, G, *bias.shape[1:]).astype(jnp.float32)
    out: jax.Array = of_rows(bias_PGN, row_groups(group_sizes, y.shape[1]))
    return out


def bias_grad_reference(
    dy: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    *,
    num_experts: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    # The weight's gradient for an input of 1, or of the rows' weights: a scatter on a GPU adds in another order each
    # time.
    if weights is None:
        rows = jnp.ones_like(dy, shape=(*dy.shape[:2], 1))
    else:
        rows, dy = weights[..., None], dy.astype(jnp.float32)
    return wgrad_reference(
        rows, dy, group_sizes, num_experts=num_experts, out_dtype=out_dtype
    ).squeeze(1)
