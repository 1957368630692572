"""Balance losses and counts against formulas on gathered data; what crosses devices; edge cases; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import covering
from core.router import router_oracle
from core.router.router_oracle import softmax
from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.router.balance import expert_counts, load_balance_loss, router_z_loss
from expertmesh.core.testing import magnitudes, relative_error

# On another version of JAX these ops keep the contract, which has the same values in every mode.
pytestmark = pytest.mark.default_jax


def both_losses(logits, topk_idx):
    return load_balance_loss(logits, topk_idx, coeff=0.5) + router_z_loss(logits, coeff=0.5)


def data():
    """float[8, 56, 12] and int32[8, 56, 3] with choices that are not routed."""
    rng = np.random.default_rng(0)
    logits = magnitudes(rng, (8, 56, 12))
    return jnp.asarray(logits), jnp.asarray(rng.integers(-2, 14, (8, 56, 3)), jnp.int32)


def test_gradient_by_formula():
    """(E c / K T^2) n_e through softmax's Jacobian, and 2 c / T lse softmax; n is a constant."""
    logits, topk_idx = data()
    got = jax.grad(both_losses)(logits, topk_idx)
    x = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    T, E = x.shape
    p = np.stack([softmax(row) for row in x])
    n = np.array([(np.asarray(topk_idx) == e).sum() for e in range(E)])
    lse = np.log(np.exp(x).sum(-1, keepdims=True))
    want = np.stack([(np.diag(q) - np.outer(q, q)) @ n for q in p]) * 0.5 * E / (3 * T**2)
    want += 2 * 0.5 / T * lse * p
    assert relative_error(got.reshape(T, E), want) < 1e-5


@covering(
    "shape, kind",
    [(2, 4), (8, 1)],
    ["auto", "resource", "explicit"],
    covers=[((2, 4), "auto"), ((2, 4), "explicit")],
)
def test_only_vectors_of_experts_cross_devices(kind, shape):
    """Same losses and gradients as on one device; all collectives are all-reduces of the counts and of scalars."""
    logits, topk_idx = data()
    want = jax.value_and_grad(both_losses)(logits, topk_idx)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(shape, ("fsdp", "ep"), axis_types=(axis_type,) * 2)
    tokens = NamedSharding(mesh, PartitionSpec(("fsdp", "ep")))
    operands = jax.device_put((logits, topk_idx), tokens)
    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep") if kind == "resource" else None
    with global_shard_guard(resource):
        function = jax.jit(jax.value_and_grad(both_losses))
        got = function(*operands)
        text = function.lower(*operands).compile().as_text()
    assert relative_error(got[0], want[0]) < 1e-6
    assert relative_error(got[1], want[1]) < 1e-6
    assert got[1].sharding.is_equivalent_to(tokens, 3)
    found = collectives(text)
    assert found and all(c.kind == "all-reduce" for c in found), found
    allowed = {"f32[]", f"s32[{logits.shape[-1]}]"}
    assert {shape for c in found for shape in c.shapes} <= allowed, found


def test_balanced_routing_gives_the_coefficient():
    logits = jnp.zeros((24, 6))
    topk_idx = jnp.arange(48).reshape(24, 2) % 6
    assert relative_error(load_balance_loss(logits, topk_idx, coeff=0.3), 0.3) < 1e-6


def test_collapse_costs_more_than_balance():
    """All tokens on K of E experts with certainty: the loss is coeff * E / K."""
    logits = jnp.full((16, 8), -40.0).at[:, :2].set(40.0)
    topk_idx = jnp.tile(jnp.arange(2), (16, 1))
    assert relative_error(load_balance_loss(logits, topk_idx, coeff=1.0), 8 / 2) < 1e-6


def test_not_routed_choices_are_not_counted():
    topk_idx = jnp.array([[0, -1], [3, 2], [-7, 4], [4, 2**31 - 1]], jnp.int32)
    np.testing.assert_array_equal(expert_counts(topk_idx, num_experts=4), [1, 0, 1, 1])
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32))
    mean_prob = np.mean([softmax(x) for x in np.asarray(logits, np.float64)], axis=0)
    want = 4 * np.sum(mean_prob * np.array([1, 0, 1, 1]) / 8)
    assert relative_error(load_balance_loss(logits, topk_idx, coeff=1.0), want) < 1e-6


def test_no_tokens():
    logits, topk_idx = jnp.zeros((0, 5, 4)), jnp.zeros((0, 5, 2), jnp.int32)
    loss, gradient = jax.value_and_grad(both_losses)(logits, topk_idx)
    assert float(loss) == 0 and gradient.shape == (0, 5, 4)
    np.testing.assert_array_equal(expert_counts(topk_idx, num_experts=4), np.zeros(4))


def test_bfloat16_logits_are_summed_in_float32():
    """256 tokens and more are lost by a sum in bfloat16."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(4096, 8)), jnp.bfloat16)
    topk_idx = jnp.asarray(rng.integers(0, 8, (4096, 3)), jnp.int32)
    wide = np.asarray(logits).astype(np.float64)
    balance, z = load_balance_loss(logits, topk_idx, coeff=0.5), router_z_loss(logits, coeff=0.5)
    assert balance.dtype == z.dtype == jnp.float32
    assert relative_error(balance, router_oracle.balance(wide, np.asarray(topk_idx), 0.5)) < 1e-5
    assert relative_error(z, 0.5 * np.mean(np.log(np.exp(wide).sum(-1)) ** 2)) < 1e-5
    gradient = jax.grad(both_losses)(logits, topk_idx)
    assert gradient.dtype == jnp.bfloat16


def test_large_logits_do_not_overflow():
    logits = jnp.array([[500.0, -500.0, 0.0]])
    assert relative_error(router_z_loss(logits, coeff=1.0), 500.0**2) < 1e-6
    assert np.isfinite(jax.grad(lambda x: router_z_loss(x, coeff=1.0))(logits)).all()


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda: load_balance_loss(jnp.zeros((4, 3)), jnp.zeros((5, 2), int), coeff=1.0),
            ValueError,
            ["load_balance_loss", "(4, 3)", "(5, 2)"],
        ),
        (
            lambda: load_balance_loss(jnp.zeros((4, 3)), jnp.zeros((4, 2)), coeff=1.0),
            TypeError,
            ["topk_idx", "float32"],
        ),
        (
            lambda: load_balance_loss(jnp.zeros((4, 3), int), jnp.zeros((4, 2), int), coeff=1.0),
            TypeError,
            ["logits", "int32"],
        ),
        (
            lambda: router_z_loss(jnp.zeros(3, int), coeff=1.0),
            TypeError,
            ["router_z_loss", "int32"],
        ),
        (
            lambda: expert_counts(jnp.zeros(3), num_experts=2),
            TypeError,
            ["expert_counts", "float32"],
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as info:
        call()
    assert all(word in str(info.value) for word in words)
