"""gathered_gemm is a grouped GEMM of permuted rows, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.core import grouped_gemm, permute, plan_permute
from expertmesh.core.linear.gathered_gemm import gathered_gemm
from expertmesh.core.testing import relative_error

T, K, N, E, TOP_K = 50, 24, 16, 6, 3


def _operands():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(T, K)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(E, K, N)), jnp.float32)
    idx = rng.integers(-1, E, (T, TOP_K)).astype(
        np.int32
    )  # some are not routed, one expert has no tokens
    return x, w, plan_permute(jnp.where(idx == 2, -1, idx), num_experts=E, alignment=8)


def test_value_and_gradients():
    x, w, plan = _operands()
    rows = int(plan.group_sizes.sum())
    c = np.random.default_rng(1).normal(size=(plan.source.shape[0], N)).astype(np.float32)
    c[rows:] = np.nan  # padding rows have no gradient

    @jax.jit
    def run(x, w, plan):
        y, pull = jax.vjp(lambda x, w: gathered_gemm(x, w, plan), x, w)
        return y, pull(c)

    y, (dx, dw) = run(x, w, plan)
    wide = np.zeros((len(c), N))
    dx_want, dw_want = np.zeros(x.shape), np.zeros(w.shape)
    expert = np.repeat(np.arange(E), plan.group_sizes)
    for row, token in enumerate(np.asarray(plan.token)[:rows]):
        if token >= 0:
            e = expert[row]
            wide[row] = np.asarray(x[token], np.float64) @ w[e]
            dx_want[token] += np.asarray(w[e], np.float64) @ c[row]
            dw_want[e] += np.outer(x[token], c[row])
    assert relative_error(y, wide) < 1e-6
    assert relative_error(dx, dx_want) < 1e-6
    assert relative_error(dw, dw_want) < 1e-6
    assert not np.asarray(dw[2]).any()


def test_on_shards_of_experts_and_tokens():
    x, w, _ = _operands()
    rng = np.random.default_rng(2)
    x = jnp.stack([x, 2 * x])
    idx = jnp.asarray(rng.integers(0, E, (2, T, TOP_K)), jnp.int32)
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    want = jnp.stack(
        [
            grouped_gemm(permute(x[p], q := plan_permute(idx[p], num_experts=E)), w, q.group_sizes)
            for p in (0, 1)
        ]
    )
    with jax.set_mesh(mesh):
        split = jax.NamedSharding(mesh, jax.P("dp"))
        got = jax.jit(lambda x, idx, w: gathered_gemm(x, w, plan_permute(idx, num_experts=E)))(
            jax.device_put(x, split), jax.device_put(idx, split), w
        )
    assert got.sharding.spec[0] == "dp"
    assert relative_error(got, np.asarray(want, np.float64)) < 1e-6


def test_errors():
    x, w, plan = _operands()
    with pytest.raises(ValueError, match="tokens of its plan"):
        gathered_gemm(x[1:], w, plan)
    with pytest.raises(ValueError, match="transpose rhs"):
        gathered_gemm(x, w.swapaxes(1, 2), plan)
