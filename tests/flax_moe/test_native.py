"""The native baseline against the oracle and against `moe`; it needs nothing of ours to run."""

import ast
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from cases.covering import full
from cases.lowered import sums
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import NativeMoEBlock, init_params, moe, native_moe
from expertmesh.flax_moe import native as native_module
from flax_moe.moe_oracle import (
    ACTIVATIONS,
    TOKENS,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    run,
    value_and_gradients,
)

pytestmark = pytest.mark.default_jax

OTHER = dict(use_bias=False, top_k=5, use_pre_softmax=True, use_gate_bias=True)


def native(params, x, config):
    return native_moe(params, x, config)


@pytest.mark.full
def test_one_device_every_activation():
    configs = {activation: make_config(activation=activation) for activation in ACTIVATIONS}
    data = make_data(configs["silu"])

    @jax.jit
    def every(*data):
        return {
            name: value_and_gradients(native, config)(*data) for name, config in configs.items()
        }

    for name, ((_, output), gradients) in every(*data).items():
        assert_result(output, gradients, run(data, configs[name]))


@pytest.mark.parametrize(
    "kind, shape, changes",
    [
        full(AxisType.Explicit, (2, 4), {}),
        (AxisType.Auto, (2, 4), OTHER),
        full(AxisType.Auto, (1, 8), {}),
        full(AxisType.Explicit, (8, 1), OTHER),
    ],
    ids=str,
)
def test_meshes(kind, shape, changes):
    config = make_config(**changes)
    data, mesh = make_data(config), make_mesh(shape, kind)

    def block(params, x, config):
        return native_moe(params, x, config, mesh)

    placed = place(data, config, mesh)
    (_, output), gradients = jax.jit(value_and_gradients(block, config))(*placed)
    assert_result(output, gradients, run(data, config))
    assert gradients[0]["wi"].sharding.is_equivalent_to(placed.params["wi"].sharding, 4)


@pytest.mark.full
def test_equals_moe_on_uneven_routing():
    """Most tokens to one device: nothing is dropped by either."""
    config = make_config(use_bias=False)
    data = make_data(config, (16, 4, 16))
    data.params["gate_kernel"][:, :2] *= 4
    placed = place(data, config, make_mesh((2, 4), AxisType.Explicit))
    ours = jax.jit(value_and_gradients(moe, config))(*placed)
    theirs = jax.jit(value_and_gradients(native, config))(*placed)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_error(a, b) < 1e-5
    counts = np.asarray(ours[0][1].tokens_per_expert)
    assert counts[:2].sum() > 1.5 * counts.mean() * 2


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by all-gathers, since XLA:CPU has none; NaN where the sizes disagree."""
    me = jax.lax.axis_index(axis_name)
    operands, starts, sizes, places = (
        jax.lax.all_gather(a, axis_name)
        for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        offset = row - places[source, me]
        mine = (offset >= 0) & (offset < sizes[source, me])
        taken = operands[source][jnp.clip(starts[source, me] + offset, 0, operands.shape[1] - 1)]
        output = jnp.where(mine[:, None], taken, output)
    agrees = jnp.all(sizes[:, me] == recv_sizes)
    return jnp.where(agrees, output, jnp.nan)


@pytest.mark.parametrize("shape", [(2, 4), pytest.param((1, 8), marks=pytest.mark.full)])
def test_ragged_exchange(monkeypatch, shape):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    config = make_config()
    data, mesh = make_data(config), make_mesh(shape, AxisType.Explicit)

    def block(params, x, config):
        return native_moe(params, x, config, mesh, exchange="ragged")

    (_, output), gradients = jax.jit(value_and_gradients(block, config))(*place(data, config, mesh))
    assert_result(output, gradients, run(data, config))


@pytest.mark.gpu
@pytest.mark.any_device
def test_ragged_exchange_on_gpus():
    """In one group of ranks, and in two, which XLA gets wrong without barriers (gradients beside the value)."""
    devices = jax.devices("cuda")
    config = make_config()
    data = make_data(config)
    for groups in (1, 2) if len(devices) % 4 == 0 else (1,):
        mesh = jax.make_mesh((groups, len(devices) // groups), ("fsdp", "ep"), devices=devices)
        (_, output), gradients = jax.jit(value_and_gradients(native, config))(
            *place(data, config, mesh)
        )
        assert_result(output, gradients, run(data, config), tolerance=2e-3)


def test_bfloat16():
    config = make_config(dtype=jnp.bfloat16)
    data = make_data(config, (8, 16, 32))
    (_, output), gradients = jax.jit(value_and_gradients(native, config))(*data)
    assert {g.dtype for g in gradients[0].values()} == {jnp.dtype(jnp.float32)}
    assert_result(output, gradients, run(data, config), tolerance=2e-2)


def test_no_tokens():
    config = make_config()
    data = make_data(config, (8, 5, 16))
    out = jax.jit(native_moe, static_argnums=2)(data.params, jnp.zeros((0, 16)), config)
    assert out.y.shape == (0, 16) and int(out.tokens_per_expert.sum()) == 0


def test_many_tokens():
    """32768^2 * 8, of the balance loss, is more than an int32 holds."""
    config = make_config(num_experts=8, top_k=8, expert_dim=8)
    params = init_params(jax.random.key(0), 8, config)
    x = jax.ShapeDtypeStruct((32768, 8), jnp.float32)
    assert jax.eval_shape(lambda x: native_moe(params, x, config), x).aux_loss.shape == ()


def test_module():
    config = make_config()
    data = make_data(config)
    mesh = make_mesh((2, 4), AxisType.Auto)
    got = jax.jit(NativeMoEBlock(config, mesh).apply)({"params": data.params}, data.x)
    assert relative_error(got.y, run(data, config).y) < 1e-5


def test_mesh_in_context():
    config = make_config()
    data = make_data(config)
    with jax.set_mesh(make_mesh((2, 4), AxisType.Auto)):
        got = jax.jit(native, static_argnums=2)(data.params, data.x, config)
    assert relative_error(got.y, run(data, config).y) < 1e-5
    assert got.y.sharding.spec == TOKENS


def test_uses_only_jax_and_flax():
    """Of our own modules it imports the configuration and the parameter tree, at the top and nowhere else."""
    tree = ast.parse(inspect.getsource(native_module))
    modules = {
        module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    ours = {m for m in modules if m.startswith("expertmesh")}
    assert ours == {"expertmesh.flax_moe.config", "expertmesh.flax_moe.params"}
    others = {m.split(".")[0] for m in modules - ours}
    assert others <= {"jax", "flax", "functools", "collections", "math"}


@pytest.mark.parametrize(
    "changes, kwargs, shape, words",
    [
        (dict(capacity_factor=1.5), {}, (8, 5, 16), ["capacity_factor=1.5", "use moe"]),
        (dict(ep_axis=("ep", "tp")), {}, (8, 5, 16), ["ep_axis=('ep', 'tp')", "use moe"]),
        (dict(use_expert_bias=True), {}, (8, 5, 16), ["use_expert_bias=True", "use moe"]),
        ({}, dict(exchange="pigeon"), (8, 5, 16), ["'pigeon'", "ragged"]),
        ({}, {}, (6, 5, 16), ["(6, 5, 16)", "8 devices"]),
        (dict(num_experts=6), {}, (8, 5, 16), ["num_experts=6", "size 4"]),
        (dict(ep_axis="x"), dict(fsdp_axis="y"), (8, 5, 16), ["'x'", "'y'", "('fsdp', 'ep')"]),
    ],
)
def test_errors(changes, kwargs, shape, words):
    config = make_config(**changes)
    data = make_data(config, shape)
    with pytest.raises(ValueError) as info:
        native_moe(data.params, data.x, config, make_mesh((2, 4), AxisType.Auto), **kwargs)
    assert all(word in str(info.value) for word in ["native_moe", *words]), str(info.value)


def test_missing_bias():
    config = make_config()
    data = make_data(config)
    del data.params["wi_bias"]
    with pytest.raises(ValueError, match="native_moe: .*missing wi_bias"):
        native_moe(data.params, data.x, config)


def test_expert_weights_are_gathered_and_their_gradients_scattered_over_fsdp():
    from expertmesh.core.hlo import collectives

    config = make_config(use_bias=False)
    data = make_data(config)
    placed = place(data, config, make_mesh((2, 4), AxisType.Explicit))
    text = jax.jit(value_and_gradients(native, config)).lower(*placed).compile().as_text()
    shapes = {(c.kind, shape) for c in collectives(text) for shape in c.shapes}
    assert ("all-gather", "f32[2,16,2,12]") in shapes
    assert ("reduce-scatter", "f32[2,8,2,12]") in shapes
    assert not any(kind == "all-reduce" and len(shape) > len("f32[16,8]") for kind, shape in shapes)
    assert PartitionSpec("ep", "fsdp", None, None) == placed.params["wi"].sharding.spec


def test_devices_add_gradients_in_the_parameters_dtype():
    """What `MoEConfig.reduce_dtype` of the block is compared with: bfloat16 gradients leave `ragged_dot` rounded."""
    config = make_config(dtype=jnp.bfloat16, use_bias=False, aux_loss_coeff=0, z_loss_coeff=0)
    data = make_data(config, (4, 3, 16))
    params, x, _ = place(data, config, make_mesh((2, 2), AxisType.Explicit))
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    program = jax.jit(jax.grad(lambda params: native(params, x, config).y.sum())).lower(params)
    assert sums(program.as_text()) == [
        *[("reduce_scatter", "4x12x8xbf16"), ("reduce_scatter", "4x8x2x12xbf16")],
        ("all_reduce", "16x8xbf16"),
    ]
