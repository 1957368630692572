"""The kernels of the balance losses' sums on a GPU, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core.router import balance as ops
from expertmesh.core.router.scores import ExpertScores
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

    weights = (
        np.random.default_rng(1).normal(size=shape[-1]).astype("float32"),
        np.ones(1, "float32"),
    )
    quantities = (ExpertScores(score_function), ops._SquaredLogsumexp())

    @jax.jit
    def run(logits, mask):
        from expertmesh.core.kernels.triton import load_balance

        sums = load_balance.sums(logits, mask, quantity=quantities[0])
        weighted = (
            ops.sum_op(logits, weight, mask, quantity=quantity, implementation="triton")
            for weight, quantity in zip(weights, quantities, strict=True)
        )
        return sums, *weighted

    most = x.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(x - most)
    q = 1 / (1 + np.exp(-x)) if score_function == "sigmoid" else e
    lse = np.log(e.sum(-1)) + most[..., 0]
    got, again = run(*given), run(*given)
    want = (q / q.sum(-1, keepdims=True)).sum(0)
    assert relative_error(got[0], want) < 3e-6
    assert abs(got[1] - want @ weights[0]) < 3e-6 * (want @ np.abs(weights[0]))
    assert relative_error(got[2], (lse**2).sum()) < 3e-6
    for one, other in zip(got, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "tokens, experts, dtype",
    [((9001,), 256, "int32"), ((3,), 5, "int8"), ((700,), 1000, "int16"), ((5, 700), 40, "int32")],
)
def test_counts(tokens, experts, dtype, masked):
    """Of all tokens, and of each sequence."""
    rng = np.random.default_rng(experts)
    idx = rng.integers(-2, experts + 2, (*tokens, 4)).astype(dtype)
    mask = rng.random(tokens) < 0.5
    for dims in range(len(tokens)):
        options = dict(num_experts=experts, sequence_dims=dims, implementation="triton")
        count = jax.jit(lambda *x, options=options: ops._counts_op(*x, **options))
        got = np.asarray(count(idx, mask if masked else None))
        assert got.shape == (*tokens[:dims], experts)
        for sequence in np.ndindex(*tokens[:dims]):
            kept = idx[sequence][mask[sequence]] if masked else idx[sequence]
            want = np.bincount(kept[(kept >= 0) & (kept < experts)].astype(int), minlength=experts)
            np.testing.assert_array_equal(got[sequence], want)


def test_what_the_kernels_refuse():
    shape, weight = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((64,), jnp.float32)
    unsupported = partial(ops._sum_unsupported, quantity=ExpertScores("softmax"))
    logits = shape((4, 64), jnp.float32)
    assert unsupported(logits, weight) is None
    assert "float64" in unsupported(shape((4, 64), jnp.dtype("float64")), weight)
    assert "2048" in unsupported(shape((4, 4096), jnp.float32), weight)
    assert "same weights" in unsupported(logits, shape((4, 64), jnp.float32))
    other = ExpertScores("sqrtsoftplus")
    assert "sqrtsoftplus" in ops._sum_unsupported(logits, weight, quantity=other)
    sizes = dict(num_experts=4, sequence_dims=1)
    assert "choices" in ops._counts_unsupported(shape((0, 2), jnp.int32), **sizes)
    assert "65535" in ops._counts_unsupported(shape((65536, 1, 2), jnp.int32), **sizes)
