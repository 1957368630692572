"""The Linen and NNX modules are the function with its parameters, under the same names."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from expertmesh.flax_moe import LogicalAxes, NativeMoEBlock, linen, moe, nnx, param_shapes
from flax_moe.moe_oracle import make_config, make_data, make_mesh

NAMES = {
    "gate_kernel": P(None, None),
    "wi": P("exp", "embed", None, "mlp"),
    "wo": P("exp", "mlp", "embed"),
    "wi_bias": P("exp", None, "mlp"),
    "wo_bias": P("exp", None),
}
RULES = [("exp", "ep"), ("embed", "fsdp"), ("mlp", None)]
RESTED = {
    "gate_kernel": P(None, None),
    "wi": P("ep", "fsdp", None, None),
    "wo": P("ep", None, "fsdp"),
    "wi_bias": P("ep", None, None),
    "wo_bias": P("ep", None),
}


def nnx_with(params, config):
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    for name, w in params.items():
        getattr(block, name)[...] = jnp.asarray(w)
    return block


def assert_equal_trees(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_same_bits_with_the_same_parameters():
    """Outputs, losses, statistics and gradients of both modules are those of the function."""
    config = make_config()
    data = make_data(config)
    module, block = linen.MoEBlock(config), nnx_with(data.params, config)

    def gradients(apply):
        def loss(params):
            out = apply(params)
            return jnp.sum(out.y * data.dy) + out.aux_loss + out.z_loss, out

        return jax.jit(jax.grad(loss, has_aux=True))(data.params)

    def apply_nnx(params):
        graph, state = flax_nnx.split(block)
        flax_nnx.replace_by_pure_dict(state, params)
        return flax_nnx.merge(graph, state)(data.x)

    want = gradients(lambda params: moe(params, data.x, config))
    assert_equal_trees(gradients(lambda p: module.apply({"params": p}, data.x)), want)
    assert_equal_trees(gradients(apply_nnx), want)


def test_linen_parameters():
    config = make_config()
    variables = jax.jit(linen.MoEBlock(config).init)(jax.random.key(0), jnp.zeros((2, 3, 16)))
    assert set(variables) == {"params"}
    assert flax.linen.get_partition_spec(variables)["params"] == NAMES
    params = flax.linen.unbox(variables)["params"]
    assert {name: w.shape for name, w in params.items()} == param_shapes(16, config)
    assert abs(np.asarray(params["wi"]).std() * 4 - 1) < 0.05
    native = jax.eval_shape(NativeMoEBlock(config).init, jax.random.key(0), jnp.zeros((2, 3, 16)))[
        "params"
    ]
    assert {name: w.shape for name, w in native.items()} == param_shapes(16, config)


def test_linen_logical_axes_can_be_set_and_left_out():
    x = jnp.zeros((2, 3, 16))
    axes = LogicalAxes(embed="d", expert="e", mlp="f")
    named = jax.eval_shape(linen.MoEBlock(make_config(), axes).init, jax.random.key(0), x)
    assert flax.linen.get_partition_spec(named)["params"]["wo"] == P("e", "f", "d")
    plain = jax.eval_shape(linen.MoEBlock(make_config(), None).init, jax.random.key(0), x)
    assert isinstance(plain["params"]["wo"], jax.ShapeDtypeStruct)


def test_nnx_parameters():
    config = make_config()
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    state = flax_nnx.state(block, flax_nnx.Param)
    assert {name: p[...].shape for name, p in state.items()} == param_shapes(16, config)
    specs = flax_nnx.get_partition_spec(state)
    assert {name: specs[name].get_value() for name in state} == NAMES
    assert abs(np.asarray(block.wi[...]).std() * 4 - 1) < 0.05
    plain = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0), logical_axes=None)
    assert not plain.wi.has_metadata("out_sharding")
    assert_equal_trees(flax_nnx.state(plain), flax_nnx.state(block))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_nnx_parameters_are_laid_out_where_rules_say(kind):
    config = make_config()
    with jax.set_mesh(make_mesh((2, 4), kind)):
        unknown = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
        with flax_nnx.logical_axis_rules(RULES):
            block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
    assert unknown.wi[...].sharding.is_fully_replicated
    for name, spec in RESTED.items():
        got = getattr(block, name)[...]
        assert got.sharding.is_equivalent_to(
            jax.NamedSharding(got.sharding.mesh, spec), got.ndim
        ), name


def test_nnx_block_runs_sharded_and_jitted():
    config = make_config()
    data = make_data(config)
    want = moe(data.params, data.x, config)
    with jax.set_mesh(make_mesh((2, 4), AxisType.Explicit)):
        with flax_nnx.logical_axis_rules(RULES):
            block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0))
        for name, w in data.params.items():
            variable = getattr(block, name)
            variable[...] = jax.device_put(w, variable[...].sharding)
        x = jax.device_put(data.x, P(("fsdp", "ep")))
        got = flax_nnx.jit(lambda block, x: block(x))(block, x)
    error = np.linalg.norm(np.asarray(got.y) - want.y) / np.linalg.norm(want.y)
    assert error < 1e-5
    np.testing.assert_array_equal(got.tokens_per_expert, want.tokens_per_expert)


def test_linen_scan_over_layers():
    """Stacked parameters [L, ...] through flax.linen.scan."""
    config = make_config()
    x = jnp.asarray(make_data(config).x)

    class Layer(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, _):
            out = linen.MoEBlock(config, None, name="moe")(x)
            return x + out.y, out.aux_loss

    stack = flax.linen.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    shapes = jax.eval_shape(stack.init, jax.random.key(0), x, None)["params"]["moe"]
    layers = [make_data(config, seed=seed).params for seed in range(3)]
    params = jax.tree.map(lambda *w: jnp.stack(w), *layers)
    assert {name: w.shape for name, w in params.items()} == {
        name: w.shape for name, w in shapes.items()
    }
    assert params["wi"].shape == (3, 8, 16, 2, 12)
    y, aux = jax.jit(stack.apply)({"params": {"moe": params}}, x, None)
    want, layer = x, jax.jit(lambda params, x: moe(params, x, config))
    for i in range(3):
        out = layer({name: w[i] for name, w in params.items()}, want)
        want += out.y
        assert abs(float(aux[i] - out.aux_loss)) < 1e-6
    assert np.linalg.norm(y - want) < 1e-5 * np.linalg.norm(want)
