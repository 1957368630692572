"""The Linen and NNX modules are the function with its parameters, under the same names."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from expertmesh.core import DelayedScaling, autocast, global_shard_guard, update_expert_bias
from expertmesh.flax_moe import LogicalAxes, NativeMoEBlock, linen, moe, nnx, param_shapes
from flax_moe.moe_oracle import RESOURCE, make_config, make_data, make_mesh, place

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


@pytest.mark.full
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
    config = make_config(use_gate_bias=True)
    variables = jax.jit(linen.MoEBlock(config).init)(jax.random.key(0), jnp.zeros((2, 3, 16)))
    assert set(variables) == {"params"}
    specs = flax.linen.get_partition_spec(variables)["params"]
    assert specs == NAMES | {"gate_bias": P(None)}
    params = flax.linen.unbox(variables)["params"]
    assert {name: w.shape for name, w in params.items()} == param_shapes(16, config)
    assert abs(np.asarray(params["wi"]).std() * 4 - 1) < 0.05
    native = jax.eval_shape(NativeMoEBlock(config).init, jax.random.key(0), jnp.zeros((2, 3, 16)))[
        "params"
    ]
    assert {name: w.shape for name, w in native.items()} == param_shapes(16, config)


def test_modules_take_an_initializer():
    config, ones = make_config(), jax.nn.initializers.ones
    x = jnp.zeros((2, 3, 16))
    of_linen = linen.MoEBlock(config, None, ones).init(jax.random.key(0), x)["params"]
    native = NativeMoEBlock(config, None, ones).init(jax.random.key(0), x)["params"]
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0), kernel_init=ones)
    for name, w in of_linen.items():
        assert np.all(np.asarray(w) == (0 if "bias" in name else 1)), name
        np.testing.assert_array_equal(getattr(block, name)[...], w)
        np.testing.assert_array_equal(native[name], w)


def test_a_block_made_without_the_recipe_in_context_is_refused():
    config, x = make_config(use_bias=False), jnp.zeros((2, 3, 16))
    block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0), logical_axes=None)
    module = linen.MoEBlock(config, None)
    variables = module.init(jax.random.key(0), x)
    with autocast(DelayedScaling()):
        for call in (lambda: block(x), lambda: module.apply(variables, x)):
            with pytest.raises(ValueError, match="quant_state must be given with DelayedScaling"):
                call()


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


def test_nnx_scan_over_layers():
    """Layers made by vmap, called under scan."""
    config = make_config(use_bias=False)
    x = jnp.asarray(make_data(config).x)

    @flax_nnx.split_rngs(splits=3)
    @flax_nnx.vmap
    def make(rngs):
        return nnx.MoEBlock(16, config, rngs=rngs, logical_axes=None)

    @flax_nnx.jit
    @flax_nnx.scan(in_axes=(flax_nnx.Carry, 0), out_axes=(flax_nnx.Carry, 0))
    def forward(x, block):
        out = block(x)
        return x + out.y, out.aux_loss

    blocks = make(flax_nnx.Rngs(0))
    assert blocks.wi[...].shape == (3, 8, 16, 2, 12)
    y, aux = forward(x, blocks)
    want, layer = x, jax.jit(lambda params, x: moe(params, x, config))
    for i in range(3):
        out = layer({n: getattr(blocks, n)[...][i] for n in ("gate_kernel", "wi", "wo")}, want)
        want += out.y
        assert abs(float(aux[i] - out.aux_loss)) < 1e-6
    assert np.linalg.norm(y - want) < 1e-5 * np.linalg.norm(want)


def test_expert_bias_mask_and_replay():
    """Both modules hold the bias outside of what is trained, and hand on what the function takes."""
    config = make_config(score_function="sigmoid", use_expert_bias=True, use_bias=False)
    data = make_data(config)
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.normal(size=8), jnp.float32)
    mask = jnp.asarray(rng.random((8, 5)) < 0.7)
    forced = jnp.asarray(rng.integers(0, 8, size=(8, 5, 2)), jnp.int32)
    module = linen.MoEBlock(config)
    variables = jax.eval_shape(module.init, jax.random.key(0), data.x)
    assert set(variables) == {"params", linen.EXPERT_BIAS}
    assert variables[linen.EXPERT_BIAS]["expert_bias"].shape == (8,)
    block = nnx_with(data.params, config)
    assert "expert_bias" not in flax_nnx.state(block, flax_nnx.Param)
    assert list(flax_nnx.state(block, nnx.ExpertBias)) == ["expert_bias"]
    assert not np.any(block.expert_bias[...])
    block.expert_bias[...] = bias
    variables = {"params": data.params, linen.EXPERT_BIAS: {"expert_bias": bias}}

    @jax.jit
    def outputs(x):
        made = []
        for options in (dict(token_mask=mask), dict(topk_idx=forced)):
            made.append(
                [
                    moe(data.params, x, config, expert_bias=bias, **options),
                    module.apply(variables, x, **options),
                    block(x, **options),
                ]
            )
        return made

    for want, of_linen, of_nnx in outputs(data.x):
        assert_equal_trees(of_linen, want)
        assert_equal_trees(of_nnx, want)
    masked, replayed = outputs(data.x)
    unbiased = moe(data.params, data.x, config, expert_bias=0 * bias, token_mask=mask)
    assert (masked[0].topk_idx != unbiased.topk_idx).any()
    assert (np.asarray(masked[0].topk_idx) == -1).any(-1).sum() == (~mask).sum()
    np.testing.assert_array_equal(replayed[0].topk_idx, forced)


def test_the_bias_balances():
    """Updates by value between steps: the load of the busiest expert comes down."""
    config = make_config(score_function="sigmoid", use_expert_bias=True, use_bias=False)
    data = make_data(config, (16, 8, 16))
    gate = data.params["gate_kernel"] + np.linspace(0.1, 0.0, 8, dtype=np.float32)
    block = nnx_with(data.params | {"gate_kernel": gate}, config)
    call = flax_nnx.jit(lambda block, x: block(x).tokens_per_expert)
    first = call(block, abs(data.x))
    for _ in range(40):
        counts = call(block, abs(data.x))
        block.expert_bias[...] = update_expert_bias(block.expert_bias[...], counts, 0.01)
    mean = counts.sum() / 8
    assert first.max() > 1.5 * mean and counts.max() < 1.25 * mean, (first, counts)


@covering(
    "library, remat", ["linen", "nnx"], [False, True], covers=[("linen", True), ("nnx", False)]
)
def test_a_guard_inside_a_layer(library, remat):
    """The layer's `__call__` enters it; the gradients of two layers are those of a guard around the step."""
    config = make_config(use_bias=False)
    data = place(make_data(config), config, make_mesh((2, 4), AxisType.Auto))
    blocks = [nnx_with(data.params, config) for _ in range(2)]

    class LinenLayer(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            with global_shard_guard(RESOURCE):
                return x + linen.MoEBlock(config, None, name="moe")(x).y

    def nnx_layer(block, x):
        with global_shard_guard(RESOURCE):
            return x + block(x).y

    def two_of_linen(params, x):
        layer = flax.linen.remat(LinenLayer) if remat else LinenLayer
        for i in range(2):
            x = layer().apply({"params": {"moe": params[i]}}, x)
        return jnp.sum(x * data.dy)

    def two_of_nnx(blocks, x):
        layer = flax_nnx.remat(nnx_layer) if remat else nnx_layer
        for block in blocks:
            x = layer(block, x)
        return jnp.sum(x * data.dy)

    def gradient(x):
        if library == "linen":
            return jax.jit(jax.grad(two_of_linen))([data.params] * 2, x)
        return flax_nnx.jit(flax_nnx.grad(two_of_nnx))(blocks, x)

    got = gradient(data.x)
    with global_shard_guard(RESOURCE):
        want = gradient(data.x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
