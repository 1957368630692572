"""The stages: their composition is the block; two microbatches in turn; a pipeline over a Manual axis."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from expertmesh.core import Float8BlockScaling
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, init_params, init_quant_state, moe, stages
from flax_moe.moe_oracle import EXPLICIT, make_config, make_data, make_mesh, place

BLOCK = Float8BlockScaling()
SHAPE = (8, 4, 256)  # blocks of 128 on two shards
LOSSES = ("aux_loss", "z_loss")


def setup(recipe=None, dtype=jnp.float32, mesh=None, **changes):
    """A config, and data on a mesh or without one; tokens in `dtype`."""
    config = make_config(expert_dim=128, recipe=recipe, dtype=dtype, **changes)
    data = place(make_data(config, SHAPE), config, mesh)
    return config, data._replace(x=data.x.astype(dtype))


def composed(params, x, config, token_mask=None, quant_state=None):
    """What `moe` returns, from the stages; without what no stage makes."""
    routed = stages.route(params, x, config, token_mask=token_mask)
    dispatched = stages.dispatch(params, routed, config)
    computed = stages.experts(params, dispatched, config, quant_state=quant_state)
    y, state = stages.combine(computed), computed.quant_state
    if config.shared_expert_dim is not None:
        more = dict(quant_state=quant_state)
        shared, of_shared = stages.shared_experts(params, routed.x, config, **more)
        y, state = y + shared, state and state | of_shared
    numbers = {name: getattr(routed, name) for name in (*LOSSES, "tokens_per_expert", "entropy")}
    return dict(y=y.astype(x.dtype), num_dropped=dispatched.num_dropped, state=state) | numbers


def whole(params, x, config, token_mask=None, quant_state=None):
    out = moe(params, x, config, token_mask=token_mask, quant_state=quant_state)
    out = out._asdict() | dict(state=out.quant_state)
    return {name: out[name] for name in (*LOSSES, "y", "num_dropped", "state", "entropy")} | dict(
        tokens_per_expert=out["tokens_per_expert"]
    )


def with_gradients(block, dy):
    """`of(params, x)`: results, and gradients of sum(y dy) and the losses."""

    def loss(params, x):
        out = block(params, x)
        return jnp.sum(out["y"].astype(jnp.float32) * dy) + sum(out[k] for k in LOSSES), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    "recipe, dtype, bias, masked, sharded, changes",
    [
        (None, jnp.float32, True, True, True, dict(shared_expert_dim=128)),
        (None, jnp.bfloat16, False, True, False, dict(capacity_factor=1.0, activation="gelu")),
        full(None, jnp.bfloat16, True, False, False, {}),
        (BLOCK, jnp.bfloat16, False, False, True, {}),
        full(BLOCK, jnp.bfloat16, True, True, False, dict(capacity_factor=1.0)),
        full(BLOCK, jnp.float32, False, True, False, dict(shared_expert_dim=128)),
    ],
)
def test_composition_is_the_block(recipe, dtype, bias, masked, sharded, changes):
    """To the bit: results, and gradients of tokens and of all parameters."""
    mesh = make_mesh((2, 2), EXPLICIT) if sharded else None
    config, data = setup(recipe, dtype, mesh, use_bias=bias, **changes)
    mask = np.random.default_rng(0).random(SHAPE[:-1]) < 0.7 if masked else None
    got, want = (
        with_gradients(lambda p, x, b=block: b(p, x, config, mask), data.dy)(*data[:2])
        for block in (composed, whole)
    )
    assert np.any(np.asarray(want[1][1])) and all(np.any(np.asarray(g)) for g in want[1][0])
    assert_same_bits(got, want)


def test_experts_in_place():
    """Where the up projection reads tokens where they are, no row is made."""
    config = make_config(expert_dim=16, use_bias=False)
    data = place(make_data(config, SHAPE), config, None)
    dispatched = stages.dispatch(data.params, stages.route(data.params, data.x, config), config)
    assert dispatched.rows.shape == (1, 32, 256) and dispatched.handle.source.shape[1] > 32
    got, want = (
        with_gradients(lambda p, x, b=block: b(p, x, config), data.dy)(*data[:2])
        for block in (composed, whole)
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("bias, sums", [(False, True), (True, False)])
def test_experts_add_rows_whose_cotangents_are_only_quantized(bias, sums):
    config, data = setup(BLOCK, jnp.bfloat16, use_bias=bias)
    params, x, _ = data[:3]
    dispatched = stages.dispatch(params, stages.route(params, x, config), config)
    computed = stages.experts(params, dispatched, config)
    assert (computed.rows is None, computed.sums is not None) == (sums, sums)
    assert stages.combine(computed).shape == x.shape


def test_state_of_quantizers():
    """A stage reads and returns the state of its own layers; together that of the block."""
    config, data = setup("fp8_delayed", shared_expert_dim=128)
    state = init_quant_state(config)
    got, want = (
        jax.jit(block, static_argnums=2)(*data[:2], config, None, state)
        for block in (composed, whole)
    )
    assert set(got["state"]) == {"wi", "wo", "shared_wi", "shared_wo"}
    assert_same_bits(got, want)


def two_microbatches(params, first, second, config):
    """The exchange of one microbatch is written beside the experts of the other."""
    routed = stages.route(params, first, config)
    waiting = stages.dispatch(params, routed, config)
    routed_too = stages.route(params, second, config)
    # From here on two microbatches are under way.
    computed = stages.experts(params, waiting, config)
    waiting = stages.dispatch(params, routed_too, config)
    y = stages.combine(computed)
    computed = stages.experts(params, waiting, config)
    losses = routed.aux_loss + routed.z_loss + routed_too.aux_loss + routed_too.z_loss
    return (y, stages.combine(computed)), losses


@pytest.mark.parametrize("recipe", [None, full(BLOCK)])
def test_two_microbatches(recipe):
    """Interleaved they are two calls of the block, to the bit, their gradients too."""
    config, data = setup(recipe, mesh=make_mesh((2, 2), EXPLICIT), use_bias=False)
    second = data.x[::-1] * 2

    def apart(params, first, second, config):
        outs = moe(params, first, config), moe(params, second, config)
        return tuple(out.y for out in outs), sum(out.aux_loss + out.z_loss for out in outs)

    def loss(block, *operands):
        ys, losses = block(*operands, config)
        return sum(jnp.sum(y * data.dy) for y in ys) + losses, ys

    # The losses are added in another order, so the sum is not compared.
    (_, ys), gradients = _differentiated(loss, two_microbatches)(data.params, data.x, second)
    (_, want), want_gradients = _differentiated(loss, apart)(data.params, data.x, second)
    assert not np.array_equal(ys[0], ys[1])
    assert_same_bits((ys, gradients), (want, want_gradients))


def _differentiated(loss, block):
    function = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
    return jax.jit(lambda *operands: function(block, *operands))


@pytest.mark.parametrize("recipe", [None, full(BLOCK)])
def test_backward_by_stages(recipe):
    """A schedule may take each stage's backward by itself: `experts` moves no token, the others no weight."""
    config, data = setup(recipe, aux_loss_coeff=0.0, z_loss_coeff=0.0, use_bias=False)

    def by_stages(params, x, dy):
        routed, of_route = jax.vjp(lambda p, x: stages.route(p, x, config), params, x)
        sent, of_dispatch = jax.vjp(lambda r: stages.dispatch(params, r, config), routed)
        computed, of_experts = jax.vjp(lambda p, d: stages.experts(p, d, config), params, sent)
        y, of_combine = jax.vjp(stages.combine, computed)
        d_params, d_sent = of_experts(*of_combine(dy))
        d_router, d_x = of_route(*of_dispatch(d_sent))
        return y, d_params["wi"], d_params["wo"], d_router["gate_kernel"], d_x

    def at_once(params, x, dy):
        y, pull = jax.vjp(lambda p, x: moe(p, x, config).y, params, x)
        d_params, d_x = pull(dy)
        return y, d_params["wi"], d_params["wo"], d_params["gate_kernel"], d_x

    assert_same_bits(jax.jit(by_stages)(*data), jax.jit(at_once)(*data))


def pipeline(params, microbatches, config):
    """Inside a shard_map over pp: each stage of it has one block, and sends what it makes to the next."""
    number, count = jax.lax.axis_index("pp"), jax.lax.axis_size("pp")
    received, outputs = jnp.zeros_like(microbatches[0]), []
    for tick in range(len(microbatches) + count - 1):
        x = jnp.where(number == 0, microbatches[min(tick, len(microbatches) - 1)], received)
        routed = stages.route(params, x, config)
        computed = stages.experts(params, stages.dispatch(params, routed, config), config)
        y = x + stages.combine(computed)
        outputs.append(y)
        received = jax.lax.ppermute(y, "pp", [(i, i + 1) for i in range(count - 1)])
    last = jnp.where(number == count - 1, jnp.stack(outputs[count - 1 :]), 0)
    return jax.lax.psum(last, "pp")


@pytest.mark.parametrize("recipe", [None, full(BLOCK)])
def test_pipeline(recipe):
    """Over (pp, ep), pp Manual: two blocks with parameters of their own are the two, one after the other."""
    config = make_config(expert_dim=128, recipe=recipe, use_bias=False)
    blocks = [make_data(config, SHAPE, seed).params for seed in (0, 1)]
    rng = np.random.default_rng(2)
    x, dy = (rng.normal(size=(3, *SHAPE)).astype(np.float32) for _ in range(2))
    mesh = jax.make_mesh((2, 2), ("pp", "ep"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    stacked = {
        k: put(np.stack([b[k] for b in blocks]), "pp", None if k == "gate_kernel" else "ep")
        for k in blocks[0]
    }

    def stage(params, x):
        return pipeline({k: w[0] for k, w in params.items()}, x, config)

    of_pp = jax.shard_map(
        stage,
        mesh=mesh,
        axis_names={"pp"},
        in_specs=(PartitionSpec("pp"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )

    def in_turn(blocks, x):
        for params in blocks:
            x = jax.lax.map(lambda part, params=params: part + moe(params, part, config).y, x)
        return x

    def run(function, params, x, dy):
        y, pull = jax.vjp(function, params, x)
        return y, *pull(dy)

    tokens = put(x, None, "ep"), put(dy, None, "ep")
    y, d_params, d_x = jax.jit(run, static_argnums=0)(of_pp, stacked, *tokens)
    want, d_blocks, want_x = jax.jit(run, static_argnums=0)(in_turn, blocks, x, dy)
    assert relative_error(y, want) < 1e-5 and relative_error(d_x, want_x) < 1e-5
    for name, gradient in jax.tree.map(np.asarray, d_params).items():
        for i, of_block in enumerate(d_blocks):
            assert relative_error(gradient[i], of_block[name]) < 1e-5, (name, i)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda p, x, c: stages.route({}, x, c), ValueError, "stages.route: .*gate_kernel"),
        (lambda p, x, c: stages.route(p, x[0, 0], c), ValueError, "stages.route: x must be"),
        (
            lambda p, x, c: stages.dispatch({"wi": p["wi"]}, stages.Routed(x, x, x), c),
            ValueError,
            "stages.dispatch: .*missing wo",
        ),
        (
            lambda p, x, c: stages.shared_experts(p, x, c),
            ValueError,
            "stages.shared_experts: .*shared_wi",
        ),
        (
            lambda p, x, c: stages.from_latent(
                {"latent_up": 3}, x, dataclasses.replace(c, latent_dim=16)
            ),
            TypeError,
            "stages.from_latent: latent_up must be an array of floats .*; got a int",
        ),
        (
            lambda p, x, c: stages.from_latent([1], x, dataclasses.replace(c, latent_dim=16)),
            TypeError,
            "stages.from_latent: params must be",
        ),
        (
            lambda p, x, c: stages.combine(stages.Computed(handle=None, rows=None)),
            ValueError,
            "stages.combine: .*rows or sums; got neither",
        ),
    ],
)
def test_errors(call, error, words):
    config, data = setup(use_bias=False)
    with pytest.raises(error, match=words):
        call(data.params, data.x, config)


def test_a_wide_id_of_no_expert_goes_nowhere():
    """With null experts, too, none of its bits are lost before it is compared."""
    with jax.enable_x64(True):
        config = MoEConfig(num_experts=4, top_k=1, expert_dim=8, num_null_experts=1)
        params = init_params(jax.random.key(0), 8, config)
        routed = stages.route(params, jnp.ones((1, 4, 8), jnp.float32), config)
        ids = jnp.asarray([[[2**32 + 1], [1], [4], [2**33 + 4]]], jnp.int64)
        dispatched = stages.dispatch(params, routed._replace(topk_idx=ids), config)
        np.testing.assert_array_equal(jnp.sum(dispatched.handle.group_sizes), 1)
