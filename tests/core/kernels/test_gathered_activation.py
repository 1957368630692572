"""The kernels of GEMMs with an activation, or its gradient, behind them, against float64 loops: on a GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.kernels.choice import gathered_activation as choice
from expertmesh.core.kernels.device import Device
from expertmesh.core.linear.gathered_activation import (
    dgrad_activation_grad_op,
    gathered_activation,
)
from expertmesh.core.ops.activate_rows import activates_at_once
from expertmesh.core.ops.activation import Activation
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

# Tokens, contraction, F, sizes of groups (each tile's ends, and none), padding rows.
RAGGED = (0, 1, 64, 65, 127, 128, 129, 191, 255, 256, 257, 300, 0, 1100), 50
SHAPES = [
    (700, 192, 256, *RAGGED),
    (700, 64, 128, *RAGGED),  # one step: the second part of a tile waits for no other
    (300, 1024, 384, (3000, 17, 0, 900), 200),
    (700, 192, 2048, *RAGGED),  # several tiles of each cluster
]
EXACT = Activation(function="gelu_exact")  # which the kernel lacks
GPT_OSS = Activation(function="quick_gelu", limit=1.0, up_offset=1.0)
CASES = [(shape, "bfloat16", Activation()) for shape in SHAPES]
CASES += [(SHAPES[0], "float16", GPT_OSS), (SHAPES[0], "bfloat16", EXACT)]
CASES += [((90, 40, 24, (30, 0, 41), 9), "bfloat16", Activation())]  # two kernels


def _operands(shape, dtype):
    T, K, F, sizes, dead = shape
    rng = np.random.default_rng(K)
    live = sum(sizes)
    index = rng.integers(0, T - 1, live + dead).astype(np.int32)
    index[rng.random(live + dead) < 0.15] = -1
    index[live:] = T - 1
    tokens = rng.normal(size=(T, K)) * 2.0 ** rng.integers(-3, 4, size=(T, 1))
    tokens[T - 1] = np.nan  # must reach nothing
    weights = rng.uniform(size=live + dead)
    weights[index < 0] = np.nan
    rhs = rng.normal(size=(len(sizes), K, 2, F)) / K**0.5
    arrays = [jnp.asarray(x, dtype) for x in (tokens, rhs)]
    return *arrays, index, np.asarray(sizes, np.int32), jnp.asarray(weights, jnp.float32)


def _row_map(tokens, index):
    """Rows that are the tokens at the index, each at one of a token's three places."""
    place = jnp.where(index < 0, -1, 3 * index + jnp.arange(len(index)) % 3)
    return RowMap(jnp.zeros((1, len(tokens), 3), jnp.int32), place[None])


def _bounded(activation, gate, up):
    bound = np.inf if activation.limit is None else activation.limit
    return np.minimum(gate, bound), np.clip(up, -bound, bound)


def _act(activation, gate, up):
    gate, up = _bounded(activation, gate, up)
    factor = {"silu": 1.0, "quick_gelu": 1.702}.get(activation.function)
    if factor is None:
        return gate * 0.5 * np.vectorize(math.erfc)(-gate / 2**0.5) * (up + activation.up_offset)
    return gate / (1 + np.exp(-factor * gate)) * (up + activation.up_offset)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape, dtype, activation", CASES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(shape, dtype, activation, monkeypatch):
    monkeypatch.setattr(choice, "activates_at_once", lambda *sizes: True)
    x, rhs, index, sizes, weights = _operands(shape, dtype)

    @jax.jit
    def run(x, rhs, index, sizes, weights):
        operands = Moved(x[None], _row_map(x, index)), rhs, sizes[None], weights[None]
        h, a = gathered_activation(*operands, activation=activation, keeps_h=True)
        _, alone = gathered_activation(*operands, activation=activation, keeps_h=False)
        return h[0], a[0], alone[0]

    wide, of_rhs = np.asarray(x, np.float64), np.asarray(rhs, np.float64)
    live = sizes.sum()
    want_h, first = np.zeros((live, *rhs.shape[2:])), 0
    for g, size in enumerate(sizes):
        part = slice(first, first := first + size)
        rows = np.where(index[part, None] < 0, 0, wide[np.maximum(index[part], 0)])
        want_h[part] = np.einsum("rk,kcf->rcf", rows, of_rhs[g])
    got, again = run(x, rhs, index, sizes, weights), run(x, rhs, index, sizes, weights)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:live], np.asarray(b)[:live])
    h, a, alone = (np.asarray(each, np.float64)[:live] for each in got)
    assert relative_error(h, want_h) < 5e-3
    held = index[:live] >= 0
    act = _act(activation, h[:, 0], h[:, 1])
    want = np.where(held[:, None], np.asarray(weights, np.float64)[:live, None] * act, 0)
    assert relative_error(a, want) < 5e-3
    assert not a[~held].any() and not h[~held].any()
    np.testing.assert_array_equal(a, alone)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("shape, dtype, activation", CASES, ids=str)
def test_gradient_equals_float64_loops_and_repeats_bitwise(
    shape, dtype, activation, gathers, monkeypatch
):
    monkeypatch.setattr(choice, "ROWS_AT_ONCE", 1)
    tokens, up, index, sizes, weights = _operands(shape, dtype)
    rhs = jnp.swapaxes(up[:, :, 0], 1, 2)  # [E, F, D]
    live, rng = sizes.sum(), np.random.default_rng(1)
    index[live:] = -1
    h = rng.normal(size=(len(index), 2, rhs.shape[1])) * 2.0 ** rng.integers(
        -3, 3, (len(index), 1, 1)
    )
    h[index < 0] = np.nan
    h[np.abs(h - 1) < 0.01] = 0.5  # none at the bound, where a difference is no derivative
    h[np.abs(h + 1) < 0.01] = 0.5
    h = jnp.asarray(h, dtype)

    @jax.jit
    def run(tokens, rhs, h, index, sizes, weights):
        row_map = _row_map(tokens, index)
        rows = jnp.where((index < 0)[None, :, None], jnp.nan, tokens[None, index])
        dy = Moved(tokens[None], row_map) if gathers else rows
        operands = dy, rhs, h[None], weights[None], row_map.source, sizes[None]
        return [x[0] for x in dgrad_activation_grad_op(*operands, activation=activation)]

    operands = tokens, rhs, h, index, sizes, weights
    got, again = run(*operands), run(*operands)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:live], np.asarray(b)[:live])
    assert not np.asarray(got[1])[live:].any(), "the weights of padding rows have no gradient"
    held, ends = index[:live] >= 0, np.cumsum(sizes)
    groups = np.searchsorted(ends, np.arange(live), side="right")[held]
    rows, of_h, w = (
        np.asarray(x, np.float64)[:live][held] for x in (jnp.asarray(tokens)[index], h, weights)
    )
    d = np.stack([np.asarray(rhs[g], np.float64) @ r for g, r in zip(groups, rows, strict=True)])
    value, step = _act(activation, of_h[:, 0], of_h[:, 1]), 1e-5
    slopes = [
        (_act(activation, of_h[:, 0] + dx, of_h[:, 1] + dy) - _act(activation, of_h[:, 0] - dx, of_h[:, 1] - dy))
        / (2 * step)
        for dx, dy in ((step, 0), (0, step))
    ]  # fmt: skip
    want = (
        np.stack([w[:, None] * d * slope for slope in slopes], 1),
        (d * value).sum(1),
        w[:, None] * value,
    )
    for mine, reference in zip(got, want, strict=True):
        mine = np.asarray(mine, np.float64)[:live]
        assert relative_error(mine[held], reference) < 1e-2
        assert not mine[~held].any()


def test_what_the_gradient_takes():
    given = dict(rows=327680, tokens=40960, contraction=4096, width=256, groups=128)
    given |= dict(dtype=jnp.bfloat16, function="silu", device=Device())
    others = [
        dict(contraction=4104), dict(width=384), dict(groups=257), dict(dtype=jnp.float32),
        dict(function="gelu_exact"), dict(device=Device(capability=100)), dict(rows=128 * 255),
    ]  # fmt: skip
    taken = choice.choose_grad(choice.Projection(**given))
    assert taken is not None and taken.programs == 132
    for other in others:
        assert choice.choose_grad(choice.Projection(**given | other)) is None, other


def test_what_the_kernel_takes():
    given = dict(rows=327680, tokens=40960, contraction=768, width=256, groups=128)
    given |= dict(dtype=jnp.bfloat16, function="silu", device=Device())
    taken = choice.choose(choice.Projection(**given))
    assert taken is not None and taken.programs == 132
    others = [
        dict(contraction=776), dict(width=192), dict(groups=257), dict(dtype=jnp.float32),
        dict(function="gelu_exact"), dict(device=Device(capability=100)),
        dict(device=Device(nvrtc=False)), dict(rows=128 * 255), dict(contraction=4096),
        dict(tokens=2**26), dict(rows=2**30),
    ]  # fmt: skip
    for other in others:
        assert choice.choose(choice.Projection(**given | other)) is None, other


@pytest.mark.parametrize(
    "width, rows, taken", [(512, 327680, False), (1024, 327680, True), (1024, 128 * 255, False)]
)
def test_long_contractions_are_taken_where_wide(width, rows, taken):
    given = dict(rows=rows, tokens=40960, contraction=4096, width=width, groups=128)
    given |= dict(dtype=jnp.bfloat16, function="silu", device=Device())
    assert (choice.choose(choice.Projection(**given)) is not None) == taken


def test_large_weights_are_not_activated_at_once():
    assert activates_at_once(2**20, 2048, 2048, 64)
    assert not activates_at_once(2**20, 2048, 2176, 64)
