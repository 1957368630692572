"""The kernel of grouped_requantize on a GPU, bit for bit the two steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import quantize_oracle as oracle
from core.kernels.test_quantize import FORMATS, codes, pytestmark, run_twice, without_padding  # noqa: F401
from expertmesh.core import dequantize, grouped_quantize, quantize
from expertmesh.core.kernels.cuda import quantize as cuda
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.grouped_requantize import grouped_requantize, move_quantized
from expertmesh.core.quantization.quantize_rows import Moved, written

# Rows and columns, by the kernel for Hopper and by the one for what it does not take; the last blocks are partial.
SHAPES = [(name, 192, width) for name in ("mx", "mx e5m2") for width in (96, 1024)]
SHAPES += [("block", 128, 65536)]  # more tiles than programs
SHAPES += [
    (name, *shape)
    for name in ("block", "block, any scale", "block e5m2")
    for shape in ((208, 272), (208, 264), (200, 1024))
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("which, rows, width", SHAPES)
def test_bits_of_both_steps(which, rows, width, dtype):
    """Zeros, subnormal numbers, an Inf and a NaN, scales too small or far apart; NaN in padding rows."""
    format = FORMATS[which][0]
    rng = np.random.default_rng(0)
    x = oracle.wild_numbers(rng, (1, rows, width), np.dtype(jnp.dtype(dtype)))
    x[:, 120:] = np.nan
    q, sizes = quantize(jnp.asarray(x), format), jnp.asarray([[64, 0, 56]], jnp.int32)
    data, scale = np.asarray(q.data).copy(), np.asarray(q.scale).copy()
    scale[:, 40:48] = 2.0**-126
    # Numbers of these columns are subnormal, all of them or all but one: they become zeros.
    columns = slice(q.block[-1], 2 * q.block[-1])
    scale[:, :, 1] = 2.0**-126
    data[..., columns] = rng.choice([0.5, -0.25], data[..., columns].shape)
    data[:, 70, columns.start] = 1
    # Columns whose one number is far below all others of its warp's rows.
    scale[0, 64:80] = 2.0 ** -np.arange(16)[:, None]
    data[..., 24:32] = 0
    data[:, 79, 24:32] = 0.25
    scale[:, 120:] = np.nan
    q = dataclasses.replace(q, data=jnp.asarray(data), scale=jnp.asarray(scale))
    got = run_twice(lambda q: without_padding(grouped_requantize(q, sizes, format), sizes), q)
    want = without_padding(grouped_quantize(dequantize(q), sizes, format, axis=1), sizes)
    assert got.block == want.block and got.dtype == want.dtype
    np.testing.assert_array_equal(codes(got.data), codes(want.data))
    np.testing.assert_array_equal(codes(got.scale), codes(want.scale))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("panel", [1, 2, 8])
@pytest.mark.parametrize(
    "which, rows, width", [("block", 640, 1024), ("block e5m2", 656, 992), ("mx", 640, 1024)]
)
def test_rows_of_tokens_where_they_are(which, rows, width, panel, in_place, monkeypatch):
    """The bits of the tokens' rows, and of these quantized again; some hold no token, which NaN shows."""
    from expertmesh.core.kernels.triton import quantize as kernels

    for module in (kernels, cuda):
        monkeypatch.setattr(module, "choose_panel", lambda tokens, row_bytes, across: panel)
    jax.clear_caches()
    format, rng = FORMATS[which][0], np.random.default_rng(1)
    x = oracle.wild_numbers(rng, (1, 90, width), np.dtype(jnp.bfloat16), special="")
    x[:, 89] = np.nan
    q, sizes = quantize(jnp.asarray(x), format), jnp.asarray([[256, 0, 128, 200]], jnp.int32)
    # Eight places of each token, but for the last one's; some are no row's.
    source = rng.permutation(89 * 8)[None, :rows].astype(np.int32)
    source[:, 5:584:9] = -1
    source[:, 584:] = 89 * 8
    row = np.full(90 * 8, -1, np.int32)
    held = np.flatnonzero(source[0, :584] >= 0)
    row[source[0, held]] = held
    row_map = RowMap(jnp.asarray(row.reshape(1, 90, 8)), jnp.asarray(source))

    def both(q, row_map):
        rows = Moved(q, row_map)
        first = written(rows) if in_place else move_quantized(rows)
        second = grouped_requantize(rows, sizes, format)
        return without_padding(first, sizes), without_padding(second, sizes)

    first, second = run_twice(both, q, row_map)
    held = source[0, :584] >= 0
    at = np.where(held, source[0, :584] // 8, 0)
    for got, tokens in ((first.data, q.data), (first.scale, q.scale)):
        np.testing.assert_array_equal(
            codes(got)[0], np.where(held[:, None], codes(tokens)[0, at], 0)
        )
    moved = move_quantized(Moved(q, row_map))
    want = without_padding(grouped_requantize(moved, sizes, format), sizes)
    assert first.block == q.block and second.block == want.block
    np.testing.assert_array_equal(codes(second.data), codes(want.data))
    np.testing.assert_array_equal(codes(second.scale), codes(want.scale))
