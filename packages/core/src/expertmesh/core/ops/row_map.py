"""Rows of a result that are rows of a source: one move, whose gradient is the move back.

    move_rows:    out[p, n] = sum_j weights[p, n, j] * x[p, source[p, n, j] // K]
    move_values:  out[p, *n] = values[p].ravel()[source[p, *n]]

    d_x       = the move of d_out by the inverse map, with the weights that `move_values` brings there
    d_weights = <d_out[p, n], x[p, source[p, n, j] // K]>

Both maps of a `RowMap` say the same, each in its own order, so the gradient of a gather is a gather: no scatter, and
the same bits in each run.

Dimension key: P groups, S source rows, N result rows, D features; K, J places of each row of the source, of the result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.op import Kernel, Op
from expertmesh.core.operands import FLOATS, check_arrays
from expertmesh.core.ops.gather_rows import (
    accumulator_dtype,
    copy_unsupported,
    exists,
    gather_rows,
    gather_values,
    select_rows,
    sum_rows,
    sum_unsupported,
)
from expertmesh.core.ops.groups import each_participant
from expertmesh.core.vjp import differentiable

__all__ = ["RowMap", "check_fit", "check_places", "holds_token", "move_rows", "move_values"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Which rows of a source are which rows of a result.

    A row of one side may have several places, numbered s * K + k: a token has one place for each of its choices. The
    map of the other side lacks that dimension. Without groups both lack P.

    Attributes:
      row: int32[P, S, K] or [P, S]; the place in the result, -1 where there is none.
      source: int32[P, N] or [P, N, J]; the place in the source, -1 where there is none (padding). The inverse of row:
        `source.ravel()[row.ravel()[i]] = i` within a group wherever row says a place.
    """

    row: jax.Array
    source: jax.Array

    @property
    def inverse(self) -> "RowMap":
        """The map that moves rows back."""
        return RowMap(row=self.source, source=self.row)

    @property
    def source_row(self) -> jax.Array:
        """int32, like `source`: the row of each place, `source // K`; -1 where there is none."""
        return _row_of(self.source, self.row.shape[-1] if self.row.ndim > self.source.ndim else 1)


def _row_of(place: jax.Array, num_places: int) -> jax.Array:
    """The row of a place; -1 // K is -1."""
    return place // num_places if num_places > 1 else place


def holds_token(source: jax.Array) -> jax.Array:
    """bool, like `source`: whether a row holds a token; the others are padding.

    Neither the row nor its weight decides: a weight of 0 has a gradient, and padding may be NaN.
    """
    return source >= 0


def move_rows(x: jax.Array, row_map: RowMap, weights: jax.Array | None = None) -> jax.Array:
    """Moves rows to their places: out[n] = sum_j weights[n, j] * x[source[n, j] // K], 0 where source is -1.

    Args:
      x: [P, S, D], or [S, D] for a map without P; differentiable if floating. Any dtype, if J is 1 and there are no
        weights.
      row_map: a RowMap, or its inverse.
      weights: float, of the shape of row_map.source, or None for ones.

    Returns:
      [P, N, D] (or [N, D]) in x's dtype. A sum is accumulated in float32 and rounded once. Rows without a source are
      exactly 0 and give no gradient, whatever weights and cotangent hold there. Gradients of weights are float32.

    Raises:
      TypeError: an operand is not an array, or weights, or rows that are added up, are not floating.
      ValueError: x or weights does not fit the map.

    No communication when P or D is sharded, except that the gradient of the weights is summed over the axes of D. S is
    held whole, and so is N if x is copied to several places.
    """
    check_fit("move_rows", row_map, x=x)
    check_summed("move_rows", row_map, weights, x=x)
    if weights is not None:
        check_arrays("move_rows", FLOATS, weights=weights)
        check_places("move_rows", row_map, weights=weights)
    return _in_groups(_move_rows, row_map, x, weights)


def move_values(values: jax.Array, row_map: RowMap) -> jax.Array:
    """Moves one number for each place, such as a routing weight: out[*n] = values.ravel()[source[*n]], 0 for -1.

    Args:
      values: [P, S, K], of the shape of row_map.row; any dtype (differentiable if floating).
      row_map: a RowMap, or its inverse.

    Returns:
      [P, N, J], of the shape of row_map.source, in the dtype of values. The cotangent is moved by `row_map.inverse`.

    Raises:
      TypeError: values is not an array.
      ValueError: it does not fit the map.

    Costs no communication when P is sharded; S and K are held whole.
    """
    check_arrays("move_values", values=values)
    check_places("move_values", row_map.inverse, values=values)
    return _in_groups(_move_values, row_map, values)


def check_fit(function: str, row_map: RowMap, **operand: Any) -> None:
    """Raises an error that names `function` unless the operand has the map's source rows, and features."""
    check_arrays(function, **operand)
    ((name, x),) = operand.items()
    rows = row_map.row.shape[: min(row_map.row.ndim, row_map.source.ndim)]
    if x.ndim != len(rows) + 1 or x.shape[:-1] != rows:
        raise ValueError(
            f"{function}: {name} must have the rows of its map, and features; got {name}.shape={x.shape}, map: {rows}; "
            "use the map that was made for it"
        )


def check_summed(function: str, row_map: RowMap, weights: jax.Array | None, **operand: Any) -> None:
    """Raises an error that names `function` where rows are weighed or added up, in float32, that are no floats."""
    several = row_map.source.ndim > row_map.row.ndim and row_map.source.shape[-1] > 1
    if weights is not None or several:
        check_arrays(function, FLOATS, **operand)


def check_places(function: str, row_map: RowMap, **operand: Any) -> None:
    """Raises an error that names `function` unless the operand has one value for each place of the map's result."""
    ((name, values),) = operand.items()
    if values.shape != row_map.source.shape:
        raise ValueError(
            f"{function}: {name} must have one value for each place of its map; got {name}.shape={values.shape}, "
            f"map: {row_map.source.shape}; use the map that was made for it"
        )


def _in_groups(move: Callable[..., jax.Array], row_map: RowMap, *operands: Any) -> jax.Array:
    """Adds P = 1 where it is missing."""
    operands = (*operands, RowMap(row_map.row, row_map.source))
    if min(row_map.row.ndim, row_map.source.ndim) == 2:
        return move(*operands)
    return move(*jax.tree.map(lambda x: x[None], operands))[0]


def _each_place(index: jax.Array) -> jax.Array:
    """[P, N] as [P, N, 1]."""
    return index if index.ndim == 3 else index[..., None]


def _moved(x: jax.Array, weights: jax.Array | None, row_map: RowMap) -> jax.Array:
    if weights is None and row_map.row.ndim > row_map.source.ndim:
        out: jax.Array = _spread_rows(x, row_map.row, row_map.source)
        return out
    return gather_rows(x, *jax.tree.map(_each_place, (row_map.source_row, weights)))


@each_participant
def _spread_reference(x_SD: jax.Array, row_SK: jax.Array, source_N: jax.Array) -> jax.Array:
    """Each row at its places. The one map is read in the order of the result, the other of the source."""
    out: jax.Array = select_rows(x_SD, RowMap(row_SK, source_N).source_row)
    return out


@each_participant
def _grad_reference(
    d_out_ND: jax.Array,
    x_SD: jax.Array,
    weight_NJ: jax.Array,
    source_NJ: jax.Array,
    row_SK: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of x and weights."""
    (_, J), (_, K) = source_NJ.shape, row_SK.shape
    d_x_SD = sum_rows(d_out_ND, _row_of(row_SK, J), select_rows(weight_NJ.reshape(-1), row_SK))
    # A dot for each place of the result or of the source, whichever are fewer.
    if source_NJ.size <= row_SK.size:
        return d_x_SD, _dots(d_out_ND, x_SD, _row_of(source_NJ, K))
    dots_SK = _dots(x_SD, d_out_ND, _row_of(row_SK, J))
    return d_x_SD, select_rows(dots_SK.reshape(-1), source_NJ)


def _dots(a_ND: jax.Array, b_SD: jax.Array, index_NJ: jax.Array) -> jax.Array:
    """<a[n], b[index[n, j]]>, 0 where there is no such row, whatever a holds."""
    wide = accumulator_dtype(a_ND.dtype)
    dots = []
    for j in range(index_NJ.shape[1]):
        row_ND = select_rows(b_SD, index_NJ[:, j])
        dot_N = jnp.sum(a_ND.astype(wide) * row_ND.astype(wide), axis=1)
        there_N = exists(index_NJ[:, j], b_SD.shape[0])
        dots.append(jnp.where(there_N, dot_N, jnp.zeros_like(dot_N)))
    return jnp.stack(dots, axis=1) if dots else jnp.zeros(index_NJ.shape, wide)


def _spread_unsupported(x: jax.Array, row: jax.Array, source: jax.Array) -> str | None:
    return copy_unsupported(x, row) if source.size else "there must be rows to write"


def _grad_unsupported(
    d_out: jax.Array, x: jax.Array, weights: jax.Array, source: jax.Array, row: jax.Array
) -> str | None:
    del weights
    if row.shape[-1] != 1:
        return f"a row of x must have one place; it has {row.shape[-1]}"
    return sum_unsupported(x, source) or sum_unsupported(d_out, source)


def _kernel(function: str, unsupported: Callable[..., str | None]) -> tuple[Kernel, ...]:
    return (Kernel.triton("expertmesh.core.kernels.triton.permute", function, unsupported),)


_spread_rows = Op(
    "spread_rows",
    _spread_reference,
    "p s d, p s k, p n -> p n d",
    whole=("s", "k", "n"),
    kernels=_kernel("spread", _spread_unsupported),
)
_move_rows_grad = Op(
    "move_rows_grad",
    _grad_reference,
    "p n d, p s d, p n j, p n j, p s k -> p s d, p n j",
    whole=("s", "k", "n", "j"),
    summed=("d",),
    kernels=_kernel("unpermute_grad", _grad_unsupported),
)


def _rows_fwd(x: jax.Array, weights: jax.Array | None, row_map: RowMap) -> tuple[jax.Array, Any]:
    return _moved(x, weights, row_map), (row_map, None if weights is None else (x, weights))


def _rows_bwd(residuals: Any, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    row_map, weighted = residuals
    if weighted is None:
        return _moved(d_out, None, row_map.inverse), None, None
    x, weights = weighted
    indices = map(_each_place, (weights, row_map.source, row_map.row))
    d_x, d_weights = _move_rows_grad(d_out, x, *indices)
    return d_x, d_weights.reshape(weights.shape), None


def _values_fwd(values: jax.Array, row_map: RowMap) -> tuple[jax.Array, RowMap]:
    return gather_values(values, row_map.source), row_map


def _values_bwd(row_map: RowMap, d_out: jax.Array) -> tuple[jax.Array, None]:
    return gather_values(d_out, row_map.row), None


_move_rows = differentiable(_rows_fwd, _rows_bwd)
_move_values = differentiable(_values_fwd, _values_bwd)
