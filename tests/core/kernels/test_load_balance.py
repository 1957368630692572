"""The kernels of the balance losses' sums on a GPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.router import balance as ops
from expertmesh.core.testing import relative_error


def _logits(shape, dtype):
    """Some wide; where a token is masked, NaN. The mask."""
    rng = np.random.default_rng(shape[-1])
    x = rng.normal(size=shape) * rng.choice([0.3, 3, 12], size=(*shape[:-1], 1))
    mask = rng.random(shape[:-1]) < 0.8
    return jnp.asarray(x, dtype), mask


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((5003, 256), "float32"),
        ((3, 40, 200), "bfloat16"),
        ((1, 7), "float32"),
        ((9, 2048), "float16"),
    ],
)
def test_sums(shape, dtype, score_function, masked):
    logits, mask = _logits(shape, dtype)
    live = mask if masked else np.ones_like(mask)
    x = np.asarray(logits, np.float64)[live]
    given = (
        (jnp.where(mask[..., None], logits, jnp.nan), jnp.asarray(mask))
        if masked
        else (logits, None)
    )

    @jax.jit
    def run(*given):
        options = {"implementation": "triton"}
        sums = ops._prob_sums_op(*given, score_function=score_function, **options)
        return sums, ops._z_sum_op(*given, **options)

    most = x.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(x - most)
    q = 1 / (1 + np.exp(-x)) if score_function == "sigmoid" else e
    lse = np.log(e.sum(-1)) + most[..., 0]
    got, again = run(*given), run(*given)
    assert relative_error(got[0], (q / q.sum(-1, keepdims=True)).sum(0)) < 3e-6
    assert relative_error(got[1], (lse**2).sum()) < 3e-6
    for one, other in zip(got, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "tokens, experts, dtype", [(9001, 256, "int32"), (3, 5, "int8"), (700, 1000, "int16")]
)
def test_counts(tokens, experts, dtype, masked):
    rng = np.random.default_rng(experts)
    idx = rng.integers(-2, experts + 2, (tokens, 4)).astype(dtype)
    mask = rng.random(tokens) < 0.5
    options = {"num_experts": experts, "implementation": "triton"}
    got = jax.jit(lambda *x: ops._counts_op(*x, **options))(idx, mask if masked else None)
    kept = idx[mask] if masked else idx
    want = np.bincount(kept[(kept >= 0) & (kept < experts)].astype(int), minlength=experts)
    np.testing.assert_array_equal(got, want)


def test_what_the_kernels_refuse():
    logits = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    assert "sqrtsoftplus" in ops._sums_unsupported(logits, score_function="sqrtsoftplus")
    assert "float64" in ops._sums_unsupported(jax.ShapeDtypeStruct((4, 64), jnp.dtype("float64")))
    assert "2048" in ops._sums_unsupported(jax.ShapeDtypeStruct((4, 4096), jnp.float32))
    assert "choices" in ops._counts_unsupported(
        jax.ShapeDtypeStruct((0, 2), jnp.int32), num_experts=4
    )
