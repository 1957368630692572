"""Balance losses of other scores, of masked tokens, of sequences and of global batches; statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from core.router import router_oracle as oracle
from expertmesh.core import (
    RouterConfig,
    expert_counts,
    load_balance_loss,
    route,
    router_statistics,
    router_z_loss,
    sequence_balance_loss,
)
from expertmesh.core.hlo import collectives
from expertmesh.core.testing import relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax

E, K = 6, 3


def data(seed=0, shape=(4, 9), top_k=K):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(*shape, E)) * 2).astype(np.float32)
    idx = rng.integers(-1, E + 1, size=(*shape, top_k)).astype(np.int32)
    return jnp.asarray(logits), jnp.asarray(idx), jnp.asarray(rng.random(shape) < 0.6)


def numeric_gradient(loss, logits):
    """Central differences, entry by entry."""
    logits = np.asarray(logits, np.float64)
    gradient = np.zeros(logits.shape)
    for i in np.ndindex(*logits.shape):
        step = np.zeros(logits.shape)
        step[i] = 1e-5
        gradient[i] = (loss(logits + step) - loss(logits - step)) / 2e-5
    return gradient


@pytest.mark.parametrize(
    "score_function, top_k",
    [
        full("softmax", 1),
        ("sigmoid", 3),
        full("sqrtsoftplus", 1),
        full("softmax", 3),
        full("sigmoid", 1),
        full("sqrtsoftplus", 3),
    ],
)
def test_scores_are_normalised_over_all_experts(score_function, top_k):
    """For one choice per token as well."""
    logits, idx, mask = data(top_k=top_k)
    for function, reference in (
        (load_balance_loss, oracle.balance),
        (sequence_balance_loss, oracle.sequence_balance),
    ):
        for token_mask in (None, mask):
            got, gradient = jax.value_and_grad(
                lambda x, f=function, m=token_mask: f(
                    x, idx, coeff=0.5, score_function=score_function, token_mask=m
                )
            )(logits)
            numpy_mask = None if token_mask is None else np.asarray(mask)

            def loss(x, r=reference, m=numpy_mask):
                return r(x, np.asarray(idx), 0.5, score_function, m)

            assert relative_error(got, loss(np.asarray(logits))) < 1e-6
            assert relative_error(gradient, numeric_gradient(loss, logits)) < 1e-4


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_balanced_routing_gives_the_coefficient(score_function):
    logits, topk_idx = jnp.zeros((8, 24, 6)), jnp.arange(384).reshape(8, 24, 2) % 6
    for loss in (load_balance_loss, sequence_balance_loss):
        got = loss(logits, topk_idx, coeff=0.3, score_function=score_function)
        assert relative_error(got, 0.3) < 1e-5


def test_padding_changes_no_loss():
    """The loss of a padded batch is that of the tokens without padding, whatever the padding holds."""
    logits, idx, mask = data(1)
    kept = np.asarray(mask)
    poisoned = jnp.where(mask[..., None], logits, jnp.nan)
    for padded, packed in (
        (
            load_balance_loss(poisoned, idx, coeff=1.0, token_mask=mask),
            load_balance_loss(logits[kept], idx[kept], coeff=1.0),
        ),
        (
            router_z_loss(poisoned, coeff=1.0, token_mask=mask),
            router_z_loss(logits[kept], coeff=1.0),
        ),
        (
            sequence_balance_loss(poisoned, idx, coeff=1.0, token_mask=mask),
            np.mean(
                [
                    load_balance_loss(x[m], i[m], coeff=1.0)
                    for x, i, m in zip(logits, idx, kept, strict=True)
                ]
            ),
        ),
    ):
        assert relative_error(padded, packed) < 1e-6


def test_nothing_but_padding():
    logits, idx, mask = data(2)

    def loss(x):
        nothing = jnp.zeros_like(mask)
        return (
            load_balance_loss(x, idx, coeff=1.0, token_mask=nothing)
            + sequence_balance_loss(x, idx, coeff=1.0, token_mask=nothing)
            + router_z_loss(x, coeff=1.0, token_mask=nothing)
        )

    value, gradient = jax.value_and_grad(loss)(logits)
    assert float(value) == 0 and not np.asarray(gradient).any()


def test_counts_of_a_global_batch():
    """The mean of the losses with the mean counts is the loss of the global batch."""
    logits, idx, _ = data(3)
    counts = jnp.stack([expert_counts(i, num_experts=E) for i in idx])
    mean = jnp.mean(counts.astype(jnp.float32), axis=0)
    parts = [
        load_balance_loss(x, i, coeff=0.5, tokens_per_expert=mean)
        for x, i in zip(logits, idx, strict=True)
    ]
    assert relative_error(np.mean(parts), load_balance_loss(logits, idx, coeff=0.5)) < 1e-6
    assert relative_error(parts[0], load_balance_loss(logits[0], idx[0], coeff=0.5)) > 1e-3


def test_a_traced_coefficient():
    """The loss of the number, under jit; its derivative is the loss of 1."""
    logits, idx, mask = data(7)
    losses = (
        lambda x, c: load_balance_loss(x, idx, coeff=c, score_function="sigmoid"),
        lambda x, c: sequence_balance_loss(x, idx, coeff=c, token_mask=mask),
        lambda x, c: router_z_loss(x, coeff=c),
    )
    for loss in losses:
        want, d_logits = jax.value_and_grad(loss)(logits, 0.3)
        got, (d_got, slope) = jax.jit(jax.value_and_grad(loss, (0, 1)))(logits, jnp.float32(0.3))
        assert relative_error(got, want) < 1e-6 and relative_error(d_got, d_logits) < 1e-6
        assert relative_error(slope, loss(logits, 1)) < 1e-6


def test_only_vectors_of_experts_cross_devices():
    """Masked and of sequences; sequences that are split cost their counts, never a gather."""
    logits, idx, mask = data(4, (8, 16))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def losses(x, idx, mask):
        return load_balance_loss(x, idx, coeff=1.0, token_mask=mask) + sequence_balance_loss(
            x, idx, coeff=1.0, token_mask=mask
        )

    want = jax.value_and_grad(losses)(logits, idx, mask)
    placed = jax.device_put((logits, idx, mask), NamedSharding(mesh, PartitionSpec("a", "b")))
    function = jax.jit(jax.value_and_grad(losses))
    got = function(*placed)
    assert relative_error(got[0], want[0]) < 1e-6 and relative_error(got[1], want[1]) < 1e-6
    found = collectives(function.lower(*placed).compile().as_text())
    assert found and all(c.kind == "all-reduce" for c in found), found
    allowed = {"f32[]", "s32[]", f"s32[{E}]", f"s32[4,{E}]", "s32[4]"}
    assert {shape for c in found for shape in c.shapes} <= allowed, found


def test_operands_over_different_axes():
    """Choices and mask follow the logits, wherever their types say that they are."""
    operands = data(6, (8, 16))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def loss(x, idx, mask):
        return sequence_balance_loss(x, idx, coeff=1.0, token_mask=mask)

    want = jax.value_and_grad(loss)(*operands)
    for axes in (("a", "a", "b"), ("a", "b", "a"), ("b", None, "a")):
        specs = [NamedSharding(mesh, PartitionSpec(axis)) for axis in axes]
        got = jax.jit(jax.value_and_grad(loss))(*map(jax.device_put, operands, specs))
        assert relative_error(got[0], want[0]) < 1e-6 and relative_error(got[1], want[1]) < 1e-6


def test_statistics():
    logits, _, mask = data(5)
    idx = route(logits, RouterConfig(top_k=2), token_mask=mask).topk_idx
    got = router_statistics(logits, idx)
    kept = np.asarray(mask)
    np.testing.assert_array_equal(got.tokens_per_expert, expert_counts(idx, num_experts=E))
    counts = np.asarray(got.tokens_per_expert)
    assert relative_error(got.max_over_mean_load, counts.max() / counts.mean()) < 1e-6
    probs = [oracle.softmax(x) for x in np.asarray(logits, np.float64)[kept]]
    assert relative_error(got.entropy, np.mean([-(p @ np.log(p)) for p in probs])) < 1e-6
    assert int(got.num_masked) == (~kept).sum()
    gradient = jax.grad(lambda x: router_statistics(x, idx).entropy)(logits)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("experts", [7, 28, 60])
def test_the_load_of_a_balanced_routing_is_one(experts):
    """Whatever the experts' number: 1 / E is rounded."""
    idx = (jnp.arange(3 * experts) % experts)[:, None]
    got = jax.jit(router_statistics)(jnp.zeros((3 * experts, experts)), idx)
    assert float(got.max_over_mean_load) == 1


def test_statistics_of_certainty_and_of_nothing():
    logits = jnp.array([[200.0, -200.0, 0.0]])
    sure = router_statistics(logits, jnp.array([[0]]))
    assert float(sure.entropy) == 0 and float(sure.max_over_mean_load) == 3
    for outside in (-1, 3, 4):
        nothing = router_statistics(logits, jnp.array([[outside]]))
        assert [float(x) for x in nothing[1:]] == [0, 0, 1]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, i, m: load_balance_loss(x, i, coeff=1, score_function="relu"), ValueError, ["'relu'"]),
        (lambda x, i, m: load_balance_loss(x, i, coeff=1, token_mask=m[1:]), ValueError, ["(3, 9)"]),
        (lambda x, i, m: load_balance_loss(x, i, coeff=1, token_mask=x[..., 0]), TypeError, ["bool"]),
        (
            lambda x, i, m: load_balance_loss(x, i, coeff=1, tokens_per_expert=jnp.ones(3)),
            ValueError,
            ["tokens_per_expert", "(3,)"],
        ),
        (lambda x, i, m: router_z_loss(x, coeff=1, token_mask=m[1:]), ValueError, ["router_z_loss"]),
        (lambda x, i, m: router_z_loss(x, coeff=jnp.ones(2)), ValueError, ["coeff", "(2,)"]),
        (
            lambda x, i, m: sequence_balance_loss(x[0, 0], i[0, 0], coeff=1),
            ValueError,
            ["sequence_balance_loss", "(6,)"],
        ),
        (lambda x, i, m: router_statistics(x, i[1:]), ValueError, ["router_statistics", "(3, 9, 3)"]),
    ],
)  # fmt: skip
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call(*data())
    assert all(word in str(info.value) for word in words), str(info.value)
