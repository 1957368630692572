"""The Triton kernels of grouped_quantize on a GPU, bit for bit against loops over blocks in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import quantize_oracle as oracle
from core.kernels.test_quantize import FORMATS, check, codes, pytestmark, run_twice  # noqa: F401
from expertmesh.core import grouped_quantize
from expertmesh.core.kernels.choice import quantize as choice
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import (
    Moved,
    Rows,
    grouped_quantize_both,
    quantize_rows,
)


@pytest.mark.parametrize("which", [name for name in FORMATS if name != "square"])
def test_rows_of_no_group_count_nowhere(which):
    format, axis, _ = FORMATS[which]
    sizes = np.array([[64, 0, 32, 128]], np.int32)
    x = oracle.wild_numbers(np.random.default_rng(1), (1, 300, 2, 160), np.float32, special="")
    x *= np.repeat(2.0 ** np.arange(-20, 40, 6), 30)[None, :, None, None].astype(np.float32)
    x[:, 224:] = 0
    poisoned = x.copy()
    poisoned[:, 224:] = np.nan
    poisoned[:, 230:] = np.inf
    if format.scale == "float8_e8m0fnu" and axis == 1:
        x, poisoned = x[:, :288], poisoned[:, :288]
    q = run_twice(
        lambda x, sizes: grouped_quantize(x, sizes, format, axis=axis),
        jnp.asarray(poisoned, jnp.bfloat16),
        jnp.asarray(sizes),
    )
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    if format.block:
        check(q, oracle.quantize(x, format, q.block), format)
        return
    first = 0
    for group, size in enumerate(sizes[0]):
        want = oracle.quantize(x[0, first : first + size], format)
        data, scale, _ = want.codes(format)
        np.testing.assert_array_equal(codes(q.data)[0, first : first + size], data)
        np.testing.assert_array_equal(codes(q.scale)[0, group], scale)
        first += size
    assert not codes(q.data)[0, first:].any()


@pytest.mark.parametrize("shape", [(200, 288), (160, 2, 256), (160, 3, 96)], ids=str)
@pytest.mark.parametrize("which", ["block", "mx"])
def test_both_ways(which, shape):
    """In one pass the bits of both directions alone; in the last shape a block of 128 is partial."""
    format = FORMATS[which][0]
    shape = (1, 192, *shape[1:]) if which == "mx" else (1, *shape)
    x = oracle.wild_numbers(np.random.default_rng(3), shape, np.dtype(jnp.bfloat16))
    x[:, 120:] = np.nan
    x, sizes = jnp.asarray(x), jnp.asarray([[64, 56]], jnp.int32)
    along = len(shape) - 1, 1
    got = run_twice(lambda x, s: grouped_quantize_both(x, s, (format, format))[:2], x, sizes)
    for q, axis in zip(got, along, strict=True):
        want = grouped_quantize(x, sizes, format, axis=axis)
        assert q.block == want.block
        np.testing.assert_array_equal(codes(q.data), codes(want.data))
        np.testing.assert_array_equal(codes(q.scale), codes(want.scale))


def test_both_ways_from_a_queue(monkeypatch):
    """Of programs that have more than their first two tiles."""
    monkeypatch.setattr(choice, "LONG_QUEUE", 1)
    jax.clear_caches()
    format, shape = FORMATS["block"][0], (1, 1040, 14352)
    x = oracle.wild_numbers(np.random.default_rng(4), shape, np.dtype(jnp.bfloat16))
    x[:, 1000:] = np.nan
    x, sizes = jnp.asarray(x), jnp.asarray([[900, 0, 100]], jnp.int32)
    got = run_twice(lambda x, s: grouped_quantize_both(x, s, (format, format))[:2], x, sizes)
    for q, axis in zip(got, (2, 1), strict=True):
        want = grouped_quantize(x, sizes, format, axis=axis)
        np.testing.assert_array_equal(codes(q.data), codes(want.data))
        np.testing.assert_array_equal(codes(q.scale), codes(want.scale))


@pytest.fixture
def panel(request, monkeypatch):
    """So many tiles beside each other are quantized before all others."""
    from expertmesh.core.kernels.cuda import quantize as cuda
    from expertmesh.core.kernels.triton import quantize

    def chosen(tokens, row_bytes, across):
        return min(request.param, across)

    for kernels in (quantize, cuda):
        monkeypatch.setattr(kernels, "choose_panel", chosen)
    jax.clear_caches()


@pytest.mark.parametrize("panel", [1, 2], indirect=True)
@pytest.mark.parametrize("which", ["block", "mx"])
def test_rows_of_tokens_where_they_are(which, panel):
    """As of rows that are written first; the last rows hold no token, and those after the groups nothing."""
    format, rng = FORMATS[which][0], np.random.default_rng(5)
    x = jnp.asarray(oracle.wild_numbers(rng, (1, 70, 512), np.dtype(jnp.bfloat16)))
    source = rng.permutation(384).astype(np.int32)[None] - 384 + 140
    source[:, 250:256] = -1
    source[:, 256:] = rng.integers(0, 140, 128)
    row = np.full(140, -1, np.int32)
    row[source[0, :256][source[0, :256] >= 0]] = np.flatnonzero(source[0, :256] >= 0)
    row_map = RowMap(jnp.asarray(row.reshape(1, 70, 2)), jnp.asarray(source))
    sizes = jnp.asarray([[128, 128]], jnp.int32)

    def live(q):
        return dataclasses.replace(
            q,
            data=q.data[:, :256],
            scale=q.scale[:, : 256 // format.block[1] if q.block[1] > 1 else 256],
        )

    def both(x, row_map, sizes):
        moved = Moved(x, row_map)
        alone = grouped_quantize_both(moved, sizes, (None, format)).along_rows
        both = grouped_quantize_both(moved, sizes, (format, format))[:2]
        return *map(live, both), live(alone)

    got = run_twice(both, x, row_map, sizes)
    rows = jnp.where(source[..., None] >= 0, x[:, source[0] // 2], 0)
    want = grouped_quantize_both(rows, sizes, (format, format))[:2]
    want = *want, want[1]
    for q, w in zip(got, want, strict=True):
        w = live(w)
        np.testing.assert_array_equal(codes(q.data), codes(w.data))
        np.testing.assert_array_equal(codes(q.scale), codes(w.scale))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "twice, panel", [(False, 1), (True, 1), (True, 2), (True, 4)], indirect=["panel"]
)
def test_rows_of_tokens_without_blocks(twice, panel, given):
    """As of rows that are written first, in many groups, of which some have no row, and one has most; data behind the
    groups are undefined.

    NaN in a token that no row is of. Also by Triton's interpreter, which rounds to 8 bits in a way of its own.
    """
    format, rng = FORMATS["current"][0], np.random.default_rng(5)
    x = oracle.wild_numbers(rng, (1, 90, 392), np.dtype(jnp.bfloat16), special="")
    x[:, 89] = np.nan
    sizes = rng.integers(0, 4, 37).astype(np.int32)
    sizes[[0, 9, 10, 36]], sizes[20] = 0, 600
    live = int(sizes.sum())
    source = rng.integers(0, 89 * 8, (1, 800)).astype(np.int32)
    source[:, 5:live:9] = -1
    source[:, live:] = 89 * 8
    row_map = RowMap(jnp.zeros((1, 90, 8), jnp.int32), jnp.asarray(source))
    x, sizes = jnp.asarray(x), jnp.asarray(sizes[None])
    multiplier = jnp.asarray(rng.random((1, 37)), jnp.float32) if given else None
    formats = format, format if twice else None

    def copies(x, row_map, sizes):
        source = Moved(x, row_map)
        made = quantize_rows("test", source, sizes, formats, multiplier=multiplier)[:3]
        return jax.tree.map(lambda leaf: leaf[:, :live] if leaf.dtype.itemsize == 1 else leaf, made)

    got = run_twice(copies, x, row_map, sizes)
    rows = jnp.where(source[..., None] >= 0, x[:, source[0] // 8], 0)
    want = quantize_rows("test", Rows(rows), sizes, formats, multiplier=multiplier)[:3]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(codes(a), codes(b)[:, : a.shape[1]])
    groups = np.repeat(np.arange(37), np.asarray(sizes[0]))
    magnitudes = np.abs(np.asarray(rows[0, :live], np.float32)).max(axis=1)
    amax = [magnitudes[groups == g].max(initial=0) for g in range(37)]
    if given:
        np.testing.assert_array_equal(np.asarray(got[2][0]), amax)
    else:
        least = np.where(np.equal(amax, 0), 448, amax).astype(np.float32)
        np.testing.assert_allclose(np.asarray(got[0].scale[0]), least / 448, rtol=1e-6)
        scale = np.asarray(got[0].scale[0], np.float64)[groups, None]
        want = np.asarray(rows[0, :live], np.float64)
        error = np.abs(np.asarray(got[0].data[0, :live], np.float64) * scale - want)
        # The interpreter halves the few numbers that are rounded up to a power of two.
        wrong = error > np.abs(want) / 8 + scale / 32
        assert wrong.mean(axis=1).max() < 0.1, "a row by another group's scale"


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(200, 288), (160, 2, 264), (133, 40)], ids=str)
def test_both_ways_without_blocks(shape, given):
    """The weight gradient's copy has the same bits as the other one, which has those of it alone."""
    format, shape = FORMATS["current"][0], (1, *shape)
    x = oracle.wild_numbers(np.random.default_rng(3), shape, np.dtype(jnp.bfloat16), special="")
    x[:, 120:] = np.nan
    x, sizes = jnp.asarray(x), jnp.asarray([[64, 0, 56]], jnp.int32)

    def both(x, sizes):
        if not given:
            return grouped_quantize_both(x, sizes, (format, format))[:2]
        multiplier = jnp.array([[2.0**-3, 1.0, 1.7]])
        formats = format, format
        return quantize_rows("test", Rows(x), sizes, formats, multiplier=multiplier)[:2]

    first, second = run_twice(both, x, sizes)
    multiplier = jnp.array([[2.0**-3, 1.0, 1.7]]) if given else None
    want = grouped_quantize(x, sizes, format, multiplier=multiplier)
    for q in (first, second):
        np.testing.assert_array_equal(codes(q.data), codes(want.data))
        np.testing.assert_array_equal(codes(q.scale), codes(want.scale))


def test_by_a_given_multiplier():
    """The amax that comes with it is that of each group's rows."""
    format = FORMATS["current"][0]
    rows = oracle.wild_numbers(np.random.default_rng(2), (1, 210, 200), np.float32, special="")
    multipliers = np.array([2.0**-3, 1.7, 2.0**12], np.float32)
    sizes = np.array([[100, 0, 90]], np.int32)
    poisoned = rows.copy()
    poisoned[:, 190:] = np.nan
    q, _, amax, _ = run_twice(
        lambda x, s, m: quantize_rows("test", Rows(x), s, (format, None), multiplier=m),
        jnp.asarray(poisoned),
        jnp.asarray(sizes),
        jnp.asarray(multipliers[None]),
    )
    factor = np.repeat(multipliers, sizes[0])[None, :, None]
    want = oracle.to_data(rows[:, :190], factor, "float8_e4m3fn")
    np.testing.assert_array_equal(np.asarray(q.data[:, :190], np.float64), want)
    assert not codes(q.data)[:, 190:].any()
    groups = [np.abs(rows[0, :100]).max(), 0, np.abs(rows[0, 100:190]).max()]
    np.testing.assert_array_equal(amax[0], groups)
