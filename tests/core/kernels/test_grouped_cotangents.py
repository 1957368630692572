"""The kernel that reads an output gradient once for an adapter's inner rows and its second weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.kernels.choice.thin_gemm import choose_both
from expertmesh.core.kernels.device import Device
from expertmesh.core.linear.grouped_gemm import grouped_cotangents_op
from expertmesh.core.testing import relative_error

# Rows, their width, the rank, groups, padding rows; a group of several slabs, and ranks that one tile does not hold.
SHAPES = [
    (1000, 512, 24, 5, 137),
    (9000, 392, 16, 3, 100),
    (3000, 264, 64, 40, 900),
    (700, 256, 128, 4, 60),
    (90, 24, 8, 3, 20),
]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64_loops_and_repeats_bitwise(shape, dtype, capability):
    C, N, T, G, dead = shape
    rng = np.random.default_rng(C + N)
    sizes = rng.multinomial(C - dead, [1 / G] * G).astype(np.int32)
    sizes[0] += sizes[1]
    sizes[1] = 0  # an empty group
    live, starts = sizes.sum(), np.cumsum(sizes) - sizes
    dy, b, u = (
        np.array(jnp.asarray(rng.normal(size=n), dtype), np.float64)
        for n in ((C, N), (G, T, N), (C, T))
    )
    dy *= 2.0 ** rng.integers(-3, 4, size=(C, 1))
    want = np.zeros((C, T)), np.zeros((G, T, N))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        want[0][rows], want[1][g] = dy[rows] @ b[g].T, u[rows].T @ dy[rows]
    dy[live:] = u[live:] = np.nan  # must reach nothing
    operands = [jnp.asarray(x, dtype) for x in (dy[None], b, u[None])]

    @jax.jit
    def run(dy, b, u, sizes):
        return grouped_cotangents_op(dy, b, sizes, u, implementation="triton")

    got, again = (run(*operands, sizes[None]) for _ in range(2))
    for x, y, expected in zip(
        (got[0][0, :live], got[1]), (again[0][0, :live], again[1]), want, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert relative_error(np.asarray(x), expected[:live] if x.ndim == 2 else expected) < 2e-5
    assert not np.asarray(got[1][1]).any(), "the empty group has a gradient"


def test_slabs_are_for_gpus_whose_tensor_cores_read_shared_memory():
    for T in (8, 16, 32, 64):
        slabs = choose_both(T, Device())
        held = slabs.columns * slabs.step * slabs.stages + slabs.columns * max(T, 16)
        assert 2 * held < 227 * 1024
        assert choose_both(T, Device(capability=89)) is None
    assert choose_both(128, Device()) is None
