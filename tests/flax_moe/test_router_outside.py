"""A block whose router is outside: its logits, or its choices with their weights; against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import NamedSharding, PartitionSpec

from cases.covering import full
from expertmesh.core import global_shard_guard
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import init_params, linen, moe, nnx, param_specs, stages
from flax_moe.moe_oracle import (
    AUTO,
    EXPLICIT,
    RESOURCE,
    TOKENS,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    run,
    value_and_gradients,
)
from flax_moe.test_moe_router import dense


def gate_of(params, x):
    """The router in plain JAX, and the parameters that are left for the block."""
    rest = {name: w for name, w in params.items() if name != "gate_kernel"}
    return rest, x @ params["gate_kernel"]


def everywhere(array):
    """On every device, over Explicit axes: x alone says where tokens are."""
    mesh = jax.typeof(array).sharding.mesh
    if EXPLICIT not in mesh.axis_types:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


def by_logits(params, x, config):
    rest, logits = gate_of(params, x)
    return moe(rest, x, config, logits=everywhere(logits))


def by_weights(params, x, config):
    """Weights and losses both reach the gate."""
    rest, logits = gate_of(params, x)
    top, idx = jax.lax.top_k(logits, config.top_k)
    given = dict(logits=logits, topk_idx=idx, topk_weights=jax.nn.softmax(top))
    return moe(rest, x, config, **jax.tree.map(everywhere, given))


@pytest.mark.parametrize("resource", [None, full(RESOURCE)], ids=["explicit", "resource"])
@pytest.mark.parametrize("block", [by_logits, by_weights])
def test_equals_the_router_inside(block, resource):
    """Outputs, losses, and gradients of x and all parameters, through the router outside."""
    config = make_config(use_gate=False)
    data = make_data(make_config())
    mesh = make_mesh((2, 4), AUTO if resource else EXPLICIT)
    with global_shard_guard(resource):
        program = jax.jit(value_and_gradients(block, config))
        (_, output), gradients = program(*place(data, make_config(), mesh))
    assert_result(output, gradients, run(data, config))
    assert output.y.sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 3)


@pytest.mark.full
@pytest.mark.parametrize("block", [by_logits, by_weights])
def test_inside_a_shard_map(block):
    config = make_config(use_gate=False, ep_axis="ep", aux_loss_coeff=0.0, z_loss_coeff=0.0)
    data = make_data(make_config())
    specs = param_specs(make_config(ep_axis="ep"))
    mesh = make_mesh((2, 4), AUTO)

    def gradients(params, x, dy):
        def loss(params, x):
            y = block(params, x, config).y
            return jax.lax.psum(jnp.sum(y * dy), ("fsdp", "ep")), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    function = jax.shard_map(
        gradients, mesh=mesh, in_specs=(specs, TOKENS, TOKENS), out_specs=((specs, TOKENS), TOKENS)
    )
    (d_params, d_x), y = jax.jit(function)(*data)
    want = run(data, config)
    assert relative_error(y, want.y) < 1e-5 and relative_error(d_x, want.d_x) < 1e-5
    for name, d in d_params.items():
        assert relative_error(d, want.d_params[name]) < 1e-5, name


def test_without_logits():
    """Weights as they are, of routed choices alone; what masked tokens hold does not matter; no losses, no entropy."""
    config = make_config(
        use_bias=False, use_gate=False, aux_loss_coeff=0.0, z_loss_coeff=0.0, scaling_factor=3.0
    )
    data = make_data(config)
    rng = np.random.default_rng(0)
    idx = rng.integers(-1, 10, size=(8, 5, 2))
    weights = rng.normal(size=idx.shape).astype(np.float32)
    mask = rng.random((8, 5)) < 0.7
    live = mask[..., None] & (idx >= 0) & (idx < 8)
    poisoned = jnp.where(live, weights, jnp.nan)

    def loss(weights, x):
        out = moe(data.params, x, config, topk_idx=idx, topk_weights=weights, token_mask=mask)
        return jnp.sum(out.y * data.dy), out

    (d_weights, d_x), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(poisoned, data.x)
    given = dict(topk_idx=idx, topk_weights=poisoned, token_mask=mask)
    routed = stages.route({}, data.x, config, **given)
    np.testing.assert_array_equal(routed.topk_weights, np.where(live, weights, 0))
    chosen = np.where(live, idx, -1)
    np.testing.assert_array_equal(out.topk_idx, chosen)
    assert relative_error(out.y, dense(data, config, chosen, weights)) < 1e-5
    ones = np.ones((8, 5, 1))
    columns = [dense(data, config, chosen[..., k : k + 1], ones) for k in range(2)]
    want = np.stack([np.sum(y * data.dy, axis=-1) for y in columns], axis=-1)
    assert relative_error(d_weights, want) < 1e-5 and np.isfinite(d_x).all()
    assert float(out.aux_loss) == float(out.z_loss) == 0 and out.entropy is None
    np.testing.assert_array_equal(out.tokens_per_expert, np.bincount(chosen[live], minlength=8))


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_modules_have_no_gate():
    config = make_config(use_gate=False, use_bias=False)
    x, logits = make_data(config).x, make_data(config, (8, 5, 8)).x
    assert (
        set(init_params(jax.random.key(0), 16, config)) == set(param_specs(config)) == {"wi", "wo"}
    )
    module = linen.MoEBlock(config, logical_axes=None)
    given = dict(logits=logits, aux_loss_coeff=2.0, z_loss_coeff=jnp.float32(3.0))
    out, variables = module.init_with_output(jax.random.key(0), x, **given)
    params = variables["params"]
    assert set(params) == {"wi", "wo"}
    assert_same(out, moe(params, x, config, **given))
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    assert not hasattr(block, "gate_kernel")
    params = {name: getattr(block, name)[...] for name in ("wi", "wo")}
    given |= dict(topk_idx=jnp.zeros((8, 5, 2), int), topk_weights=jnp.ones((8, 5, 2)))
    assert_same(block(x, **given), moe(params, x, config, **given))
    assert_same(module.apply({"params": params}, x, **given), moe(params, x, config, **given))


CONFIG = make_config(use_bias=False, use_gate=False)
X = jnp.zeros((4, 16))
ONE = jnp.ones(())
IDX, WEIGHTS, LOGITS = jnp.zeros((4, 2), int), jnp.zeros((4, 2)), jnp.zeros((4, 8))


@pytest.mark.parametrize(
    "given, error, words",
    [
        (dict(), ValueError, ["missing gate_kernel", "logits"]),
        (dict(topk_idx=IDX), ValueError, ["missing gate_kernel"]),
        (dict(logits=LOGITS[:3]), ValueError, ["logits.shape=(3, 8)", "x.shape=(4, 16)"]),
        (dict(logits=LOGITS[:, :7]), ValueError, ["logits.shape=(4, 7)", "E = 8"]),
        (dict(logits=LOGITS.astype(int)), TypeError, ["logits", "int"]),
        (dict(logits=LOGITS, gate=True), ValueError, ["gate_kernel", "use_gate=False"]),
        (dict(topk_weights=WEIGHTS), ValueError, ["topk_idx=None", "logits"]),
        (dict(topk_idx=IDX, topk_weights=WEIGHTS[:, :1]), ValueError, ["(4, 1)", "K = 2"]),
        (dict(topk_idx=IDX[:3], topk_weights=WEIGHTS), ValueError, ["topk_idx.shape=(3, 2)"]),
        (dict(topk_idx=IDX, topk_weights=IDX), TypeError, ["topk_weights", "int"]),
        (dict(topk_idx=WEIGHTS, topk_weights=WEIGHTS), TypeError, ["topk_idx", "float32"]),
        (dict(topk_idx=IDX, topk_weights=WEIGHTS), ValueError, ["aux_loss_coeff=0.5", "logits"]),
        (
            dict(topk_idx=IDX, topk_weights=WEIGHTS, aux_loss_coeff=0, z_loss_coeff=ONE),
            ValueError,
            ["z_loss_coeff", "logits"],
        ),
        (dict(logits=LOGITS, z_loss_coeff=LOGITS), ValueError, ["z_loss_coeff.shape=(4, 8)"]),
        (dict(logits=LOGITS, aux_loss_coeff="1"), TypeError, ["aux_loss_coeff='1'"]),
    ],
    ids=str,
)
def test_errors(given, error, words):
    params = init_params(jax.random.key(0), 16, CONFIG)
    given = dict(given)
    if given.pop("gate", False):
        params["gate_kernel"] = jnp.zeros((16, 8))
    for name, function in {"moe": moe, "stages.route": stages.route}.items():
        with pytest.raises(error) as info:
            function(params, X, CONFIG, **given)
        assert all(word in str(info.value) for word in [name, *words]), str(info.value)
