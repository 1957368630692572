"""route against sorting and softmax in float64; ties, NaN, dtypes, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from core.router import router_oracle
from core.router.router_oracle import softmax
from expertmesh.core.router.route import SCORE_FUNCTIONS, RouterConfig, Routing, route
from expertmesh.core.testing import relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

BOTH = pytest.mark.parametrize("use_pre_softmax", [False, True])


def config(use_pre_softmax=False, top_k=3):
    return RouterConfig(top_k=top_k, use_pre_softmax=use_pre_softmax)


def distinct_logits(seed, dtype):
    """float[8, 56, 12] without near ties, so that no choice hangs on rounding: multiples of 1/4 in random order."""
    rng, shape = np.random.default_rng(seed), (8, 56, 12)
    steps = np.broadcast_to(np.arange(12) - 6, shape)
    scale = rng.choice([0.25, 0.5, 1.0], size=(*shape[:-1], 1))
    return (rng.permuted(steps, axis=-1) * scale).astype(dtype)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_dtypes(use_pre_softmax, dtype):
    """Whatever the logits' dtype, weights are computed and returned in float32: no rounding to the logits' own."""
    logits = distinct_logits(0, jnp.dtype(dtype))
    routing = route(jnp.asarray(logits), config(use_pre_softmax))
    assert isinstance(routing, Routing)
    assert routing.topk_idx.dtype == jnp.int32 and routing.topk_weights.dtype == jnp.float32
    idx, weights = router_oracle.route(logits, config(use_pre_softmax))
    np.testing.assert_array_equal(routing.topk_idx, idx)
    assert relative_error(routing.topk_weights, weights) < 1e-6


@BOTH
def test_gradient_by_the_jacobian_of_softmax(use_pre_softmax):
    """dL/dlogits = J^T g with J built entry by entry, for O(1) cotangents."""
    logits = distinct_logits(1, "float32")
    g = np.random.default_rng(1).normal(size=(*logits.shape[:-1], 3))
    _, vjp = jax.vjp(lambda x: route(x, config(use_pre_softmax)).topk_weights, jnp.asarray(logits))
    (got,) = vjp(jnp.asarray(g, jnp.float32))
    want = np.zeros(logits.shape)
    for token in np.ndindex(*logits.shape[:-1]):
        x = logits[token].astype(np.float64)
        chosen = router_oracle.best(x, 3)
        taking_part = range(x.size) if use_pre_softmax else chosen
        p = dict(zip(taking_part, softmax(x[list(taking_part)]), strict=True))
        for k, i in enumerate(chosen):
            for j in taking_part:
                want[token][j] += g[token][k] * p[i] * ((i == j) - p[j])
    assert got.dtype == jnp.float32
    assert relative_error(got, want) < 1e-5


def test_gradient_has_the_dtype_of_the_logits():
    logits = jnp.asarray(distinct_logits(2, jnp.bfloat16))
    gradient = jax.grad(lambda x: jnp.sum(route(x, config()).topk_weights[..., 0]))(logits)
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "options", [dict(use_pre_softmax=True), *(dict(score_function=f) for f in SCORE_FUNCTIONS)]
)
def test_gradient_of_narrow_logits_is_computed_in_float32(options):
    """Rounded once, to the dtype of the logits."""
    logits = jnp.asarray(distinct_logits(3, jnp.bfloat16))
    g = np.random.default_rng(3).normal(size=(*logits.shape[:-1], 3)).astype(np.float32)
    narrow, wide = (
        jax.vjp(lambda x: route(x, RouterConfig(top_k=3, **options)).topk_weights, x)[1](g)[0]
        for x in (logits, logits.astype(jnp.float32))
    )
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@BOTH
def test_ties_go_to_the_lower_expert(use_pre_softmax):
    """Equal scores, zeros of both signs, and equal scores around the cut between the K-th and the next."""
    logits = jnp.array(
        [
            [1, 1, 1, 1, 1],
            [0.0, -0.0, -0.0, 0.0, -1],
            [-0.0, 0.0, 0.0, -0.0, -1],
            [0, 2, 1, 2, 1],
            [3, 0, 1, 1, 1],
        ],
        jnp.float32,
    )
    routing = jax.jit(route, static_argnums=1)(logits, config(use_pre_softmax))
    np.testing.assert_array_equal(
        routing.topk_idx, [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 3, 2], [0, 2, 3]]
    )


def test_bfloat16_ties_are_decided_after_rounding():
    logits = jnp.array([[1.0, 1.001, 1.002, 0.0]], jnp.bfloat16)
    np.testing.assert_array_equal(route(logits, config(top_k=2)).topk_idx, [[0, 1]])


@BOTH
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_reaches_the_weights_of_its_token_only(use_pre_softmax, sign):
    logits = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)
    poisoned = logits.copy()
    poisoned[2, 5] = np.copysign(np.float32(np.nan), sign)
    clean, got = (route(jnp.asarray(x), config(use_pre_softmax)) for x in (logits, poisoned))
    assert np.isnan(got.topk_weights[2]).all()
    assert ((got.topk_idx >= 0) & (got.topk_idx < 6)).all()
    np.testing.assert_array_equal(
        np.delete(got.topk_weights, 2, 0), np.delete(clean.topk_weights, 2, 0)
    )


def test_minus_infinity_is_never_preferred():
    logits = jnp.array([[-jnp.inf, 0.0, -jnp.inf, 1.0]])
    routing = route(logits, config(top_k=3))
    np.testing.assert_array_equal(routing.topk_idx, [[3, 1, 0]])
    assert relative_error(routing.topk_weights, [[*softmax(np.array([1.0, 0.0])), 0]]) < 1e-6


@BOTH
def test_all_experts_and_one(use_pre_softmax):
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(5, 4)).astype(np.float32))
    every = route(logits, config(use_pre_softmax, top_k=4))
    assert relative_error(jnp.sum(every.topk_weights, -1), np.ones(5)) < 1e-6
    one = route(logits, config(use_pre_softmax, top_k=1))
    wide = np.asarray(logits, np.float64)
    want = [softmax(x).max() for x in wide] if use_pre_softmax else np.ones(5)
    assert relative_error(one.topk_weights[:, 0], want) < 1e-6


@BOTH
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded_experts_are_gathered(kind, use_pre_softmax):
    """The choice is among all experts, not among those of a shard; forward and backward."""
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(8, 16)).astype(np.float32))
    g = jnp.asarray(rng.normal(size=(8, 3)).astype(np.float32))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)

    def both(x, g):
        def weights(x):
            routing = route(x, config(use_pre_softmax))
            return routing.topk_weights, routing.topk_idx

        out, vjp, idx = jax.vjp(weights, x, has_aux=True)
        return idx, out, vjp(g)[0]

    want = both(logits, g)
    got = jax.jit(both)(
        jax.device_put(logits, NamedSharding(mesh, PartitionSpec("a", "b"))),
        jax.device_put(g, NamedSharding(mesh, PartitionSpec("a"))),
    )
    np.testing.assert_array_equal(got[0], want[0])
    assert relative_error(got[1], want[1]) < 1e-6 and relative_error(got[2], want[2]) < 1e-5


def test_one_trace_for_equal_calls():
    logits = jnp.ones((4, 5))
    traces = []

    @jax.jit
    def function(x):
        traces.append(x)
        return route(x, RouterConfig(top_k=3))

    function(logits)
    function(logits + 1)
    assert len(traces) == 1
    assert hash(RouterConfig(top_k=3)) == hash(RouterConfig(top_k=3))


@pytest.mark.parametrize(
    "kwargs, error, words",
    [
        (dict(top_k=0), ValueError, ["top_k=0", "at least 1"]),
        (dict(top_k=-1), ValueError, ["top_k=-1"]),
        (dict(top_k=2.0), TypeError, ["top_k=2.0", "int"]),
        (dict(top_k=True), TypeError, ["top_k=True"]),
        (dict(top_k=2, score_function="tanh"), ValueError, ["'tanh'", *SCORE_FUNCTIONS]),
    ],
)
def test_config_errors(kwargs, error, words):
    with pytest.raises(error) as info:
        RouterConfig(**kwargs)
    assert all(word in str(info.value) for word in ["RouterConfig", *words])


@pytest.mark.parametrize(
    "logits, top_k, error, words",
    [
        (jnp.zeros((2, 3)), 4, ValueError, ["top_k=4", "num_experts=3", "lower top_k"]),
        (jnp.zeros((2, 3), jnp.int32), 2, TypeError, ["int32", "cast"]),
        (jnp.zeros(()), 1, ValueError, ["()"]),
    ],
)
def test_errors(logits, top_k, error, words):
    with pytest.raises(error) as info:
        route(logits, RouterConfig(top_k=top_k))
    assert all(word in str(info.value) for word in ["route", *words])
