"""Gathers by index, the one way in which rows move inside a shard.

    gather_rows:   out[p, n] = sum_k weight[p, n, k] * src[p, index[p, n, k]]
    gather_values: out[p, *n] = values[p].ravel()[index[p, *n]]

Dimension key: P token groups, S source rows, N output rows, K terms per output row, D features.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops.groups import each_participant, selected

MAX_UNROLLED = 8  # terms; a loop runs over further ones, as often as the fullest output row needs


def exists(index: jax.Array, num_src: int) -> jax.Array:
    """Whether there is such a row."""
    return (index >= 0) & (index < num_src)


@jax.jit
def select_rows(src_SD: jax.Array, index_N: jax.Array) -> jax.Array:
    """Rows of src; zeros by select where there is no such row, so that nothing of src leaks there."""
    num_src = src_SD.shape[0]
    exists_N = exists(index_N, num_src)
    if num_src == 0:  # a gather needs a row to read
        src_SD = jnp.pad(src_SD, [(0, 1)] + [(0, 0)] * (src_SD.ndim - 1))
    rows_ND = jnp.take(src_SD, index_N, axis=0, mode="clip")
    return selected(exists_N, rows_ND)


@each_participant
def _reference(src_SD: jax.Array, index_NK: jax.Array, weight_NK: jax.Array | None) -> jax.Array:
    if index_NK.shape[1] == 1 and weight_NK is None:  # a copy, for every dtype
        out: jax.Array = select_rows(src_SD, index_NK[:, 0])
        return out
    return sum_rows(src_SD, index_NK, weight_NK)


def sum_rows(src_SD: jax.Array, index_NK: jax.Array, weight_NK: jax.Array | None) -> jax.Array:
    """One gather per term, so that memory is O(N * D) and not O(N * K * D)."""
    wide = accumulator_dtype(src_SD.dtype)
    num_out, num_terms = index_NK.shape
    if num_terms > MAX_UNROLLED:
        index_NK, weight_NK = _existing_first(index_NK, weight_NK, src_SD.shape[0])

    def add(k: int | jax.Array, out_ND: jax.Array) -> jax.Array:
        row_ND: jax.Array = select_rows(src_SD, index_NK[:, k]).astype(wide)
        if weight_NK is not None:
            # Select again: a weight without a row may be NaN.
            weight_N1 = weight_NK[:, k].astype(wide)[:, None]
            row_ND = selected(exists(index_NK[:, k], src_SD.shape[0]), weight_N1 * row_ND)
        return out_ND + row_ND

    out_ND = jnp.zeros((num_out, src_SD.shape[1]), wide)
    for k in range(min(num_terms, MAX_UNROLLED)):
        out_ND = add(k, out_ND)
    if num_terms > MAX_UNROLLED:
        fullest = jnp.max(jnp.sum(index_NK >= 0, axis=1, dtype=jnp.int32), initial=0)
        out_ND = jax.lax.fori_loop(MAX_UNROLLED, fullest, add, out_ND)
    return out_ND.astype(src_SD.dtype)


def _existing_first(
    index_NK: jax.Array, weight_NK: jax.Array | None, num_src: int
) -> tuple[jax.Array, jax.Array | None]:
    """Moves the terms without a row, now -1, behind the others, whose order stays."""
    index_NK = jnp.where(index_NK < num_src, jnp.maximum(index_NK, -1), -1)
    order_NK = jnp.argsort(index_NK < 0, axis=1, stable=True)
    index_NK = jnp.take_along_axis(index_NK, order_NK, axis=1)
    if weight_NK is not None:
        weight_NK = jnp.take_along_axis(weight_NK, order_NK, axis=1)
    return index_NK, weight_NK


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which sums over rows of `dtype` are accumulated: float32, or float64 for float64."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


@each_participant
def _values_reference(values_S: jax.Array, index_N: jax.Array) -> jax.Array:
    out: jax.Array = select_rows(values_S.reshape(-1), index_N)
    return out


def _unsupported(src: jax.Array, index: jax.Array, weight: jax.Array | None = None) -> str | None:
    if index.shape[-1] == 1 and weight is None:
        return copy_unsupported(src, index)
    return sum_unsupported(src, index)


def copy_unsupported(x: jax.Array, index: jax.Array) -> str | None:
    """What keeps the kernels from copying rows of x [P, S, D] from or to index [P, N, K], or None."""
    if x.dtype.itemsize > 4 or x.dtype in NOT_MOVED:
        return f"rows must be of numbers of 8, 16 or 32 bits whose zero is all bits 0; they are {x.dtype}"
    if not x.size or not index.size:
        return f"there must be rows to read and to write; shapes are {x.shape}, {index.shape}"
    if x.shape[-1] * x.dtype.itemsize < SHORT_ROW:
        return f"rows must have at least {SHORT_ROW} bytes; they are {x.shape[-1]} x {x.dtype}"
    if index.shape[-1] > MAX_TERMS:
        return f"a row may have at most {MAX_TERMS} places; it has {index.shape[-1]}"
    return None


def sum_unsupported(x: jax.Array, index: jax.Array) -> str | None:
    """The same for sums of rows."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"rows must be float32, bfloat16 or float16 to be added; they are {x.dtype}"
    return copy_unsupported(x, index)


NOT_MOVED = jnp.bool_, jnp.float8_e8m0fnu, jnp.int4, jnp.uint4, jnp.float4_e2m1fn
SHORT_ROW = 512  # bytes; a program of a kernel has a row to itself
MAX_TERMS = 32

_gather = Op(
    "gather_rows",
    _reference,
    "p s d, p n k, p n k -> p n d",
    whole=("s", "k"),
    kernels=(Kernel.triton("expertmesh.core.kernels.triton.gather_rows", "gather", _unsupported),),
)
_gather_values = Op("gather_values", _values_reference, "p s..., p n... -> p n...", whole=("s...",))


def gather_rows(
    src_PSD: jax.Array, index_PNK: jax.Array, weight_PNK: jax.Array | None = None
) -> jax.Array:
    """out[p, n] = sum_k weight[p, n, k] * src[p, index[p, n, k]].

    Args:
      src_PSD: [P, S, D]; any dtype if K is 1 and there is no weight, else floating.
      index_PNK: int32[P, N, K]; an index outside [0, S) contributes nothing, whatever src and weight hold.
      weight_PNK: float[P, N, K], or None for ones.

    Returns:
      [P, N, D] in src's dtype, accumulated in float32 in the order of k. Time is that of as many terms as the fullest
      output row has, if those are more than `MAX_UNROLLED`.

    Raises:
      ValueError: ranks or sizes that do not fit.

    Not differentiable by itself: the transpose of a gather is a scatter, unless the inverse index is known, as
    `move_rows` does. Costs no communication when P, N or D is sharded; S and K are held whole.
    """
    _check_fit(src_PSD, index_PNK, weight_PNK)
    out: jax.Array = _gather(src_PSD, index_PNK, weight_PNK)
    return out


def gather_values(values: jax.Array, index: jax.Array) -> jax.Array:
    """out[p, *n] = values[p].ravel()[index[p, *n]]: one number per output element.

    Args:
      values: [P, *S].
      index: int32[P, *N]; an index outside [0, prod(S)) gives 0.

    Returns:
      [P, *N] in the dtype of values.

    Costs no communication when P or N is sharded; S is held whole.
    """
    out: jax.Array = _gather_values(values, index)
    return out


def _check_fit(src: jax.Array, index: jax.Array, weight: jax.Array | None) -> None:
    if src.ndim != 3 or index.ndim != 3 or src.shape[0] != index.shape[0]:
        raise ValueError(
            "gather_rows: src and index must be [P, S, D] and [P, N, K] with the same P; "
            f"got src.shape={src.shape}, index.shape={index.shape}; add the missing dimension"
        )
    if weight is not None and weight.shape != index.shape:
        raise ValueError(
            "gather_rows: weight must have the shape of index; "
            f"got weight.shape={weight.shape}, index.shape={index.shape}; pass one weight per index"
        )
