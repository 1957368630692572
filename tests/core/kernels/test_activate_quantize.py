"""The Triton kernels of activate_quantize on a GPU, against the activation and then the two quantizations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import quantize_oracle as oracle
from core.kernels.test_quantize import (
    FORMATS,
    codes,
    is_nan,
    pytestmark,  # noqa: F401
    run_twice,
    without_padding,
)
from expertmesh.core import Activation, activate, dequantize, grouped_quantize
from expertmesh.core.kernels.choice import quantize as choice
from expertmesh.core.ops.activation import IN_KERNELS
from expertmesh.core.quantization.activate_quantize import (
    Activated,
    ActivatedGrad,
    activate_grad_quantize,
    activate_quantize,
)
from expertmesh.core.quantization.quantize_rows import Rows, quantize_rows

GPT_OSS = Activation(function="quick_gelu", limit=7.0, up_offset=1.0)


def routing(rows):
    """Weights of rows, of which every seventh holds no token and has NaN."""
    rng = np.random.default_rng(3)
    source = rng.integers(0, rows, (1, rows)).astype(np.int32)
    source[:, ::7] = -1
    weights = np.where(source < 0, np.nan, rng.normal(size=(1, rows))).astype(np.float32)
    return dict(weights=jnp.asarray(weights), row_source=jnp.asarray(source))


def weigh(x, weights, row_source):
    """`x` [1, rows, ...] times the weights in float32."""
    shape = (*weights.shape, *[1] * (x.ndim - 2))
    weighted = weights.reshape(shape) * x.astype(jnp.float32)
    return jnp.where(row_source.reshape(shape) >= 0, weighted, 0)


def of_groups(copies, sizes):
    """Both copies, without padding rows."""
    return [without_padding(q, sizes) for q in copies[:2]]


def both(h, sizes, format, activation, of=None):
    """What the kernel gives, and what the layers give one by one."""
    of = of or {}
    got = run_twice(
        lambda h: of_groups(activate_quantize(h, sizes, (format, format), activation, **of), sizes),
        h,
    )
    a = jax.jit(lambda h: activate(h, activation))(h)
    if of:
        wide = jax.jit(lambda h: activate(h.astype(jnp.float32), activation))(h)
        a = weigh(wide, **of).astype(h.dtype)
    want = of_groups([grouped_quantize(a, sizes, format, axis=axis) for axis in (2, 1)], sizes)
    assert [q.block for q in got] == [q.block for q in want]
    return got, want


def compare(got, want):
    """One number in some thousands may be rounded otherwise; none is a NaN that should not be."""
    for q, like in zip(got, want, strict=True):
        for x, y in ((q.data, like.data), (q.scale, like.scale)):
            assert x.dtype == y.dtype and np.mean(codes(x) != codes(y)) < 2e-3
        assert np.array_equal(is_nan(q.data), is_nan(like.data))


# Rows and columns, by the kernel for Hopper and by the one for what it does not take; the last blocks are partial.
SHAPES = [
    ("block", 208, 264),
    ("block", 256, 512),
    ("block", 200, 288),
    ("mx", 192, 96),
    ("mx", 192, 512),
    ("block", 128, 32768),  # more tiles than programs
    ("block e5m2", 256, 512),
    ("block e5m2", 208, 264),
    ("mx e5m2", 192, 512),
    ("mx e5m2", 192, 96),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("which, rows, width", SHAPES)
def test_swiglu_but_for_its_last_bit(which, rows, width, dtype, weighted):
    """Padding rows, an Inf and a NaN."""
    rng = np.random.default_rng(0)
    h = oracle.wild_numbers(rng, (1, rows, 2, width), np.dtype(jnp.dtype(dtype)))
    h[:, 120:] = np.nan
    gate, up = h[:, :, 0], h[:, :, 1]
    gate[np.isinf(up) & (gate < -87)] = (
        0  # its activation is zero for the kernels, and not yet for the compiler
    )
    sizes = jnp.asarray([[64, 0, 56]], jnp.int32)
    of = routing(rows) if weighted else None
    compare(*both(jnp.asarray(h), sizes, FORMATS[which][0], "silu", of))


@pytest.mark.parametrize("which, rows, width", [("block", 384, 16520), ("mx", 384, 16512)])
def test_tiles_from_a_queue(which, rows, width, monkeypatch):
    """Of programs that have more than their first two: the bits of those without a queue."""
    format, of = FORMATS[which][0], routing(rows)
    rng, sizes = np.random.default_rng(6), jnp.asarray([[200, 0, 175]], jnp.int32)
    h, d = (rng.normal(size=(1, rows, *n, width)).astype(np.float32) for n in ((2,), ()))
    h, d = jnp.asarray(h, jnp.bfloat16), jnp.asarray(d, jnp.bfloat16)

    def made(h, d):
        a = activate_quantize(h, sizes, (format, format), "silu", **of)
        grad = activate_grad_quantize(h, d, sizes, (format, format), "silu", **of)
        return of_groups(a, sizes), of_groups(grad, sizes), grad.d_weights[:, :375]

    found = []
    for tiles in (1, 10**9):
        monkeypatch.setattr(choice, "LONG_QUEUE", tiles)
        jax.clear_caches()
        found.append(jax.tree.leaves(run_twice(lambda h, d: made(h, d), h, d)))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(codes(x), codes(y))


OTHERS = [name for name in IN_KERNELS if name not in ("silu", "gelu_exact")]


@pytest.mark.parametrize("activation", [*OTHERS, GPT_OSS], ids=str)
def test_other_activations_but_for_their_last_bit(activation):
    rng = np.random.default_rng(0)
    h = rng.normal(size=(1, 512, 2, 512)) * 2.0 ** rng.integers(-4, 5, size=(1, 512, 1, 1))
    h[:, 400:] = np.nan
    sizes = jnp.asarray([[128, 256]], jnp.int32)
    for of in (None, routing(512)):
        compare(*both(jnp.asarray(h, jnp.bfloat16), sizes, FORMATS["block"][0], activation, of))


GRADIENTS = [name for name in IN_KERNELS if name != "gelu_exact"]
CASES = [(name, "bfloat16") for name in (*GRADIENTS, GPT_OSS)] + [
    ("silu", "float16"),
    (GPT_OSS, "float16"),
]


@pytest.mark.parametrize("activation, dtype", CASES, ids=str)
@pytest.mark.parametrize("which, rows, width", SHAPES)
def test_gradients_but_for_their_last_bit(which, rows, width, activation, dtype):
    """Against the gradient and then both quantizations; NaN in padding rows and in one number."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(1, rows, 2, width)) * 2.0 ** rng.integers(-4, 5, size=(1, rows, 1, 1))
    d = rng.normal(size=(1, rows, width))
    h[:, 120:], d[:, 120:] = np.nan, np.nan
    d[0, 3, 5] = np.nan
    h, d, sizes = jnp.asarray(h, dtype), jnp.asarray(d, dtype), jnp.asarray([[64, 0, 56]])
    format = FORMATS[which][0]
    got = run_twice(
        lambda h, d: of_groups(
            activate_grad_quantize(h, d, sizes, (format, format), activation), sizes
        ),
        *(h, d),
    )
    (d_h,) = jax.jit(lambda h, d: jax.vjp(lambda h: activate(h, activation), h)[1](d))(h, d)
    want = of_groups([grouped_quantize(d_h, sizes, format, axis=axis) for axis in (3, 1)], sizes)
    assert [q.block for q in got] == [q.block for q in want]
    compare(got, want)


@pytest.mark.parametrize("activation, dtype", CASES, ids=str)
@pytest.mark.parametrize("which, rows, width", SHAPES)
def test_gradients_with_routing_weights(which, rows, width, activation, dtype):
    """Against float64 gradients; rows that hold no token have NaN, and gradients of exact zeros."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(1, rows, 2, width)) * 2.0 ** rng.integers(-4, 5, size=(1, rows, 1, 1))
    d = rng.normal(size=(1, rows, width))
    of, sizes, format = routing(rows), jnp.asarray([[64, 0, 56]]), FORMATS[which][0]
    source = np.asarray(of["row_source"]).copy()
    source[:, 120:] = -1
    of["row_source"] = jnp.asarray(source)
    h[source < 0], d[source < 0] = np.nan, np.nan
    h, d = jnp.asarray(h, dtype), jnp.asarray(d, dtype)

    def gradients(h, d):
        copies = activate_grad_quantize(h, d, sizes, (format, format), activation, **of)
        assert copies.amax is None
        return of_groups(copies, sizes), copies.d_weights

    got, d_weights = run_twice(gradients, h, d)
    holds = jnp.asarray(source >= 0)
    wide = [jnp.where(holds.reshape(1, rows, *[1] * (x.ndim - 2)), x, 0) for x in (h, d)]
    a, pull = jax.jit(
        lambda h, d: (
            activate(h, activation),
            jax.vjp(lambda h: activate(h, activation), h)[1](weigh(d, **of))[0],
        )
    )(*(x.astype(jnp.float32) for x in wide))
    want = np.where(
        source >= 0, np.sum(np.asarray(a, np.float64) * np.asarray(wide[1], np.float64), -1), 0
    )
    assert np.linalg.norm(np.asarray(d_weights) - want) < 1e-5 * np.linalg.norm(want)
    assert not np.asarray(d_weights)[source < 0].any()
    d_h = pull.astype(h.dtype)
    want = [grouped_quantize(d_h, sizes, format, axis=axis) for axis in (3, 1)]
    compare(got, of_groups(want, sizes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("which, rows, width", SHAPES)
def test_h_in_8_bits(which, rows, width, dtype):
    """The bits that there are of the numbers that these stand for; rows without a token have NaN."""
    rng, format = np.random.default_rng(5), FORMATS[which][0]
    h = rng.normal(size=(1, rows, 2, width)) * 2.0 ** rng.integers(-20, 5, size=(1, rows, 1, 1))
    d, sizes = rng.normal(size=(1, rows, width)), jnp.asarray([[64, 0, 56]], jnp.int32)
    h[:, 120:], d[:, 120:] = np.nan, np.nan
    h[0, 3, 1, 7], d[0, 5, 9] = np.nan, np.nan
    of, d, act = routing(rows), jnp.asarray(d, dtype), GPT_OSS
    of["row_source"] = of["row_source"].at[:, 120:].set(-1)
    q, formats = grouped_quantize(jnp.asarray(h, dtype), sizes, format), (format, format)

    def made(h, d):
        a = activate_quantize(h, sizes, formats, act, **of)
        grad = activate_grad_quantize(h, d, sizes, formats, act, **of)
        return of_groups(a, sizes), of_groups(grad, sizes), grad.d_weights

    (*got, d_weights), (*want, like) = run_twice(made, q, d), run_twice(made, dequantize(q), d)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(codes(x), codes(y))
    np.testing.assert_allclose(d_weights, like, rtol=1e-4, atol=1e-6)  # NaN where it is


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_scale_per_group(given, twice, gradient):
    """The bits of the weighted activation, or its gradient, quantized after it; data behind the groups are undefined.

    Also by Triton's interpreter.
    """
    rng, format, act = np.random.default_rng(4), FORMATS["current"][0], Activation()
    h = jnp.asarray(
        rng.normal(size=(1, 90, 2, 200)) * 3.0 ** rng.integers(-4, 5, (1, 90, 1, 1)), jnp.bfloat16
    )
    d, sizes = (
        jnp.asarray(rng.normal(size=(1, 90, 200)), h.dtype),
        jnp.asarray([[40, 0, 37]], jnp.int32),
    )
    of, formats = routing(90), (format, format if twice else None)
    multiplier = jnp.asarray([[0.25, 1.0, 1.7]], jnp.float32) if given else None
    more = (d,) if gradient else ()
    made = (ActivatedGrad if gradient else Activated)(h, *of.values(), act, *more)
    assert made.fuses(formats)

    def at_once(made, sizes, multiplier):
        return quantize_rows("test", made, sizes, formats, multiplier=multiplier)

    def apart(made, sizes, multiplier):
        rows, d_weights = made.apart(sizes, None)
        copies = quantize_rows("test", Rows(rows), sizes, formats, multiplier=multiplier)
        return copies._replace(d_weights=d_weights)

    got, want = (run_twice(run, made, sizes, multiplier) for run in (at_once, apart))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        rows = 77 if x.dtype.itemsize == 1 else None
        np.testing.assert_array_equal(codes(x)[:, :rows], codes(y)[:, :rows])
