"""What the block says of itself, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.flax_moe import MoEConfig, MoEOutput, init_params, moe

pytestmark = pytest.mark.default_jax

NONE = dict(y=None, aux_loss=jnp.float32(0.25), z_loss=jnp.float32(0.5), topk_idx=None)


def output(counts, dropped=0, entropy=None):
    counts = jnp.asarray(counts, jnp.int32)
    return MoEOutput(
        **NONE, tokens_per_expert=counts, num_dropped=jnp.asarray(dropped), entropy=entropy
    )


def test_metrics_are_what_the_counts_say():
    found = output([6, 0, 3, 3], dropped=3, entropy=jnp.float32(1.5)).metrics
    shares = np.array([6, 3, 3]) / 12
    assert found["tokens_per_expert"].tolist() == [6, 0, 3, 3]
    assert found["load_imbalance"] == 2.0 and found["dropped_fraction"] == 0.25
    want = -(shares * np.log(shares)).sum() / np.log(4)
    assert found["load_entropy"] == pytest.approx(want, rel=1e-6)
    rest = {name: float(found[name]) for name in ("aux_loss", "z_loss", "router_entropy")}
    assert rest == {"aux_loss": 0.25, "z_loss": 0.5, "router_entropy": 1.5}
    assert all(value.dtype == jnp.float32 for name, value in found.items() if "load" in name)


@pytest.mark.parametrize(
    "counts, imbalance, entropy",
    [
        ([5, 5, 5], 1.0, 1.0),
        ([0, 9, 0], 3.0, 0.0),
        ([0, 1, 0], 3.0, 0.0),
        ([0, 0, 0], 0.0, 0.0),
        ([4], 1.0, 0.0),
    ],
)
def test_metrics_at_the_ends(counts, imbalance, entropy):
    """Even, collapsed, nothing routed, one expert."""
    found = output(counts).metrics
    assert float(found["load_imbalance"]) == pytest.approx(imbalance)
    assert float(found["load_entropy"]) == pytest.approx(entropy, abs=1e-6)
    assert "router_entropy" not in found and found["dropped_fraction"] == 0


def test_metrics_of_stacked_layers_are_each_layers():
    layers = [output([6, 0, 3, 3], 3), output([3, 3, 3, 3], 0)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    for name, values in stacked.metrics.items():
        want = [each.metrics[name] for each in layers]
        np.testing.assert_array_equal(values, np.stack(want), err_msg=name)


def test_metrics_are_read_inside_jit():
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=128, aux_loss_coeff=1e-2)
    params = init_params(jax.random.key(0), 256, config)
    x = jax.random.normal(jax.random.key(1), (8, 256))
    inside = jax.jit(lambda params, x: moe(params, x, config).metrics)(params, x)
    outside = moe(params, x, config)
    assert inside.keys() == outside.metrics.keys()
    assert inside["tokens_per_expert"].sum() == 16
    np.testing.assert_allclose(inside["router_entropy"], outside.entropy, rtol=1e-5)
