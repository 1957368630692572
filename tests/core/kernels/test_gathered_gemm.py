"""The kernels of gathered rows, against float64 loops: on a GPU, and what the one in CUDA C++ is given without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.kernels.device import Device
from expertmesh.core.linear.grouped_gemm import (
    grouped_gemm_dgrad_op,
    grouped_gemm_op,
    grouped_gemm_wgrad_op,
)
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

# Tokens, rows, contraction, width, groups, padding rows; none is a multiple of a tile.
SHAPES = [
    (300, 1000, 512, 776, 5, 137),
    (1024, 4096, 1032, 512, 64, 900),
    (99, 600, 72, 1000, 9, 20),
    (50, 77, 8, 8, 3, 77),
    (40, 200, 8200, 136, 3, 20),  # a contraction that is left to the other kernel
    (2000, 9000, 264, 24, 20, 300),  # thin both ways
    (300, 1000, 128, 128, 5, 137),
    (700, 1200, 392, 1352, 20, 30),  # on Hopper the weight gradient's tiles of small groups
]
CASES = [(shape, "bfloat16", "bfloat16") for shape in SHAPES]
FEW = 30, 90, 40, 24, 3, 20  # for Triton's interpreter
CASES += [(shape, "float16", "float32") for shape in (SHAPES[0], SHAPES[-1], FEW)]


def _operands(shape, dtype):
    """Tokens of both widths, rows of both, weights, the rows' tokens and the groups' sizes."""
    T, C, K, N, G, dead = shape
    rng = np.random.default_rng(C)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[1] = 0  # an empty group
    live = sizes.sum()
    tokens, rows = (
        [rng.normal(size=(n, w)) * 2.0 ** rng.integers(-3, 4, size=(n, 1)) for w in (K, N)]
        for n in (T, C)
    )
    index = rng.integers(-1, T - 1, C).astype(np.int32)
    index[::7] = T  # no such row
    index[live:] = T - 1
    for each in tokens:
        each[T - 1] = np.nan  # must reach nothing
    for each in rows:
        each[live:] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (*tokens, *rows, rng.normal(size=(G, K, N)))]
    return arrays, index, sizes


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape, dtype, out", CASES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(shape, dtype, out, capability):
    (x, dy, rows, d_rows, w), index, sizes = _operands(shape, dtype)

    @jax.jit
    def run(x, dy, rows, d_rows, w, index, sizes):
        # A token's own places are not read.
        row_map = RowMap(jnp.zeros((1, len(x)), jnp.int32), index[None])
        x, dy = (Moved(tokens[None], row_map) for tokens in (x, dy))
        options = {"implementation": "triton", "out_dtype": jnp.dtype(out)}
        cleared, weights = options | {"clear_padding": True}, options | {"num_experts": len(w)}
        return (
            grouped_gemm_op(x, w, sizes[None], **cleared)[0],
            grouped_gemm_dgrad_op(dy, w, sizes[None], **cleared)[0],
            grouped_gemm_wgrad_op(x, d_rows[None], sizes[None], **weights),
            grouped_gemm_wgrad_op(rows[None], dy, sizes[None], **weights),
        )

    missing = (index < 0) | (index >= len(x))
    wide = [np.asarray(a, np.float64) for a in (x, dy, rows, d_rows, w)]
    of_x, of_dy = (np.where(missing[:, None], 0, a[np.where(missing, 0, index)]) for a in wide[:2])
    want = [np.zeros((len(index), a.shape[1])) for a in (dy, x)]
    want += [np.zeros(w.shape) for _ in range(2)]
    first = 0
    for g, size in enumerate(sizes):
        part = slice(first, first := first + size)
        want[0][part] = of_x[part] @ wide[4][g]
        want[1][part] = of_dy[part] @ wide[4][g].T
        want[2][g] = of_x[part].T @ wide[3][part]
        want[3][g] = wide[2][part].T @ of_dy[part]
    operands = x, dy, rows, d_rows, w, index, sizes
    got, again = run(*operands), run(*operands)
    for a, b, expected in zip(got, again, want, strict=True):
        assert relative_error(a, expected) < (2e-5 if out == "float32" else 5e-3)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a in got[:2]:
        assert not np.asarray(a[first:]).any() and not np.asarray(a)[missing].any()
    for a in got[2:]:
        assert not np.asarray(a[1]).any(), "the empty group has a gradient"


@needs_triton
@pytest.mark.parametrize("moved", ["lhs", "dy", "both"])
def test_what_hoppers_weight_gradient_is_given(moved, monkeypatch):
    """The operand whose rows it finds, and their index, by a launch in NumPy."""
    from expertmesh.core.kernels import device as of_device
    from expertmesh.core.kernels import gathered_gemm as kernels

    gathered = []

    def launch(lhs, dy, group_sizes, *, config, out_dtype, index, gathers):
        del config
        gathered.append(gathers)
        operands = {"lhs": np.asarray(lhs, np.float64), "dy": np.asarray(dy, np.float64)}
        operands[gathers] = np.stack(
            [
                operands[gathers][i] if i >= 0 else 0 * operands[gathers][0]
                for i in np.asarray(index)
            ]
        )
        assert [len(x) for x in operands.values()] == [len(index)] * 2
        ends = np.cumsum(np.asarray(group_sizes))
        parts = [slice(end - size, end) for size, end in zip(group_sizes, ends, strict=True)]
        products = [operands["lhs"][part].T @ operands["dy"][part] for part in parts]
        return jnp.asarray(np.stack(products), out_dtype)

    monkeypatch.setattr(of_device, "current_device", Device)
    monkeypatch.setattr(kernels.cuda, "launch_weights", launch)
    (x, dy, rows, d_rows, w), index, sizes = _operands(FEW, "bfloat16")
    row_map = RowMap(jnp.zeros((1, len(x)), jnp.int32), jnp.asarray(index[None]))
    lhs = rows[None] if moved == "dy" else Moved(x[None], row_map)
    other = d_rows[None] if moved == "lhs" else Moved(dy[None], row_map)
    options = dict(num_experts=len(w), out_dtype=jnp.float32)
    got = kernels.weights(lhs, other, jnp.asarray(sizes[None]), **options)
    missing = (index < 0) | (index >= len(x))
    wide = [np.asarray(a, np.float64) for a in (x, dy, rows, d_rows)]
    of_x, of_dy = (np.where(missing[:, None], 0, a[np.where(missing, 0, index)]) for a in wide[:2])
    of_x, of_dy = wide[2] if moved == "dy" else of_x, wide[3] if moved == "lhs" else of_dy
    first = 0
    for g, size in enumerate(sizes):
        part = slice(first, first := first + size)
        assert relative_error(got[g], of_x[part].T @ of_dy[part]) < 1e-6, g
    assert gathered == ["dy" if moved == "dy" else "lhs"]
