"""Arrays of more than 2^31 elements on a GPU: their last rows are right, forward and in the gradients.

Row m is row m % R of a table, so that the sums over rows are those of R rows, weighted by how often each occurs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import grouped_gemm, permute, plan_permute, unpermute
from expertmesh.core.linear.grouped_gemm import grouped_gemm_op, grouped_gemm_wgrad_op
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.testing import relative_error

pytestmark = [pytest.mark.gpu, needs_triton]
R = 97


def _table(seed, rows, columns):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, columns)), jnp.bfloat16)


def _wide(array):
    return np.asarray(array, np.float64)


# Rows, contraction, width, groups.
PRODUCTS = {
    "lhs": (2**19 + 64, 4160, 64, 3),
    "result": (2**18 + 64, 64, 8256, 3),
    "rhs": (1280, 8192, 4224, 64),
}


@pytest.mark.parametrize("large", PRODUCTS)
def test_products(large):
    M, K, N, G = PRODUCTS[large]
    assert {"lhs": M * K, "result": M * N, "rhs": G * K * N}[large] > 2**31
    sizes = np.full(G, M // G, np.int32)
    sizes[0] += M - sizes.sum() + 5
    sizes[-1] -= 5
    x_table, dy_table, w_table = _table(0, R, K), _table(1, R, N), _table(2, K, N)
    ends = np.cumsum(sizes)
    rows = np.array([0, ends[0] - 1, ends[0], ends[-2], M - 2, M - 1])
    groups = np.searchsorted(ends, rows, side="right")

    @jax.jit
    def run(x_table, dy_table, w_table):
        at = jnp.arange(M) % R
        w = w_table * (1 + jnp.arange(G, dtype=jnp.bfloat16) / 64)[:, None, None]
        x, dy = x_table[at][None], dy_table[at][None]
        y, pull = jax.vjp(lambda x, w: grouped_gemm(x, w, jnp.asarray(sizes)[None]), x, w)
        dx, dw = pull(dy)
        return y[0, rows], dx[0, rows], w[groups], dw[jnp.array([0, G - 1])]

    y, dx, w, dw = run(x_table, dy_table, w_table)
    x, dy = _wide(x_table), _wide(dy_table)
    assert relative_error(y, np.einsum("rk,rkn->rn", x[rows % R], _wide(w))) < 1e-2
    assert relative_error(dx, np.einsum("rn,rkn->rk", dy[rows % R], _wide(w))) < 1e-2
    for which, begin, end in ((0, 0, ends[0]), (1, ends[-2], M)):
        times = np.bincount(np.arange(begin, end) % R, minlength=R)
        assert relative_error(dw[which], (x * times[:, None]).T @ dy) < 1e-2


def test_rows():
    T, K, D, E = 2**18 + 32, 2, 4160, 16
    assert T * K * D > 2**31
    table = _table(0, R, D)
    idx = np.stack([np.arange(T) % E, (np.arange(T) + 3) % E], 1)[None]
    last = np.array([0, T * K - 2, T * K - 1])

    @jax.jit
    def run(table, idx):
        plan = plan_permute(idx, num_experts=E)
        rows = permute(table[jnp.arange(T) % R][None], plan)
        y = unpermute(rows, plan)
        return rows[0, last], plan.token[0, last], y[0, jnp.array([0, T - 1])]

    rows, token, y = run(table, jnp.asarray(idx, jnp.int32))
    np.testing.assert_array_equal(rows, table[np.asarray(token) % R])
    assert relative_error(y, 2 * _wide(table)[np.array([0, T - 1]) % R]) < 1e-2


def test_gathered_rows():
    T, C, K, N = 2**19 + 64, 512, 4160, 64
    assert T * K > 2**31
    table, w = _table(0, R, K), _table(1, K, N)
    index = T - 1 - np.arange(C, dtype=np.int32) * (T // C)  # from the last row down

    @jax.jit
    def run(table, w, index):
        x, sizes = table[jnp.arange(T) % R], jnp.array([[C]], jnp.int32)
        rows = Moved(x[None], RowMap(jnp.zeros((1, T), jnp.int32), index[None]))
        return grouped_gemm_op(rows, w[None], sizes, out_dtype=table.dtype)[0]

    y = run(table, w, index)
    assert relative_error(y, _wide(table)[index % R] @ _wide(w)) < 1e-2


@pytest.mark.parametrize("gathers", ["lhs", "dy"])
def test_gradients_of_gathered_rows(gathers):
    T, C, K, N = 2**19 + 64, 512, 4160, 64
    table, other = _table(0, R, K), _table(1, C, N)
    index = T - 1 - np.arange(C, dtype=np.int32) * (T // C)

    @jax.jit
    def run(table, other, index):
        x, sizes = table[jnp.arange(T) % R], jnp.array([[C]], jnp.int32)
        rows = Moved(x[None], RowMap(jnp.zeros((1, T), jnp.int32), index[None]))
        operands = (rows, other[None]) if gathers == "lhs" else (other[None], rows)
        return grouped_gemm_wgrad_op(*operands, sizes, num_experts=1, out_dtype=table.dtype)[0]

    got, want = run(table, other, index), _wide(table)[index % R].T @ _wide(other)
    assert relative_error(got, want if gathers == "lhs" else want.T) < 1e-2
