"""The kernels of the grouped GEMM on a GPU, against float64 loops; the contract suite runs them too."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import MISSING, needs_triton
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.testing import relative_error

# Rows, contraction, width, groups, padding rows; none is a multiple of a tile. Of the weight gradients
# of the first one, on Hopper, all tiles are halved; of the fifth one, those after the first 66.
SHAPES = [
    (1000, 512, 776, 5, 137),
    (333, 520, 264, 7, 0),
    (4096, 1024, 512, 64, 900),
    (77, 8, 8, 3, 77),
    (600, 640, 1000, 9, 20),
    (200, 8200, 136, 3, 20),  # on Hopper the kernels of long contractions
    (200, 136, 8200, 3, 20),
    (1200, 392, 1352, 20, 30),  # on Hopper the tiles of small groups, the last ones cut
    (3000, 264, 520, 9, 13),
]


def _operands(C, K, N, G, dead, dtype):
    rng = np.random.default_rng(C)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[1] = 0  # an empty group
    live = sizes.sum()
    scale = 2.0 ** rng.integers(-3, 4, size=(C, 1))
    lhs, dy = rng.normal(size=(C, K)) * scale, rng.normal(size=(C, N)) * scale
    lhs[live:] = dy[live:] = np.nan  # must reach nothing
    rhs = rng.normal(size=(G, K, N))
    return [jnp.asarray(x, dtype) for x in (lhs[None], dy[None], rhs)], jnp.asarray(sizes[None])


def _kernels(lhs, dy, rhs, sizes):
    """What the kernels give, in float32."""
    options = {"implementation": "triton", "out_dtype": jnp.dtype("float32")}
    return (
        grouped_gemm_op(lhs, rhs, sizes, clear_padding=True, **options)[0],
        grouped_gemm_dgrad_op(dy, rhs, sizes, clear_padding=True, **options)[0],
        grouped_gemm_wgrad_op(lhs, dy, sizes, num_experts=rhs.shape[0], **options),
    )


def _oracle(lhs, dy, rhs, sizes):
    lhs, dy, rhs = (np.asarray(x, np.float64) for x in (lhs[0], dy[0], rhs))
    out, dlhs, drhs = (np.zeros(s) for s in (dy.shape, lhs.shape, rhs.shape))
    first = 0
    for g, size in enumerate(np.asarray(sizes[0])):
        rows = slice(first, first := first + size)
        out[rows], dlhs[rows] = lhs[rows] @ rhs[g], dy[rows] @ rhs[g].T
        drhs[g] = lhs[rows].T @ dy[rows]
    return out, dlhs, drhs


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_float64_loops_and_repeat_bitwise(shape, dtype):
    (lhs, dy, rhs), sizes = _operands(*shape, dtype)
    run = jax.jit(_kernels)
    got, again = run(lhs, dy, rhs, sizes), run(lhs, dy, rhs, sizes)
    for x, y, want in zip(got, again, _oracle(lhs, dy, rhs, sizes), strict=True):
        assert relative_error(x, want) < 2e-5  # cut off in tensor cores: grows with a sum's length
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    live = int(sizes.sum())
    assert not np.asarray(got[0][live:]).any() and not np.asarray(got[1][live:]).any()
    assert not np.asarray(got[2][1]).any(), "the empty group has a gradient"


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    "dtype, out", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("which", ["forward", "input gradient"])
@pytest.mark.parametrize(
    "rows, narrow, width, groups",
    [(5000, 520, 4104, 6), (9000, 72, 1032, 200), (500, 520, 1544, 6)],
)
def test_results_over_several_rounds_of_tiles(rows, narrow, width, groups, which, dtype, out):
    """Some six tiles for each cluster of Hopper's kernel, and a few more, which are divided; of small groups nine, and
    some, for which fewer clusters take ten; and a few tiles of small groups, which are divided, too."""
    wide = which == "forward"
    K, N = (narrow, width) if wide else (width, narrow)
    (lhs, dy, rhs), sizes = _operands(rows, K, N, groups, 100, dtype)
    options = {"implementation": "triton", "out_dtype": jnp.dtype(out), "clear_padding": True}
    op, x = (grouped_gemm_op, lhs) if wide else (grouped_gemm_dgrad_op, dy)
    run = jax.jit(lambda *given: op(*given, **options)[0])

    got, again = (np.asarray(run(x, rhs, sizes), np.float64) for _ in range(2))
    want, live = _oracle(lhs, dy, rhs, sizes)[0 if wide else 1], int(sizes.sum())
    # By rows, whose sizes differ: an error of one tile does not hide behind large rows.
    off, length = (np.linalg.norm(rows[:live], axis=1) for rows in (got - want, want))
    assert (off < max(float(jnp.finfo(out).eps), 1e-5) * length).all()
    assert not got[live:].any()
    np.testing.assert_array_equal(got, again)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(5000, 1032, 4104, 6, 100), (6000, 520, 2056, 60, 100)], ids=str)
def test_weight_gradients_of_16_bits_over_several_rounds_of_tiles(shape, dtype):
    """Some six tiles for each cluster of Hopper's kernel, and a few more, which are halved; of small groups 21, from a
    queue."""
    (lhs, dy, _), sizes = _operands(*shape, dtype)
    options = {"implementation": "triton", "out_dtype": jnp.dtype(dtype), "num_experts": shape[3]}
    run = jax.jit(lambda *given: grouped_gemm_wgrad_op(*given, **options))

    got, again = (np.asarray(run(lhs, dy, sizes), np.float64) for _ in range(2))
    ends = np.cumsum(sizes[0])
    for g, (end, size) in enumerate(zip(ends, np.asarray(sizes[0]), strict=True)):
        x, y = (np.asarray(z[0, end - size : end], np.float64) for z in (lhs, dy))
        want = x.T @ y
        # By rows: an error of one tile does not hide behind the others.
        off, length = (np.linalg.norm(rows, axis=1) for rows in (got[g] - want, want))
        assert (off <= float(jnp.finfo(dtype).eps) * length).all()
    np.testing.assert_array_equal(got, again)


@pytest.mark.gpu
@needs_triton
def test_groups_that_are_shorter_than_a_step_take_no_other_rows():
    """At both ends of the buffer, and where no window of Hopper's kernel ends with the group."""
    rows, K, N = 200, 136, 264
    sizes = np.asarray([1, 3, 0, 40, 7, 64, 65, 1], np.int32)
    rng = np.random.default_rng(0)
    lhs, dy = (rng.normal(size=(rows, width)) for width in (K, N))
    live = sizes.sum()
    lhs[live:] = dy[live:] = np.nan
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        # All other groups are NaN.
        x, y = np.full_like(lhs, np.nan), np.full_like(dy, np.nan)
        mine = slice(end - size, end)
        x[mine], y[mine] = lhs[mine], dy[mine]
        x, y = (jnp.asarray(z[None], "bfloat16") for z in (x, y))
        options = {"implementation": "triton", "out_dtype": jnp.dtype("float32")}
        got = grouped_gemm_wgrad_op(x, y, jnp.asarray(sizes[None]), num_experts=8, **options)
        want = np.asarray(x[0, mine], np.float64).T @ np.asarray(y[0, mine], np.float64)
        np.testing.assert_allclose(got[group], want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_triton
def test_more_groups_than_threads():
    (lhs, dy, rhs), sizes = _operands(2000, 64, 136, 500, 13, "bfloat16")
    options = {"implementation": "triton", "out_dtype": jnp.dtype("bfloat16")}
    got = (
        grouped_gemm_op(lhs, rhs, sizes, clear_padding=True, **options)[0],
        grouped_gemm_dgrad_op(dy, rhs, sizes, clear_padding=True, **options)[0],
        grouped_gemm_wgrad_op(lhs, dy, sizes, num_experts=500, **options),
    )
    for x, want in zip(got, _oracle(lhs, dy, rhs, sizes), strict=True):
        assert relative_error(x, want) < 5e-3


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("queued", [0, 1, 5])
# Of small groups, and some six tiles for each cluster.
@pytest.mark.parametrize("shape", [(4096, 1024, 512, 64, 900), (5000, 1032, 4104, 6, 100)], ids=str)
def test_programs_among_other_devices_change_no_bit(shape, queued, monkeypatch):
    """Waves with tiles from a queue; or of weight gradients four on each multiprocessor, with tiles of their own."""
    from expertmesh.core.kernels import device
    from expertmesh.core.kernels import grouped_gemm as kernels

    (lhs, dy, rhs), sizes = _operands(*shape, "bfloat16")

    def in_poison(kernel, *given, **options):
        function = partial(kernel, out_dtype=jnp.dtype("bfloat16"), **options)
        out = jax.eval_shape(function, *given)
        run = jax.jit(lambda _, *given: function(*given), donate_argnums=0, keep_unused=True)
        return np.asarray(run(jnp.full(out.shape, jnp.nan, out.dtype), *given), np.float32)

    def results():
        jax.clear_caches()
        out = in_poison(kernels.rows, lhs, rhs, sizes, clear_padding=True)
        dlhs = in_poison(kernels.rows_dgrad, dy, rhs, sizes, clear_padding=True)
        return out, dlhs, in_poison(kernels.weights, lhs, dy, sizes, num_experts=rhs.shape[0])

    alone, of = results(), device.current_device()
    if queued:
        monkeypatch.setattr(device, "current_device", lambda: dataclasses.replace(of, alone=False))
        monkeypatch.setattr(device, "MIN_STEPS", 1 if queued > 1 else 2**30)
    else:
        monkeypatch.setattr(device.Device, "programs", lambda *_: 4 * of.multiprocessors)
    for before, after in zip(alone, results(), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.gpu
@needs_triton
@pytest.mark.usefixtures("capability")
def test_kernels_of_few_rows_write_every_element():
    """By Triton's interpreter too, where memory that nobody has written is not zero."""
    operands, sizes = _operands(100, 72, 40, 4, 30, "float16")
    for x, want in zip(_kernels(*operands, sizes), _oracle(*operands, sizes), strict=True):
        assert relative_error(x, want) < 2e-5
        assert not np.asarray(x)[want == 0].any()


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape", [(1000, 512, 776, 5, 137), (200, 8200, 136, 3, 20)], ids=str)
def test_padding_rows_that_are_not_cleared_change_no_other(shape):
    (lhs, dy, rhs), sizes = _operands(*shape, "bfloat16")
    live = int(sizes.sum())
    for op, rows in ((grouped_gemm_op, lhs), (grouped_gemm_dgrad_op, dy)):
        written, left = (
            op(
                rows,
                rhs,
                sizes,
                implementation="triton",
                out_dtype=jnp.dtype("bfloat16"),
                clear_padding=clear_padding,
            )
            for clear_padding in (True, False)
        )
        np.testing.assert_array_equal(
            *(np.asarray(x[0, :live], np.float32) for x in (written, left))
        )


def test_a_kernel_asked_for_by_name_says_why_it_cannot_run():
    (lhs, _, rhs), sizes = _operands(16, 8, 8, 3, 0, "float32")
    platform = jax.default_backend()
    error = ImportError if MISSING else ValueError
    reason = "pip install" if MISSING else "bfloat16" if platform == "gpu" else "cuda"
    with pytest.raises(error, match=reason):
        grouped_gemm_op(lhs, rhs, sizes, out_dtype=jnp.dtype("float32"), implementation="triton")
