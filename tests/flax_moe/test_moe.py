"""The block against loops in float64: forward, gradients and statistics, in every mesh mode."""

import collections
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cases.covering import covering, full
from expertmesh.core import Activation
from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.testing import relative_error
from expertmesh.ep import recv_capacity
from expertmesh.flax_moe import MoEOutput, moe, param_specs
from flax_moe.moe_oracle import (
    AUTO,
    EXPLICIT,
    GPT_OSS,
    RESOURCE,
    TOKENS,
    Data,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    run,
    value_and_gradients,
)

MODES = {
    "explicit": (EXPLICIT, None),
    "explicit_resource": (EXPLICIT, RESOURCE),
    "resource": (AUTO, RESOURCE),
    "auto": (AUTO, None),
}


@contextlib.contextmanager
def setting(mode, shape):
    """The mesh of a mode, its resource in context."""
    kind, resource = MODES[mode]
    with global_shard_guard(resource):
        yield make_mesh(shape, kind)


def compare(config, data, mesh=None, tolerance=1e-5, **oracle):
    placed = place(data, config, mesh)
    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(*placed)
    assert_result(output, gradients, run(data, config, **oracle), tolerance)
    return placed, output, gradients


@pytest.mark.parametrize(
    "mode, shape",
    [
        ("explicit_resource", (2, 4)),
        *(full(mode, (2, 4)) for mode in MODES if mode != "explicit_resource"),
        full("explicit", (8, 1)),
        full("resource", (1, 8)),
        full("auto", (1, 2)),
    ],
)
def test_every_mesh_mode(mode, shape):
    """With all biases, the gate's too."""
    config = make_config(use_gate_bias=True)
    with setting(mode, shape) as mesh:
        placed, output, gradients = compare(config, make_data(config), mesh)
    assert isinstance(output, MoEOutput)
    assert output.y.sharding.is_equivalent_to(placed.x.sharding, 3) or mode == "auto"
    if mode != "auto":
        for got, primal in zip(
            jax.tree.leaves(gradients), jax.tree.leaves(placed[:2]), strict=True
        ):
            assert got.sharding.is_equivalent_to(primal.sharding, got.ndim)
    numbers = jax.tree.leaves(output._replace(y=None, topk_idx=None))
    assert len(numbers) == 5 and all(x.sharding.is_fully_replicated for x in numbers), (
        "losses and statistics are the same everywhere"
    )


@pytest.mark.parametrize(
    "changes",
    [
        full(dict(use_pre_softmax=True, activation="squared_relu")),
        full(dict(use_bias=False, top_k=1, alignment=16)),
        full(dict(top_k=8, aux_loss_coeff=0.0, z_loss_coeff=0.0)),
        dict(activation=GPT_OSS, alignment=16),
        dict(activation=Activation(function="gelu", gated=False), shared_expert_dim=20),
        full(dict(num_chunks=5, remat="recompute", use_bias=False)),
    ],
    ids=str,
)
def test_one_device_options(changes):
    config = make_config(**changes)
    compare(config, make_data(config))


@pytest.mark.parametrize(
    "transport, alignment, top_k",
    [full("ring", 8, 2), full("all_to_all", 1, 5)],
)
def test_transports(transport, alignment, top_k):
    config = make_config(transport=transport, alignment=alignment, top_k=top_k)
    with setting("explicit", (2, 4)) as mesh:
        compare(config, make_data(config), mesh)


@pytest.mark.full
def test_several_axes_and_tokens_over_the_sequence():
    """EP over two axes; the batch over one of them, the sequence over the other."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(EXPLICIT,) * 2)
    config = make_config(ep_axis=("a", "b"))
    data = make_data(config, (4, 8, 16))
    put = functools.partial(jax.device_put)
    expert = jax.NamedSharding(mesh, PartitionSpec(("a", "b")))
    tokens = jax.NamedSharding(mesh, PartitionSpec("a", "b"))
    params = {
        k: put(w, expert)
        if k != "gate_kernel"
        else put(w, jax.NamedSharding(mesh, PartitionSpec()))
        for k, w in data.params.items()
    }
    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(
        params, put(data.x, tokens), put(data.dy, tokens)
    )
    assert_result(output, gradients, run(data, config))
    assert gradients[1].sharding.spec == PartitionSpec("a", "b", None)


@pytest.mark.parametrize(
    "kind, roles",
    [
        pytest.param(EXPLICIT, ("fsdp", "ep", "tp"), marks=pytest.mark.full),
        full(AUTO, ("fsdp", "ep", "tp")),
        pytest.param(AUTO, ("dp", "fsdp", "ep"), marks=pytest.mark.full),
    ],
)
def test_three_axes(kind, roles):
    """Tensor parallelism inside the experts; weights replicated over dp and sharded over fsdp."""
    config = make_config()
    data = make_data(config)
    resource = MeshResource(**{f"{role}_resource": role for role in roles})
    mesh = jax.make_mesh((2, 2, 2), roles, axis_types=(kind,) * 3)
    specs = param_specs(config, resource)
    params = {
        k: jax.device_put(w, jax.NamedSharding(mesh, specs[k])) for k, w in data.params.items()
    }
    tokens = jax.NamedSharding(mesh, PartitionSpec(resource.entry("tokens")))
    with global_shard_guard(resource if kind == AUTO else None):
        (_, output), gradients = jax.jit(value_and_gradients(moe, config))(
            params, *jax.device_put((data.x, data.dy), tokens)
        )
    assert_result(output, gradients, run(data, config))
    for name in ("wi", "wo"):
        w = params[name]
        assert gradients[0][name].sharding.is_equivalent_to(w.sharding, w.ndim), name


def test_vmap_over_layers():
    config = make_config()
    data = [make_data(config, seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *[d.params for d in data])
    out = jax.jit(jax.vmap(lambda params: moe(params, data[0].x, config)))(stacked)
    for i, layer in enumerate(data):
        want = run(layer._replace(x=data[0].x), config)
        assert relative_error(out.y[i], want.y) < 1e-5
        assert relative_error(out.aux_loss[i], want.aux_loss) < 1e-5
        np.testing.assert_array_equal(out.tokens_per_expert[i], want.tokens_per_expert)


@pytest.mark.parametrize("check_vma", [True, full(False)])
def test_inside_the_users_shard_map(check_vma):
    """x and the expert weights are shards; statistics and losses are about the shard's tokens."""
    options = dict(use_gate_bias=True, aux_loss_coeff=0.0, z_loss_coeff=0.0)
    config = make_config(ep_axis="ep", **options)
    data = make_data(config)
    mesh = make_mesh((2, 4), AUTO)
    gate = dict.fromkeys(("gate_kernel", "gate_bias"), PartitionSpec())
    weights = {name: PartitionSpec("ep") for name in data.params} | gate

    def shard(params, x, dy):
        (_, output), (d_params, d_x) = value_and_gradients(moe, config)(params, x, dy)
        if not check_vma:  # with it, JAX sums the gradients of replicated operands itself
            axes = {name: ("fsdp", "ep") if name in gate else ("fsdp",) for name in params}
            d_params = {name: jax.lax.psum(g, axes[name]) for name, g in d_params.items()}
        counts = jax.lax.psum(output.tokens_per_expert, ("fsdp", "ep"))
        return output._replace(tokens_per_expert=counts), (d_params, d_x)

    zeros = MoEOutput(*[PartitionSpec()] * 7)

    def total(params, x, dy):
        output, gradients = shard(params, x, dy)
        numbers = ("aux_loss", "z_loss", "num_dropped", "entropy")
        sums = {name: jax.lax.psum(getattr(output, name), ("fsdp", "ep")) for name in numbers}
        return output._replace(**sums), gradients

    function = jax.shard_map(
        total,
        mesh=mesh,
        in_specs=(weights, TOKENS, TOKENS),
        out_specs=(zeros._replace(y=TOKENS, topk_idx=TOKENS), (weights, TOKENS)),
        check_vma=check_vma,
    )
    output, gradients = jax.jit(function)(*data)
    assert_result(output, gradients, run(data, config))


@pytest.mark.parametrize(
    "kind, check_vma",
    [(EXPLICIT, True), full(EXPLICIT, False), full(AUTO, True), full(AUTO, False)],
)
def test_stages_of_a_pipeline(kind, check_vma):
    """Inside a shard_map over another axis, the rest Explicit or with roles; outputs and gradients of both stages."""
    config = make_config(aux_loss_coeff=0.0, z_loss_coeff=0.0)
    data = make_data(config)
    mesh = jax.make_mesh((2, 2, 2), ("pp", "fsdp", "ep"), axis_types=(kind,) * 3)
    stacked = {k: np.stack([w, 2 * w]) for k, w in data.params.items()}
    specs = {k: PartitionSpec("pp", *[None] * (w.ndim - 1)) for k, w in stacked.items()}
    params = {
        k: jax.device_put(
            w, jax.NamedSharding(mesh, PartitionSpec("pp", None if k == "gate_kernel" else "ep"))
        )
        for k, w in stacked.items()
    }
    x, dy = jax.device_put((data.x, data.dy), jax.NamedSharding(mesh, TOKENS))

    def stage(params, x):
        return moe({k: w[0] for k, w in params.items()}, x, config).y[None]

    function = jax.shard_map(
        stage,
        mesh=mesh,
        axis_names={"pp"},
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec("pp"),
        check_vma=check_vma,
    )

    def loss(params, x):
        y = function(params, x)
        return jnp.sum(y * dy[None]), y

    with global_shard_guard(RESOURCE if kind == AUTO else None):
        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    (_, y), (d_params, d_x) = jax.tree.map(np.asarray, gradients)
    wants = []
    for i in range(2):
        part = Data({k: w[i] for k, w in stacked.items()}, data.x, data.dy)
        wants.append(run(part, config))
        assert relative_error(y[i], wants[i].y) < 1e-5
        for name, w in wants[i].d_params.items():
            assert relative_error(d_params[name][i], w) < 1e-5, name
    assert relative_error(d_x, wants[0].d_x + wants[1].d_x) < 1e-5


def test_bfloat16_compute():
    """Master weights in float32, experts in bfloat16: small errors, gradients in the dtype of what they belong to."""
    config = make_config(dtype=jnp.bfloat16)
    data = make_data(config, (8, 16, 32))
    x = data.x.astype(jnp.bfloat16)
    data = data._replace(x=x.astype(np.float32))
    (_, output), (d_params, d_x) = jax.jit(value_and_gradients(moe, config))(
        data.params, jnp.asarray(x), data.dy
    )
    assert output.y.dtype == d_x.dtype == jnp.bfloat16
    assert {g.dtype for g in d_params.values()} == {jnp.dtype(jnp.float32)}
    assert output.aux_loss.dtype == output.z_loss.dtype == jnp.float32
    assert output.tokens_per_expert.dtype == output.num_dropped.dtype == jnp.int32
    assert_result(output, (d_params, d_x), run(data, config), tolerance=2e-2)


def test_routing_weights_stay_in_float32():
    """No array of a weight per choice is ever rounded to the experts' dtype."""
    config = make_config(dtype=jnp.bfloat16)
    data = make_data(config, (8, 16, 32))
    text = jax.jit(value_and_gradients(moe, config)).lower(*data).as_text()
    assert "tensor<8x16x2xf32>" in text and "tensor<8x16x2xbf16>" not in text


def test_router_is_computed_in_float32():
    """Logits of a bfloat16 x that differ by less than bfloat16's resolution are told apart; so are weights."""
    config = make_config(dtype=jnp.bfloat16, top_k=1, num_experts=2, use_bias=False)
    data = make_data(config, (4, 4, 16))
    x = jnp.ones((4, 4, 16), jnp.bfloat16)
    gate = jnp.ones((16, 2)).at[:, 1].add(1e-3)
    output = moe({**data.params, "gate_kernel": gate}, x, config)
    np.testing.assert_array_equal(output.tokens_per_expert, [0, 16])
    want = 0.25 * np.log(np.exp(16) + np.exp(16.016)) ** 2
    assert relative_error(output.z_loss, want) < 1e-5


def collapsed(config, shape):
    """Every token chooses expert 0, then expert 1."""
    data = make_data(config, shape)
    gate = np.zeros_like(data.params["gate_kernel"])
    gate[0, :2] = 4, 2
    x = data.x.copy()
    x[..., 0] = 1
    return Data(
        {**data.params, "gate_kernel": gate + 1e-3 * np.arange(8, dtype=np.float32)}, x, data.dy
    )


@covering("mode", ["explicit", "resource"], covers=["resource"])
def test_capacity_drops_the_last_and_counts_them(mode):
    """All rows go to rank 0 of one EP group: expert 0 first, so what does not fit is expert 1's latest."""
    config = make_config(capacity_factor=2.5)
    data = collapsed(config, (8, 4, 16))
    tokens, capacity = 32, recv_capacity(8, 2, 8, 4, factor=2.5)
    dropped = 2 * tokens - capacity
    assert tokens < capacity < 2 * tokens, "expert 0's rows must fit, and some of expert 1's"
    slots = {(t, 0): t for t in range(tokens)} | {(t, 1): tokens + t for t in range(tokens)}
    want = run(data, config, keep=lambda t, k: slots[t, k] < capacity)
    with setting(mode, (1, 4)) as mesh:
        (_, output), gradients = jax.jit(value_and_gradients(moe, config))(
            *place(data, config, mesh)
        )
    assert_result(output, gradients, want, num_dropped=dropped)
    np.testing.assert_array_equal(output.tokens_per_expert, [32, 32, 0, 0, 0, 0, 0, 0])


def test_drops_of_every_participant_are_counted():
    """Two EP groups, one per fsdp shard, each with the same rows for its first expert: both drop."""
    config = make_config(capacity_factor=1.25)
    data = collapsed(config, (8, 4, 16))
    with setting("explicit", (2, 2)) as mesh:
        params, x, *_ = place(data, config, mesh)
        output = jax.jit(lambda params, x: moe(params, x, config))(params, x)
    capacity = recv_capacity(8, 2, 32 // 4, 2, factor=1.25)
    assert 2 * 16 > capacity, "the groups' rows must not fit"
    assert int(output.num_dropped) == 2 * (2 * 16 - capacity)


def test_dropless_takes_the_worst_case():
    config = make_config()
    with setting("explicit", (1, 8)) as mesh:
        compare(config, collapsed(config, (8, 4, 16)), mesh)


@pytest.mark.filterwarnings("ignore:.*shards an operand and not the work:RuntimeWarning")
@pytest.mark.parametrize("placed", [(), ("params",), ("x",), ("params", "x")])
def test_operands_that_are_on_no_mesh(placed):
    """As of an embedding that was never placed: they count as whole on each device, and gradients too."""
    config = make_config()
    data = make_data(config)
    on_mesh = place(data, config, make_mesh((2, 4), EXPLICIT))
    params, x = (getattr(on_mesh if name in placed else data, name) for name in ("params", "x"))
    output, gradients = jax.jit(value_and_gradients(moe, config))(params, x, data.dy)
    assert_result(output[1], gradients, run(data, config))


@pytest.mark.parametrize(
    "mode, shape", [(None, None), full("explicit", (2, 4)), full("resource", (2, 4))]
)
def test_no_tokens(mode, shape):
    config = make_config()
    data = make_data(config, (0, 4, 16))
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(setting(mode, shape)) if mode else None
        (loss, output), gradients = jax.jit(value_and_gradients(moe, config))(
            *place(data, config, mesh)
        )
    assert float(loss) == 0 and output.y.shape == (0, 4, 16)
    assert output.topk_idx.shape == (0, 4, 2)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves((output, gradients)))


def test_one_token_with_flat_input():
    config = make_config()
    compare(config, make_data(config, (1, 16)))


@pytest.mark.parametrize("remat", [full(False), True])
def test_scan_over_layers(remat):
    """Stacked parameters under scan: the sum over layers of y and both losses, and its gradients."""
    config = make_config()
    layers = [make_data(config, seed=seed) for seed in (0, 1, 2)]
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *[layer.params for layer in layers])
    x, dy = jnp.asarray(layers[0].x), jnp.asarray(layers[0].dy)

    def loss(stacked, x):
        def layer(carry, params):
            out = moe(params, x, config)
            return carry + jnp.sum(out.y * dy) + out.aux_loss + out.z_loss, out.tokens_per_expert

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, jnp.float32(0), stacked)

    d_stacked, d_x = jax.jit(jax.grad(lambda *a: loss(*a)[0], argnums=(0, 1)))(stacked, x)
    wants = [run(Data(layer.params, layers[0].x, layers[0].dy), config) for layer in layers]
    for i, want in enumerate(wants):
        for name, g in want.d_params.items():
            assert relative_error(d_stacked[name][i], g) < 1e-5, name
    assert relative_error(d_x, sum(want.d_x for want in wants)) < 1e-5


PARTS = dict(remat="recompute", num_chunks=2)


def block_loss(params, x, dy, config):
    out = moe(params, x, config)
    return jnp.sum(out.y * dy) + out.aux_loss + out.z_loss


block_gradient = jax.jit(jax.grad(block_loss, argnums=(0, 1)), static_argnums=3)


@covering(
    "wrap, changes",
    ["", "jit", "remat", "scan", "remat scan"],
    [{}, PARTS],
    covers=[("", {}), ("jit", PARTS), ("remat scan", PARTS)],
)
def test_a_guard_inside_the_differentiated_function(wrap, changes):
    """Gradients are those of the guard around all of it, eagerly, under remat and of scanned layers."""
    config = make_config(**changes)
    placed = place(make_data(config, (16, 5, 16)), config, make_mesh((2, 4), AUTO))

    def loss(params, x, dy):
        def layer(carry, _):
            with global_shard_guard(RESOURCE):
                return carry + block_loss(params, x, dy, config), None

        layer = jax.checkpoint(layer) if "remat" in wrap else layer
        if "scan" in wrap:
            return jax.lax.scan(layer, jnp.float32(0), length=2)[0] / 2
        return layer(jnp.float32(0), None)[0]

    gradient = jax.grad(loss, argnums=(0, 1))
    got = jax.jit(gradient)(*placed) if "jit" in wrap or "scan" in wrap else gradient(*placed)
    with global_shard_guard(RESOURCE):
        want = block_gradient(*placed, config)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


def test_the_config_may_be_an_argument_of_any_transformation():
    """It holds no arrays and is a value: equal ones are traced once, others anew."""
    config = make_config(use_bias=False)
    data, traced = jax.tree.map(jnp.asarray, make_data(config)), []

    def loss(params, x, config):
        traced.append(config)
        return jnp.sum(moe(params, x, config).y * data.dy)

    operands = data.params, data.x
    want = jax.grad(loss)(*operands, config)
    jitted = jax.jit(jax.grad(loss))
    traced.clear()
    for function in (jitted, jitted, jax.grad(jax.checkpoint(loss))):
        got = function(*operands, dataclasses.replace(config))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative_error(a, b) < 1e-6
    assert traced == [config] * 2
    more = dataclasses.replace(config, top_k=3)
    assert relative_error(jitted(*operands, more)["wi"], want["wi"]) > 1e-2
    y = jax.vmap(jax.jit(moe), (None, 0, None))(*operands, config).y
    assert relative_error(y, moe(*operands, config).y) < 1e-6
    carried, ys = jax.lax.scan(lambda c, x: (c, moe(data.params, x, c).y), config, data.x)
    assert carried == config and relative_error(ys, y) < 1e-6
    assert jax.tree.leaves(config) == []


def test_same_bits_from_run_to_run():
    config = make_config()
    with setting("explicit", (2, 4)) as mesh:
        placed = place(make_data(config), config, mesh)
        function = jax.jit(value_and_gradients(moe, config))
        first, second = function(*placed), function(*placed)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_second_call_compiles_nothing(caplog):
    """Also without jit around it, and with an equal config that is another object."""
    config = make_config()
    placed = place(make_data(config), config, None)
    value_and_gradients(moe, config)(*placed)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        value_and_gradients(moe, dataclasses.replace(config))(*placed)
    compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not compiled, compiled


@pytest.mark.parametrize("mode", ["explicit", pytest.param("resource", marks=pytest.mark.full)])
def test_what_crosses_devices(mode):
    """Forward and backward move nothing else: no logits, no tokens but to their experts, no whole weight gradients."""
    config = make_config(num_experts=32, transport="all_to_all")
    data = make_data(config, (8, 24, 16))
    with setting(mode, (2, 4)) as mesh:
        lowered = jax.jit(value_and_gradients(moe, config)).lower(*place(data, config, mesh))
    found = collections.defaultdict(set)
    for collective in collectives(lowered.compile().as_text()):
        found[collective.kind].update(collective.shapes)
    # 8 experts and 24 tokens per device; 4 devices of an EP group, 2 that share weights; D = 16, F = 12, K = 2.
    assert found == {
        # wi and wo over fsdp, the choices and their weights over ep
        "all-gather": {"f32[8,16,2,12]", "f32[8,12,16]", "s32[96,2]", "f32[96,2]"},
        # one block of tokens per peer
        "all-to-all": {"f32[24,16]"},
        # gradients of wi, wo and the choices' weights
        "reduce-scatter": {"f32[8,8,2,12]", "f32[8,12,8]", "f32[24,2]"},
        # counts, dropped rows, losses, gradients of the biases and the gate
        "all-reduce": {
            *("s32[32]", "s32[]", "f32[]"),
            *("f32[8,2,12]", "f32[8,16]", "f32[16,32]"),
        },
    }


@pytest.mark.parametrize(
    "mode, changes",
    [
        ("explicit", dict(ep_axis="ep", num_chunks=5)),
        ("explicit_resource", dict(shard_exp_on_fsdp=False)),  # types come before specs
        full("explicit_resource", dict(shared_expert_dim=16, transport="ring")),
        ("resource", dict(use_bias=False)),
    ],
)
def test_fsdp_splits_experts(mode, changes):
    """Whole experts are gathered, and their gradients scattered to where the weights are, by nothing else."""
    split = make_config(**{**changes, "shard_exp_on_fsdp": True})
    config = dataclasses.replace(split, **changes)
    data = make_data(config)
    with setting(mode, (2, 4)) as mesh:
        placed = place(data, split, mesh)
        assert placed.params["wo"].sharding.spec == PartitionSpec(("ep", "fsdp"), None, None)
        compiled = jax.jit(value_and_gradients(moe, config)).lower(*placed).compile()
        (_, output), gradients = compiled(*placed)
        for name, w in placed.params.items():
            assert gradients[0][name].sharding.is_equivalent_to(w.sharding, w.ndim)
    assert_result(output, gradients, run(data, config))
    moved = collections.defaultdict(set)
    for collective in collectives(compiled.as_text()):
        moved[collective.kind].update(collective.shapes)
    assert {"f32[2,16,2,12]", "f32[2,12,16]"} <= moved["all-gather"]
    assert {"f32[1,16,2,12]", "f32[1,12,16]"} <= moved["reduce-scatter"]
    assert not any(shape.startswith(("f32[1,", "f32[2,")) for shape in moved["all-to-all"]), moved


BAD_PARAMS = {
    "only wi_bias": (
        lambda p: p.pop("wo_bias"),
        ["missing wo_bias", "both or none|all biases or none"],
    ),
    "only wo_bias": (lambda p: p.pop("wi_bias"), ["missing wi_bias", "all biases or none"]),
    "no gate": (lambda p: p.pop("gate_kernel"), ["missing gate_kernel", "init_params"]),
    "split wi": (
        lambda p: p.update(wi_0=p.pop("wi")[:, :, 0]),
        ["missing wi_1", "both halves"],
    ),
    "stray name": (lambda p: p.update(scale=p["wi"]), ["scale", "remove"]),
    "another D": (lambda p: p.update(wi=p["wi"][:, :8]), ["wi", "[E, D, 2, F]", "(8, 8, 2, 12)"]),
    "another E": (lambda p: p.update(wo=p["wo"][:4]), ["wo", "(4, 12, 16)", "num_experts=8"]),
    "another F": (lambda p: p.update(wo=p["wo"][:, :6]), ["wo", "(8, 6, 16)", "expert_dim=12"]),
    "gate of another E": (
        lambda p: p.update(gate_kernel=p["gate_kernel"][:, :4]),
        ["gate_kernel", "(16, 4)", "num_experts=8"],
    ),
    "flat wi": (lambda p: p.update(wi=p["wi"].reshape(8, 16, 24)), ["wi", "(8, 16, 24)"]),
    "bias of another F": (
        lambda p: p.update(wi_bias=p["wi_bias"][..., :6]),
        ["wi_bias", "(8, 2, 6)"],
    ),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_parameter_errors(name):
    config = make_config()
    data = make_data(config)
    spoil, words = BAD_PARAMS[name]
    spoil(data.params)
    with pytest.raises(ValueError) as info:
        moe(data.params, data.x, config)
    message = str(info.value)
    assert message.startswith("moe: ")
    assert all(any(w in message for w in word.split("|")) for word in words), message


def test_input_errors():
    config = make_config()
    data = make_data(config)
    with pytest.raises(TypeError, match=r"moe: x must be an array of floats .*dtype=int32; cast"):
        moe(data.params, jnp.zeros((4, 16), jnp.int32), config)
    with pytest.raises(TypeError, match=r"moe: x must be .*16 bits; got dtype=float8_e4m3fn; cast"):
        moe(data.params, jnp.zeros((4, 16), jnp.float8_e4m3fn), config)
    with pytest.raises(ValueError, match=r"moe: x must be \[..., D\].*got x.shape=\(16,\)"):
        moe(data.params, jnp.zeros(16), config)


def test_mesh_errors():
    config = make_config(num_experts=6, use_bias=False)
    data = make_data(config)
    mesh = make_mesh((2, 4), AUTO)
    x = jax.device_put(data.x, jax.NamedSharding(mesh, TOKENS))
    with global_shard_guard(RESOURCE), pytest.raises(ValueError, match=r"num_experts=6.*4.*ep"):
        jax.jit(functools.partial(moe, config=config))(data.params, x)
    apart = make_config(num_experts=12, use_bias=False, shard_exp_on_fsdp=True)
    with (
        global_shard_guard(RESOURCE),
        pytest.raises(ValueError, match=r"num_experts=12.*'ep': 4, 'fsdp': 2.*shard_exp_on_fsdp"),
    ):
        jax.jit(functools.partial(moe, config=apart))(make_data(apart).params, x)
    unclear = make_config(use_bias=False, shard_exp_on_fsdp=True)
    placed = place(make_data(unclear), unclear, make_mesh((2, 4), EXPLICIT))
    with pytest.raises(ValueError, match=r"ep_axis must be given.*\('ep', 'fsdp'\).*ep_axis="):
        moe(placed.params, placed.x, unclear)
    config = make_config(use_bias=False)
    data = make_data(config)
    odd = jnp.ones((3, 5, 16), device=jax.NamedSharding(mesh, PartitionSpec()))
    with global_shard_guard(RESOURCE), pytest.raises(ValueError, match=r"divisible.*\(3, 5\).*pad"):
        jax.jit(functools.partial(moe, config=config))(data.params, odd)
    with (
        global_shard_guard(MeshResource(ep_resource="expert")),
        pytest.raises(ValueError, match=r"expert.*\('fsdp', 'ep'\)"),
    ):
        jax.jit(functools.partial(moe, config=config))(data.params, x)
    with pytest.raises(ValueError, match=r"'expert'"):
        moe(data.params, data.x, make_config(use_bias=False, ep_axis="expert"))


def test_experts_must_divide_inside_shard_map():
    config = make_config(num_experts=6, ep_axis="ep", use_bias=False)
    data = make_data(config)
    function = jax.shard_map(
        lambda params, x: moe(params, x, config).y,
        mesh=make_mesh((2, 4), AUTO),
        in_specs=(PartitionSpec(), TOKENS),
        out_specs=TOKENS,
    )
    with pytest.raises(ValueError, match=r"moe: num_experts .*num_experts=6, ep_size=4"):
        function(data.params, data.x)
