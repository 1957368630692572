"""The quantized block against an emulation of the recipe in float64; what it keeps, caches and carries along.

Every mesh mode is in conformance/test_quantized_block.py, what crosses devices in test_wire_bytes.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType

from cases.covering import full
from ep.exchange_oracle import shards
from expertmesh.core import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    global_shard_guard,
)
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import (
    MoEConfig,
    init_params,
    init_quant_state,
    linen,
    moe,
    native_moe,
    nnx,
    quantize_weights,
)
from flax_moe import quantized_oracle
from flax_moe.moe_oracle import (
    RESOURCE,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    value_and_gradients,
)

# On another version of JAX the conformance suite runs the quantized block in every mode.
pytestmark = pytest.mark.default_jax

CURRENT, BLOCK, MX = Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()
HYBRID = Float8BlockScaling(fp8_format=Format.HYBRID)
FOUR = NVFP4BlockScaling(disable_stochastic_rounding=True)
DELAYED = DelayedScaling(amax_history_len=3, margin=1)
TOLERANCE = 1e-5


def setup(recipe, **changes):
    """Sizes of few blocks. Every group has padding, whose hidden rows are not zero where there are biases."""
    wide = isinstance(recipe, Float8BlockScaling)
    config = make_config(recipe=recipe, expert_dim=128 if wide else 32, **changes)
    return config, make_data(config, (8, 3, 256) if wide else (2, 32, 64))


def from_cache(kernels):
    """The block with weights that were quantized before, and have been lost since."""

    def block(params, x, config):
        lost = {name: w + np.nan if name in kernels else w for name, w in params.items()}
        return moe(lost, x, config, weights_quantized=kernels)

    return block


@pytest.mark.parametrize(
    "recipe, cached, changes",
    [
        full(HYBRID, False, dict(use_bias=False, remat="recompute", num_chunks=2)),
        full(MX, True, dict(shared_expert_dim=32)),
        full(CURRENT, False, dict(shared_expert_dim=48)),
        full(FOUR, False, dict(remat="save_min")),
        full(MX, False, dict(remat="save_8_bits", num_chunks=2)),
    ],
    ids=["hybrid in parts", "mx from a cache", "tensor", "nvfp4", "mx kept in 8 bits"],
)
def test_against_the_emulation(recipe, cached, changes):
    """Forward and gradients; those of a cached weight are the weight's. Blocks along rows begin anew with each part."""
    config, data = setup(recipe, **changes)
    block = from_cache(quantize_weights(data.params, config)) if cached else moe
    (_, output), gradients = jax.jit(value_and_gradients(block, config))(*place(data, config, None))
    tokens = np.arange(data.x[..., 0].size).reshape(data.x.shape[:-1])
    parts = [tokens[j :: config.num_chunks].ravel() for j in range(config.num_chunks)]
    x, of_x = data.x.reshape(-1, data.x.shape[-1]), config.recipe.formats().x
    multiplier = quantized_oracle.multiplier_of_tokens(x, np.full(len(x), True), of_x)
    want = quantized_oracle.run(data, config, parts, multipliers={"wi": (multiplier, None)})
    assert_result(output, gradients, want, TOLERANCE)


@pytest.mark.parametrize("kind", [AxisType.Explicit, full(AxisType.Auto)])
@pytest.mark.parametrize("recipe", [full(None), BLOCK], ids=["float32", "block"])
def test_8_bits_are_kept_on_a_mesh(recipe, kind):
    """Axes split tokens, experts and weights: gradients are those without a mesh."""
    config = make_config(recipe=recipe, expert_dim=128, use_bias=False, remat="save_8_bits")
    data, mesh = make_data(config, (8, 3, 256)), make_mesh((2, 2), kind)

    def run(mesh):
        return jax.jit(value_and_gradients(moe, config))(*place(data, config, mesh))

    with global_shard_guard(RESOURCE):
        (_, got), gradients = run(mesh)
    (_, want), wanted = run(None)
    assert relative_error(got.y, want.y) < 2e-2
    for mine, like in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        assert relative_error(mine, like) < 5e-2


@pytest.mark.any_device
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "recipe", [None, BLOCK, CURRENT, MX], ids=["bfloat16", "block", "current", "mx"]
)
def test_a_mesh_of_one_device(recipe, kind):
    """The bits that there are without a mesh, though every axis splits some operand: as a trainer has it on one GPU."""
    config = make_config(
        recipe=recipe, expert_dim=128, use_bias=False, dtype="bfloat16", activation="silu"
    )
    data, one = make_data(config, (8, 3, 256)), make_mesh((1, 1), kind)

    def run(mesh):
        return jax.jit(value_and_gradients(moe, config))(*place(data, config, mesh))

    with global_shard_guard(RESOURCE):
        got = run(one)
    for mine, want in zip(*map(jax.tree.leaves, (got, run(None))), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    "recipe, kind",
    [(BLOCK, AxisType.Explicit), full(CURRENT, AxisType.Auto), full(DELAYED, AxisType.Auto)],
)
def test_fsdp_splits_experts(recipe, kind):
    """The same as where fsdp splits D, of which blocks of 128 are whole on each device."""
    config = make_config(recipe=recipe, expert_dim=128, shard_exp_on_fsdp=True)
    data, mesh = make_data(config, (8, 3, 256)), make_mesh((2, 4), kind)
    state = init_quant_state(config) if recipe is DELAYED else None

    def run(config):
        def block(params, x, config):
            return moe(params, x, config, quant_state=state)

        with global_shard_guard(RESOURCE):
            (_, output), gradients = jax.jit(value_and_gradients(block, config))(
                *place(data, config, mesh)
            )
        return output.y, output.quant_state, gradients

    along_width = dataclasses.replace(config, shard_exp_on_fsdp=False)
    for got, want in zip(*map(jax.tree.leaves, (run(config), run(along_width))), strict=True):
        assert relative_error(got, want) < TOLERANCE


@pytest.mark.full
def test_rounding_at_random():
    """The same bits for the same key; with another, other gradients, right on average. The forward has no chance."""
    recipe = NVFP4BlockScaling(disable_rht=True)
    config = make_config(recipe=recipe, expert_dim=32, num_experts=2, top_k=1, use_bias=False)
    data = make_data(config, (1, 32, 32))

    @jax.jit
    def run(params, x, dy, key):
        def block(params, x, config):
            return moe(params, x, config, key=key)

        return value_and_gradients(block, config)(params, x, dy)

    runs = [run(*data, jax.random.key(i)) for i in (0, 0, *range(1, 12))]
    # Without chance: its gradients err by what is rounded, not by which way.
    want = quantized_oracle.run(data, config, [np.arange(32)])
    assert relative_error(runs[0][0][1].y, want.y) < TOLERANCE
    for name in ("wi", "wo"):
        first, again, *others = (np.asarray(gradients[0][name]) for _, gradients in runs)
        np.testing.assert_array_equal(first, again)
        spread = [relative_error(other, first) for other in others]
        assert min(spread) > 1e-2
        mean = np.mean([first, *others], axis=0)
        assert relative_error(mean, want.d_params[name]) < relative_error(
            first, want.d_params[name]
        )


@pytest.mark.full
def test_state_of_delayed_scaling_on_a_mesh():
    """The first step multiplies by 1 and remembers amaxes; the second one uses them. The same on every device."""
    config = make_config(recipe=DELAYED, shared_expert_dim=48, expert_dim=16)
    data = make_data(config, (8, 8, 32))
    mesh = make_mesh((2, 4), AxisType.Explicit)
    state = jax.device_put(init_quant_state(config), jax.NamedSharding(mesh, jax.P()))

    @jax.jit
    def step(params, x, dy, state):
        def block(params, x, config):
            return moe(params, x, config, quant_state=state)

        return value_and_gradients(block, config)(params, x, dy)

    placed = place(data, config, mesh)
    blocks = list(shards({"fsdp": 2, "ep": 4}, (("fsdp", "ep"),), (8, 8), ("ep",)))
    for _ in range(2):
        given = {
            name: tuple(np.asarray(part.multiplier) for part in (layer.x, layer.weight))
            for name, layer in state.items()
        }
        (_, output), gradients = step(*placed, state)
        want = quantized_oracle.run(data, config, blocks, 4, given)
        assert_result(output, gradients, want, TOLERANCE)
        state = output.quant_state
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    half = np.float32(0.5)  # 2^-margin
    x, wi = data.x, data.params["wi"]
    np.testing.assert_array_equal(given["shared_wi"][0], half * (np.float32(448) / np.abs(x).max()))
    np.testing.assert_array_equal(
        given["wi"][1], half * (np.float32(448) / np.abs(wi).max(axis=(1, 2, 3)))
    )
    np.testing.assert_array_equal(
        state["wo"].weight.amax_history,
        np.abs(data.params["wo"]).max(axis=(1, 2))[:, None] * [0, 1, 1],
    )


@pytest.mark.full
def test_state_goes_through_the_parts():
    config, data = setup(DELAYED, num_chunks=2)
    state = moe(data.params, data.x, config, quant_state=init_quant_state(config)).quant_state
    history = np.asarray(state["wi"].x.amax_history)
    assert history[0] == 0 and history[1] != history[2] and max(history) == np.abs(data.x).max()


def test_weights_are_quantized_once_for_all_parts():
    config, data = setup(MX, num_chunks=2)
    text = str(jax.make_jaxpr(lambda params: moe(params, data.x, config).y)(data.params))
    before, scan, inside = text.partition("scan[")
    wide = "f8_e8m0fnu[8,64,2,1]"  # scales of wi
    assert scan and wide in before


@pytest.mark.full
def test_the_recipe_in_context():
    """It is taken where the config has none: the same program."""
    config, data = setup(None)
    explicit = dataclasses.replace(config, recipe=CURRENT)
    assert (config.row_alignment, explicit.row_alignment) == (1, 16)

    def program(config, context):
        with autocast(context):
            return str(jax.make_jaxpr(lambda p, x: moe(p, x, config).y)(*data[:2]))

    plain, want = program(config, None), program(explicit, None)
    assert program(config, "fp8_current") == program(explicit, "mxfp8") == want != plain


def test_masked_tokens_may_hold_anything():
    """Nothing of them is read. And gradients of tokens that travel in 8 bits are near the wide ones; no others are."""
    config, data = setup(MX, use_bias=False, quantize_backward_combine=True)

    @jax.jit
    def run(params, x, dy, mask):
        def block(params, x, config):
            return moe(params, x, config, token_mask=mask)

        return value_and_gradients(block, config)(params, x, dy)

    every = np.ones(data.x.shape[:-1], bool)
    (_, output), (d_params, d_x) = run(*data, every)
    want = quantized_oracle.run(data, config, [np.arange(every.size)])
    assert 1e-3 < relative_error(d_x, want.d_x) < 5e-2
    assert_result(output, (d_params, want.d_x), want, TOLERANCE)
    mask = np.random.default_rng(0).random(every.shape) < 0.7
    poisoned = data._replace(x=np.where(mask[..., None], data.x, np.nan))
    for a, b in zip(
        jax.tree.leaves(run(*data, mask)), jax.tree.leaves(run(*poisoned, mask)), strict=True
    ):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def residuals(config, params, x, policy=None):
    """The types of what the backward of the block keeps."""

    def forward(params, x):
        return moe(params, x, config).y

    if policy is not None:
        forward = jax.checkpoint(forward, policy=policy)
    pull = jax.eval_shape(lambda params, x: jax.vjp(forward, params, x)[1], params, x)
    return [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)]


def test_what_is_kept_has_8_bits():
    """Of rows and weights; by name also where a policy drops everything else."""
    config, data = setup(BLOCK, dtype=jnp.bfloat16, use_bias=False)
    x = jax.ShapeDtypeStruct(data.x.shape, jnp.bfloat16)
    kept = residuals(config, data.params, x)
    wi, wo = (data.params[name].shape for name in ("wi", "wo"))
    narrow = {shape for dtype, shape in kept if dtype == "float8_e4m3fn"}
    # The activation, its features first, and the tokens, of which the rows along the rows are made again.
    hidden, tokens = sorted(narrow - {wi, wo}, reverse=True)
    assert tokens == (1, x.size // 256, 256) and hidden[:2] == (128, 1)
    eight = {("float8_e4m3fn", shape) for shape in (tokens, hidden, wi, wo)}
    assert eight <= set(kept)
    wide = {shape for dtype, shape in kept if dtype in ("bfloat16", "float32")}
    assert not wide & {(*hidden[1:], 256), wi, wo}
    names = ("quantized_x", "quantized_weight")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    saved = set(residuals(config, data.params, x, policy))
    assert {("uint8", shape) for _, shape in eight} <= saved  # as bits
    arguments = {("float32", w.shape) for w in data.params.values()} | {("bfloat16", x.shape)}
    assert not {s for s in saved - arguments if s[0] == "bfloat16"}


@pytest.mark.parametrize("recipe", [BLOCK, MX], ids=["block", "mx"])
def test_what_came_from_other_devices_is_kept(recipe):
    """To the bit, though JAX rounds floats of 8 bits that a policy keeps: the gradients are those of "save_all"."""
    config, data = setup(recipe, use_bias=False)

    def run(remat):
        block = value_and_gradients(moe, dataclasses.replace(config, remat=remat))
        return jax.jit(block)(*place(data, config, None))

    jax.tree.map(np.testing.assert_array_equal, run("save_min"), run("save_all"))


def test_modules_carry_the_state():
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=16, recipe=DELAYED)
    x = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    module = linen.MoEBlock(config, logical_axes=None)
    variables = module.init(jax.random.key(0), x)
    assert set(variables) == {"params", linen.QUANT_STATE}
    output = module.apply(variables, x)
    want = moe(variables["params"], x, config, quant_state=init_quant_state(config))
    state = variables[linen.QUANT_STATE]["quant_state"]
    assert jax.tree.structure(output.quant_state) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(output), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    block = nnx.MoEBlock(32, config, rngs=flax_nnx.Rngs(0), logical_axes=None)
    assert not jax.tree.leaves(flax_nnx.state(block, flax_nnx.All(flax_nnx.Param, nnx.QuantState)))
    block.quant_state.set_value(output.quant_state)
    again = block(x).quant_state
    amax = float(jnp.abs(x.astype(config.dtype)).max())
    assert np.asarray(again["wi"].x.amax_history).tolist() == [0, amax, amax]


ERRORS = {
    "a recipe's name": (lambda: setup("fp9"), ValueError, "'fp9'"),
    "alignment": (lambda: setup(BLOCK, alignment=64), ValueError, "multiple of 128.*alignment=64"),
    "combine over the ring": (
        lambda: setup(MX, quantize_backward_combine=True, transport="ring"),
        ValueError,
        "'ring'.*'auto'",
    ),
    "combine without blocks": (
        lambda: setup(CURRENT, quantize_backward_combine=True),
        ValueError,
        "quantize_backward_combine.*Float8CurrentScaling",
    ),
    "combine without a recipe": (
        lambda: call(None, quantize_backward_combine=True),
        ValueError,
        "recipe=None",
    ),
    "no state": (lambda: call(DELAYED), ValueError, "quant_state must be given.*init_quant_state"),
    "a state": (lambda: call(MX, quant_state={}), ValueError, "leave it out"),
    "no layers in the state": (
        lambda: call(DELAYED, quant_state={}),
        ValueError,
        "must have the layers wi, wo",
    ),
    "a history of another length": (
        lambda: call(DELAYED, quant_state=init_quant_state(setup(DelayedScaling())[0])),
        ValueError,
        "amax_history_len = 3.*1024",
    ),
    "a cache without a recipe": (
        lambda: call(None, weights_quantized={}),
        ValueError,
        "weights_quantized must go with a recipe",
    ),
    "a cache of another recipe": (
        lambda: call(MX, weights_quantized=kernels_of(CURRENT)),
        ValueError,
        "weight_quantized must be of the weight and of the recipe",
    ),
    "a cache of weights with state": (lambda: kernels_of(DELAYED), ValueError, "without state"),
    "no key": (lambda: call(NVFP4BlockScaling()), ValueError, "key=None.*new jax.random.key"),
    "widths": (
        lambda: call(MX, shape=(2, 8, 40)),
        ValueError,
        r"dimension 2 of size 40 must be a multiple of the block, 32",
    ),
    "the native block": (lambda: native(MX), ValueError, "native_moe: recipe"),
}


def call(recipe, shape=(2, 8, 64), quantize_backward_combine=False, **given):
    config = make_config(
        recipe=recipe, expert_dim=32, quantize_backward_combine=quantize_backward_combine
    )
    data = make_data(config, shape)
    return jax.eval_shape(lambda params, x: moe(params, x, config, **given), *data[:2])


def kernels_of(recipe):
    config, data = setup(recipe)
    return quantize_weights(data.params, config)


def native(recipe):
    config, data = setup(recipe)
    return native_moe(data.params, data.x, config)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    function, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        function()


def test_huge_buffers_are_never_flat():
    """No dimension of what is quantized is a product of others: 3.2e9 numbers have no index in 32 bits."""
    config = MoEConfig(num_experts=256, top_k=8, expert_dim=512, recipe=BLOCK)
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), 4096, config))
    x = jax.ShapeDtypeStruct((786432 // 8, 4096), jnp.bfloat16)
    y, (_, d_x) = jax.eval_shape(
        lambda params, x: (lambda y, pull: (y, pull(y)))(
            *jax.vjp(lambda params, x: moe(params, x, config).y, params, x)
        ),
        params,
        x,
    )
    assert y.shape == d_x.shape == x.shape
