"""The Triton kernel of a group bias' gradient on a GPU, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.linear.grouped_gemm import group_bias_grad_op
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [[700, 0, 1, 33], [5], [0, 0, 3000]], ids=str)
def test_sums_of_groups_repeat_bitwise(sizes, dtype, weighted):
    """Padding rows are NaN and reach nothing; an empty group's sum is zeros."""
    rng = np.random.default_rng(0)
    live = sum(sizes)
    dy = rng.normal(size=(1, live + 70, 2, 200)) * 2.0 ** rng.integers(
        -8, 9, size=(live + 70, 1, 1)
    )
    dy[:, live:] = np.nan
    weights = rng.normal(size=(1, live + 70)).astype(np.float32)
    weights[:, live:] = np.nan
    dy, group_sizes = jnp.asarray(dy, dtype), jnp.asarray([sizes], jnp.int32)

    @jax.jit
    def run(dy, sizes, weights):
        options = {"num_experts": sizes.shape[1], "out_dtype": jnp.dtype("float32")}
        return group_bias_grad_op(dy, sizes, weights, implementation="triton", **options)

    operands = dy, group_sizes, weights if weighted else None
    got, again = run(*operands), run(*operands)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
    first = 0
    for group, size in enumerate(sizes):
        rows = np.asarray(dy[0, first : first + size], np.float64)
        if weighted:
            rows *= weights[0, first : first + size, None, None]
        first += size
        if size == 0:
            assert not np.asarray(got[group]).any()
            continue
        bound = 1e-6 * np.abs(rows).sum(0)
        assert (np.abs(np.asarray(got[group], np.float64) - rows.sum(0)) <= bound).all()
        assert relative_error(got[group], rows.sum(0)) < 1e-5
