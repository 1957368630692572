"""The up projection of quantized tokens, activated and quantized: one kernel against the two, bit for bit, on a GPU."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import E4M3, quantized
from expertmesh.core import grouped_quantize
from expertmesh.core.kernels.choice import gathered_activation as by_groups
from expertmesh.core.kernels.choice import quantized_activation as choice
from expertmesh.core.kernels.device import Device
from expertmesh.core.linear.grouped_gemm import grouped_gemm_dgrad_op, grouped_gemm_op
from expertmesh.core.linear.quantized_activation import (
    quantized_activation,
    quantized_activation_grad,
    quantized_activation_op,
    quantizes_activation,
    quantizes_activation_grad,
)
from expertmesh.core.ops.activation import Activation
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.activate_quantize import (
    activate_grad_quantize,
    activate_quantize,
)
from expertmesh.core.quantization.quantize import quantize
from expertmesh.core.quantization.quantize_moved import quantize_moved
from expertmesh.core.quantization.quantize_rows import Moved, written
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import Float8BlockScaling, TensorFormat
from expertmesh.core.testing import relative_error

ANY_SCALE = Float8BlockScaling(power_2_scale=False).formats().x
BLOCKS = Float8BlockScaling().formats().x
BYTES = TensorFormat(dtype=E4M3, scale="float8_e8m0fnu", block=(1, 128))
WIDE = TensorFormat(dtype="float8_e5m2", scale="power_of_2", block=(1, 128))
GPT_OSS = Activation(function="quick_gelu", limit=7.0, up_offset=1.0)
# Tokens, contraction, F, sizes of groups of which the last one ends within a block, padding rows.
SMALL = (90, 384, 256, (128, 0, 384, 256, 200), 56)
SHAPES = [
    SMALL,
    (90, 128, 128, (0, 128, 0, 256), 0),  # one step
    (700, 768, 384, (1024, 128, 0, 2048, 129), 31),
    (700, 1536, 512, (*[128, 0, 640] * 40, 1), 175),  # many tiles of each program
    (90, 272, 128, (256, 128), 128),  # a step that is not whole
    (90, 4096, 128, (256, 129), 127),  # the longest contraction
    (700, 256, 256, (*[128, 0, 0, 0] * 74, 256, 0, 0, 0), 0),  # many groups, to the end of all rows
]
CASES = [(shape, "bfloat16", BLOCKS, Activation()) for shape in SHAPES]
CASES += [(SMALL, "bfloat16", format, Activation()) for format in (ANY_SCALE, BYTES, WIDE)]
CASES += [(SMALL, "float16", BLOCKS, GPT_OSS)]
CASES += [
    (SMALL, "bfloat16", BLOCKS, Activation(function=name))
    for name in choice.FUNCTIONS
    if name != "silu"
]
# What the one kernel does not take.
OTHERS = [(SMALL, "float32", BLOCKS, Activation()), ((90, 4224, *SMALL[2:]), *CASES[0][1:])]


def _places(shape) -> int:
    """Of a token."""
    tokens, _, _, sizes, _ = shape
    return sum(sizes) // (tokens - 1) + 1


def _operands(shape, dtype, gathers=True):
    """Tokens, whose last is NaN, rows of which some hold no token, weights, and what they are in float64.

    The rows are those of the tokens, where not `gathers` written.
    """
    T, K, F, sizes, dead = shape
    rng = np.random.default_rng(K)
    live, G = sum(sizes), len(sizes)
    x, x_scale, wide_x = quantized(rng, (1, T, K), (1, 1, 128), E4M3)
    w, w_scale, wide_w = quantized(rng, (G, K, 2, F), (1, 128, 1, 128), E4M3)
    x_scale = x_scale.copy() / 64
    w_scale = w_scale / np.float32(64 * K**0.5)
    x_scale[:, T - 1] = np.nan
    places = _places(shape)
    place = rng.permutation(places * (T - 1)).astype(np.int32)[:live]
    place[rng.random(live) < 0.15] = -1
    row = np.full((T, places), -1, np.int32)
    row.ravel()[place[place >= 0]] = np.flatnonzero(place >= 0)
    place = np.append(place, np.full(dead, places * T - 1, np.int32))
    weights = rng.uniform(0.1, 2, live + dead).astype(np.float32)
    weights[place < 0], weights[live:] = np.nan, np.nan
    tokens = QuantizedArray(jnp.asarray(x), jnp.asarray(x_scale), block=(1, 1, 128), dtype=dtype)
    weight = QuantizedArray(
        jnp.asarray(w), jnp.asarray(w_scale), block=(1, 128, 1, 128), dtype=dtype
    )
    row_map = RowMap(jnp.asarray(row[None]), jnp.asarray(place[None]))
    wide = wide_x[0] / 64, wide_w / (64 * K**0.5)
    sizes, rows = jnp.asarray([sizes], jnp.int32), Moved(tokens, row_map)
    if not gathers:
        rows = rows.rows()
    return (rows, weight, sizes, jnp.asarray(weights[None]), row_map.source), wide


def _two(lhs, rhs, sizes, weights, source, *, activation, format, narrow=False):
    """The two ops, one after the other, and h quantized."""
    h = grouped_gemm_op(lhs, rhs, sizes, out_dtype=jnp.dtype(lhs.dtype))
    routing = dict(weights=weights, row_source=source)
    copies = activate_quantize(h, sizes, (format, format), activation, **routing)
    if narrow:
        return grouped_quantize(h, sizes, format), copies.along_features, None
    return h, copies.along_features, copies.along_rows


def _defined(made, sizes):
    """Without padding rows, as bytes; of copies up to the end of the last block."""
    live = int(np.sum(sizes))
    blocks = -(-live // 128)
    h, first, second = made
    of_h = (h.data, h.scale) if isinstance(h, QuantizedArray) else (h,)
    parts = (
        *(x[:, :live] for x in of_h),
        first.data[:, : 128 * blocks],
        first.scale[:, : 128 * blocks],
    )
    if second is not None:
        parts += second.data[:, : 128 * blocks], second.scale[:, :blocks]
    return [np.ascontiguousarray(x).view(np.uint8) for x in map(np.asarray, parts)]


def _run(op, operands, **options):
    return jax.jit(lambda *given: op(*given, **options))(*operands)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("shape, dtype, format, activation", CASES + OTHERS, ids=str)
def test_bits_of_two_kernels(shape, dtype, format, activation, gathers):
    operands, (x, w) = _operands(shape, dtype, gathers)
    options = dict(activation=activation, format=format)
    made = [_run(quantized_activation, operands, **options) for _ in range(2)]
    want = _run(_two, operands, **options)
    *_, sizes, _, source = operands
    assert jax.tree.structure(made[0]) == jax.tree.structure(want)
    got, again, expected = (_defined(each, sizes) for each in (*made, want))
    for a, b, c in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    row = np.asarray(source[0]) // _places(shape)
    first, h = 0, np.asarray(made[0][0][0], np.float64)
    for g, size in enumerate(np.asarray(sizes[0])):
        part = slice(first, first := first + size)
        rows = np.where(row[part, None] < 0, 0, x[np.maximum(row[part], 0)])
        if size:
            assert relative_error(h[part], np.einsum("rk,kcf->rcf", rows, w[g])) < 5e-3


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("shape, dtype, format, activation", CASES + OTHERS, ids=str)
def test_bits_of_h_in_8_bits(shape, dtype, format, activation, gathers):
    operands, _ = _operands(shape, dtype, gathers)
    options = dict(activation=activation, format=format, narrow=True)
    made = [_run(quantized_activation, operands, **options) for _ in range(2)]
    want = _run(_two, operands, **options)
    assert jax.tree.structure(made[0]) == jax.tree.structure(want)
    for a, b, c in zip(*(_defined(each, operands[2]) for each in (*made, want)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.gpu
@needs_triton
def test_what_a_row_without_a_token_gives():
    operands, _ = _operands(SMALL, "bfloat16")
    h, first, second = _run(quantized_activation, operands, activation=Activation(), format=BLOCKS)
    live = int(np.sum(operands[2]))
    held = np.asarray(operands[-1][0, :live]) >= 0
    for x in (h, first.data, second.data):
        assert not np.asarray(x[0, :live], np.float32)[~held].any()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("activation", [Activation(), GPT_OSS], ids=str)
@pytest.mark.parametrize("format", [BLOCKS, ANY_SCALE, BYTES, WIDE], ids=str)
def test_reference_is_the_two_references(format, activation, narrow):
    operands, _ = _operands((40, 256, 128, (128, 0, 150), 106), "bfloat16")
    options = dict(activation=activation, format=format, narrow=narrow)
    got, want = (
        _run(op, operands, **options)
        for op in (
            lambda *given, **of: quantized_activation_op(*given, implementation="reference", **of),
            _two,
        )
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*(_defined(each, operands[2]) for each in (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)


# With a scale per group: contraction, F, sizes of groups (each tile's ends, and none), padding rows.
TENSOR, OF_GRADIENTS = TensorFormat(dtype=E4M3), TensorFormat(dtype="float8_e5m2")
ENDS = (0, 16, 64, 80, 112, 128, 144, 240, 256, 272, 304, 0, 1104)
BY_GROUPS = [
    (128, 512, ENDS, 0),  # one step: the second part of a tile waits for no other
    (768, 256, ENDS, 48),
    (1024, 768, (3008, 16, 0, 912), 208),
    (256, 2048, ENDS, 48),  # several tiles of each cluster
]
GROUP_CASES = [(shape, "bfloat16", Activation()) for shape in BY_GROUPS]
GROUP_CASES += [(BY_GROUPS[1], "float16", GPT_OSS)]
GROUP_CASES += [(BY_GROUPS[1], "bfloat16", Activation(function="squared_relu"))]
GROUP_CASES += [
    ((256, 128, ENDS, 48), "bfloat16", Activation())
]  # no kernel has so few columns of the gradient
# Elsewhere the first one shows that the op is the two.
GROUP_CASES[1:] = [pytest.param(*case, marks=pytest.mark.gpu) for case in GROUP_CASES[1:]]


def _of_groups(shape, dtype, format, seed):
    """Rows of which some hold no token, in 8 bits, their weights and sources: of padding rows and these NaN and -1."""
    contraction, _, sizes, dead = shape
    rng = np.random.default_rng(seed)
    C = sum(sizes) + dead
    held = (rng.random(C) >= 0.15) & (np.arange(C) < sum(sizes))
    rows = rng.normal(size=(C, contraction)) * 2.0 ** rng.integers(-3, 4, (C, 1))
    rows[~held] = np.nan
    of_sizes = jnp.asarray([sizes], jnp.int32)
    quiet = jnp.asarray(np.where(held[:, None], rows, 0), dtype)[None]
    q = jax.jit(lambda x: grouped_quantize(x, of_sizes, format))(quiet)
    weights = np.where(held, rng.uniform(0.1, 2, C), np.nan).astype(np.float32)
    source = np.where(held, rng.permutation(C), -1).astype(np.int32)
    return q, of_sizes, jnp.asarray(weights[None]), jnp.asarray(source[None])


def _of_tokens(shape, dtype, format, seed):
    """As `_of_groups`, of half as many tokens, quantized with one scale; of one without a row all bytes are NaN."""
    _, of_sizes, weights, source = _of_groups(shape, dtype, format, seed)
    rng, source, T = np.random.default_rng(seed), np.array(source), source.size // 2 + 1
    held = np.flatnonzero(source[0] >= 0)
    source[0, held] = rng.permutation(2 * (T - 1))[: held.size]
    row = np.full((T, 2), -1, np.int32)
    row.ravel()[source[0, held]] = held
    x = rng.normal(size=(1, T, shape[0])) * 2.0 ** rng.integers(-3, 4, (1, T, 1))
    x[0, T - 1] = np.nan
    rows = Moved(jnp.asarray(x, dtype), RowMap(jnp.asarray(row[None]), jnp.asarray(source)))
    q = jax.jit(lambda rows: quantize_moved(rows, of_sizes, format))(rows)
    return q, of_sizes, weights, rows.row_map.source


def _rows_in_8_bits(shape, dtype, format, seed, gathers):
    return (_of_tokens if gathers else _of_groups)(shape, dtype, format, seed)


def _written(rows):
    """The rows, by another route than an index in a kernel."""
    return jax.jit(written)(rows)


def _weight_of_groups(shape, dtype, *dims):
    w = np.random.default_rng(5).normal(size=(len(shape[2]), *dims)) / dims[0] ** 0.5
    of_weight = jax.jit(lambda x: quantize(x, TENSOR, batch_dims=1))
    return of_weight(jnp.asarray(w, dtype))


def _same(got, want, sizes):
    """Whether results are the same bits but for padding rows, and scales of groups all."""
    live = int(np.sum(sizes))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        is_rows = a.shape[1] > len(sizes[0])
        a, b = (np.asarray(x)[:, :live] if is_rows else np.asarray(x) for x in (a, b))
        np.testing.assert_array_equal(
            np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)
        )


@pytest.mark.any_device
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("shape, dtype, activation", GROUP_CASES, ids=str)
def test_bits_of_two_ops_with_a_scale_per_group(shape, dtype, activation, gathers, monkeypatch):
    monkeypatch.setattr(by_groups, "ROWS_AT_ONCE", 1)
    x, sizes, weights, source = _rows_in_8_bits(shape, dtype, TENSOR, 1, gathers)
    assert quantizes_activation(x, activation, (TENSOR, TENSOR))
    operands = x, _weight_of_groups(shape, dtype, shape[0], 2, shape[1]), sizes, weights, source
    options = dict(activation=activation, format=TENSOR)
    got, again = (_run(quantized_activation, operands, **options) for _ in range(2))
    _same(got, again, sizes)
    _same(got, _run(_two, (_written(x), *operands[1:]), **options), sizes)
    held = np.asarray(source[0]) >= 0
    assert not np.asarray(got[1].data, np.float32)[0, : int(np.sum(sizes))][
        ~held[: int(np.sum(sizes))]
    ].any()


@pytest.mark.any_device
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("shape, dtype, activation", GROUP_CASES, ids=str)
def test_bits_of_two_ops_of_the_gradient(shape, dtype, activation, gathers, monkeypatch):
    monkeypatch.setattr(by_groups, "ROWS_AT_ONCE", 1)
    contraction, F, *_ = shape
    dy, sizes, weights, source = _rows_in_8_bits(shape, dtype, OF_GRADIENTS, 2, gathers)
    rng = np.random.default_rng(3)
    h = rng.normal(size=(*source.shape, 2, F)) * 2.0 ** rng.integers(-3, 3, (*source.shape, 1, 1))
    h[np.asarray(source) < 0] = np.nan
    operands = dy, _weight_of_groups(shape, dtype, F, contraction), jnp.asarray(h, dtype)
    operands += weights, source, sizes
    assert quantizes_activation_grad(dy, operands[2], activation, (OF_GRADIENTS, OF_GRADIENTS))

    def two(dy, rhs, h, weights, source, sizes):
        d_a = grouped_gemm_dgrad_op(dy, rhs, sizes, out_dtype=h.dtype)
        formats = OF_GRADIENTS, OF_GRADIENTS
        routing = dict(weights=weights, row_source=source)
        return activate_grad_quantize(h, d_a, sizes, formats, activation, **routing)

    options = dict(activation=activation, format=OF_GRADIENTS)
    got, again = (_run(quantized_activation_grad, operands, **options) for _ in range(2))
    want = _run(two, (_written(dy), *operands[1:]))
    _same(got, again, sizes)
    # A gradient of weights is a sum in another order.
    _same(got[:2], want[:2], sizes)
    live = int(np.sum(sizes))
    assert (
        relative_error(got.d_weights[0, :live], np.asarray(want.d_weights[0, :live], np.float64))
        < 1e-5
    )
    assert not np.asarray(got.d_weights)[np.asarray(source) < 0].any()


def test_what_the_kernels_of_groups_take():
    of = dict(
        rows=2**18, tokens=2**18, contraction=768, width=512, groups=64, dtype=jnp.float8_e4m3fn
    )
    of |= dict(function="silu", device=Device())
    chosen = by_groups.choose_quantized, by_groups.choose_quantized_grad
    for choose in chosen:
        assert choose(by_groups.Projection(**of), jnp.bfloat16) is not None
        assert choose(by_groups.Projection(**of), jnp.float32) is None
        split = choose(by_groups.Projection(**of, splits=True), jnp.bfloat16)
        assert (split is None) == (choose is by_groups.choose_quantized)
        for other in (
            dict(contraction=192),
            dict(function="gelu_exact"),
            dict(groups=2048),
            dict(width=64),
        ):
            assert choose(by_groups.Projection(**of | other), jnp.bfloat16) is None, other


@needs_triton
@pytest.mark.parametrize("gathers", [True, False], ids=["tokens", "rows"])
def test_what_the_kernel_is_given(gathers, monkeypatch):
    """Rows of tokens or as they are, shapes as its text has them, and shared memory with room for all."""
    from expertmesh.core.kernels import quantized_activation as kernels

    found = {}

    def record(*operands, out_type, **launch):
        found.update(operands=operands, **launch)
        return [jnp.zeros(x.shape, x.dtype) for x in out_type]

    monkeypatch.setattr(kernels.cuda, "cuda_call", record)
    (T, K, F, sizes, dead), (operands, _) = SMALL, _operands(SMALL, "bfloat16", gathers)
    C, G = sum(sizes) + dead, len(sizes)
    options = dict(activation=Activation(), format=BLOCKS, narrow=False)
    run = inspect.unwrap(kernels._in_blocks)
    h, data, scale, data_rows, scale_rows = run(*operands, **options, device=Device())
    rows, index, row_scales, weight, weight_scales, *_ = found["operands"]
    source = operands[-1][0]
    if gathers:
        np.testing.assert_array_equal(index, source // _places(SMALL))
        assert row_scales.shape == (T, 3) and found["scalars"] == (T, K, C, 3, F, G)
    else:
        np.testing.assert_array_equal(index, source)
        assert row_scales.shape == (C, 3) and found["scalars"] == (C, 3, F, G)
        assert rows.box == (128, 128)
    assert weight_scales.shape == (G, 2 * F // 128, 3) and weight.box == (1, 128, 128)
    assert h.shape == (1, C, 2, F) and data.shape == data_rows.shape == (1, C, F)
    assert scale.shape == (1, C, F // 128) and scale_rows.shape == (1, C // 128, F)
    stages, scratch = (
        int(re.search(rf"#define {name} (\d+)", found["source"])[1])
        for name in ("STAGES", "SCRATCH")
    )
    taken = 2 * 64 * 256 * 2 + stages * (384 * 128 + 128 * 4) + 320 + scratch + 8 * (G + 1)
    assert taken <= found["shared"] == 232448


GIVEN = dict(
    rows=327680, contraction=768, width=256, groups=128, dtype=jnp.bfloat16, blocks=(128, 128),
    function="silu", device=Device(),
)  # fmt: skip


def test_what_the_kernel_takes():
    taken = choice.choose(choice.Projection(**GIVEN))
    assert taken is not None and taken.programs == 132 and taken.tiles.stages == 3
    others = [
        dict(contraction=4097), dict(width=192), dict(groups=1025), dict(dtype=jnp.float32),
        dict(function="gelu_exact"), dict(device=Device(capability=100)), dict(rows=327688),
        dict(device=Device(nvrtc=False)), dict(blocks=(128, 32)), dict(blocks=(32, 128)),
    ]  # fmt: skip
    for other in others:
        assert choice.choose(choice.Projection(**GIVEN | other)) is None, other


@pytest.mark.parametrize("change", [dict(contraction=4096), dict(groups=1024), dict(rows=2**25)])
def test_what_it_still_takes(change):
    assert choice.choose(choice.Projection(**GIVEN | change)) is not None
