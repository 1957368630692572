"""The transport "nvlink" for few long rows, such as copies of weights.

"nvlink" stages by token: R * T rows of its window, though only a rank's own few arrive. Here rows are staged by row: C
of them in a dispatch, R * C in a combine, whose rows are cut into parts that fit in `HALF`. Each long row is moved in
slices by all warps. See `ByRow` in _native/exchange.cu.

Dimension key as in route.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from expertmesh.ep import _native
from expertmesh.ep.capacity import roundup
from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports.nvlink import COPIED, SENT, WIRES, Nvlink
from expertmesh.ep.wire import PLAIN, Wire

HALF = 2**28  # bytes of a half of the window that a combine takes at most
SLICE = 2**15  # bytes of a row that a warp moves at a time, about
WORD, SUMS = 16, 8  # bytes, and float32 elements, that rows are multiples of


@dataclasses.dataclass(frozen=True)
class NvlinkByRow(Nvlink):
    """The transport, for routes in which a token has one choice at most on each rank."""

    def dispatch_parts(
        self, parts_TD: tuple[jax.Array, ...], route: Route, *, axis: Axis
    ) -> tuple[jax.Array, ...]:
        """Dispatches several arrays in one exchange."""
        capacity = route.source_C.shape[0]
        sent_TD = tuple(_padded(x, WORD // x.dtype.itemsize) for x in parts_TD)
        row_bytes = sum(x.shape[1] * x.dtype.itemsize for x in sent_TD)
        rows_CD = self._call(
            _native.DISPATCH_BY_ROW,
            [jax.ShapeDtypeStruct((capacity, x.shape[1]), x.dtype) for x in sent_TD],
            sent_TD,
            route,
            axis,
            self._senders(1 / SENT, 1 / COPIED),
            row_bytes,
            _slices(row_bytes),
            staging_rows=capacity,
        )
        return tuple(x[:, : of.shape[1]] for x, of in zip(rows_CD, parts_TD, strict=True))

    def combine(
        self, rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN
    ) -> jax.Array:
        """As that of "nvlink"; sums travel in float32, whatever the wire."""
        (capacity, num_features), num_tokens = rows_CD.shape, route.slot_TK.shape[0]
        wide_CD = _padded(rows_CD.astype(jnp.float32), SUMS)
        staging_rows = group_size(axis) * capacity
        width = max(HALF // (4 * staging_rows) // SUMS, 1) * SUMS

        def add(part_CD: jax.Array) -> jax.Array:
            row_bytes = 4 * part_CD.shape[1]
            return self._call(
                _native.COMBINE_BY_ROW,
                [jax.ShapeDtypeStruct((num_tokens, part_CD.shape[1]), jnp.float32)],
                (part_CD,),
                route,
                axis,
                self.sms // 2,
                row_bytes,
                _slices(row_bytes),
                WIRES["float32"],
                staging_rows,
            )[0]

        begins = range(0, max(wide_CD.shape[1], 1), width)
        sums_TD = jnp.concatenate([add(wide_CD[:, i : i + width]) for i in begins], axis=1)
        return sums_TD[:, :num_features].astype(rows_CD.dtype)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """Rows of whole words."""
    missing = roundup(x.shape[1], multiple) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing))) if missing else x


def _slices(row_bytes: int) -> int:
    return max(1, row_bytes // SLICE)
