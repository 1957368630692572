"""Arrays are written as who comes next reads them: no copy turns them, in programs for H100s that are not there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.marks import needs_triton
from expertmesh.core import (
    MeshResource,
    dense,
    global_shard_guard,
    grouped_dense,
    hlo,
    quantize_weight,
)
from expertmesh.flax_moe import MoEConfig, moe, param_shapes, param_specs, quantize_weights

pytestmark = [pytest.mark.aot, needs_triton]

T, E, D, F = 4096, 8, 512, 768


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_nothing_turns_rows_of_8_bits(h100_mesh, recipe):
    mesh = h100_mesh({"fsdp": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        for shape in ((1, T, D), (E, D, F), (1, T, F))
    )
    sizes = jax.ShapeDtypeStruct((1, E), jnp.int32, sharding=whole)

    def step(x, w, dy, sizes):
        y, gradients = jax.vjp(lambda x, w: grouped_dense(x, w, sizes, recipe=recipe), x, w)
        return y, gradients(dy)

    with jax.sharding.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        program = jax.jit(step).trace(x, w, dy, sizes).lower(lowering_platforms=("cuda",))
        text = program.compile().as_text()
    rows = re.findall(rf"= (?:f8e\w+|u8)\[\S*{T}\S* (\w+)\(", text)
    assert not {"copy", "transpose", "fusion"}.intersection(rows), rows


@pytest.mark.parametrize("given", [False, True], ids=["", "quantized before"])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("kind", ["dense", "grouped", "block"])
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
def test_nothing_turns_weights(h100_mesh, recipe, kind, backward, given):
    """Nor anything else of 8 bits, but for rows of a dense layer; nor what another program has quantized."""
    mesh = h100_mesh({"fsdp": 1})
    whole = NamedSharding(mesh, PartitionSpec())

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    config = MoEConfig(num_experts=E, top_k=2, expert_dim=F, recipe=recipe)
    x, sizes = struct(T, D), struct(E, dtype=jnp.int32)
    params, function, quantized = {
        "dense": (
            struct(D, 2, F),
            lambda w, x, sizes, q: dense(x, w, recipe=recipe, weight_quantized=q),
            lambda w: quantize_weight(w, recipe),
        ),
        "grouped": (
            struct(E, D, 2, F),
            lambda w, x, sizes, q: grouped_dense(x, w, sizes, recipe=recipe, weight_quantized=q),
            lambda w: quantize_weight(w, recipe, batch_dims=1),
        ),
        "block": (
            {name: struct(*shape) for name, shape in param_shapes(D, config).items()},
            lambda params, x, sizes, q: moe(params, x, config, weights_quantized=q).y,
            lambda params: quantize_weights(params, config),
        ),
    }[kind]

    def step(params, x, sizes, dy, q):
        if not backward:
            return function(params, x, sizes, q)
        y, pull = jax.vjp(lambda params, x: function(params, x, sizes, q), params, x)
        return y, pull(dy)

    dy = x if kind == "block" else struct(T, 2, F)
    with jax.sharding.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        q = jax.eval_shape(quantized, params) if given else None
        q = jax.tree.map(lambda leaf: struct(*leaf.shape, dtype=leaf.dtype), q)
        program = jax.jit(step).trace(params, x, sizes, dy, q).lower(lowering_platforms=("cuda",))
        text = program.compile().as_text()
    ops = re.findall(rf"= (?:f8e\w+|u8)\[(?!\S*{T})\S* ([\w-]+)\(", text)
    assert ops and not {"copy", "transpose", "fusion"}.intersection(ops), ops


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
@pytest.mark.parametrize("kind", ["grouped", "block", "wide block"])
def test_nothing_copies_what_a_scan_keeps(h100_mesh, kind, recipe):
    """Kernels write to a scan's stacks, and read there, what is quantized for weight gradients."""
    mesh = h100_mesh({"fsdp": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    width = 256 if kind == "block" else 1024
    config = MoEConfig(num_experts=E, top_k=2, expert_dim=width, recipe=recipe)

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    if kind == "grouped":
        x, params = struct(1, T, D), struct(3, E, D, D)
        sizes = jnp.full((1, E), T // E, jnp.int32)

        def layer(x, w):
            return x + grouped_dense(x, w, sizes, recipe=recipe)
    else:
        x = struct(T, D)
        shapes = param_shapes(D, config)
        params = {name: struct(3, *shape) for name, shape in shapes.items()}

        def layer(x, params):
            return x + moe(params, x, config).y

    def step(params, x, dy):
        def stack(params, x):
            return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]

        return jax.vjp(stack, params, x)[1](dy)

    with jax.sharding.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp")):
        program = jax.jit(step).trace(params, x, x).lower(lowering_platforms=("cuda",))
        text = program.compile().as_text()
    assert "f8e4m3fn[3," in text, "nothing is kept in 8 bits"
    copied = re.findall(
        r"= ((?:f8e\w+|u8)\[\S+)\S* (?:copy|transpose|fusion)\((?!\)|.*kind=kCustom)", text
    )
    assert not copied


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parts_of_a_gathered_weight_are_joined_and_not_turned(h100_mesh, kind):
    """Parts along the contraction: what moves them keeps the last dimension, of 256 bytes of each part."""
    mesh = h100_mesh({"fsdp": 2}, kind)
    x, w = (
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
        )
        for shape in ((T, D), (D, F))
    )
    resource = MeshResource(fsdp_resource="fsdp") if kind == AxisType.Auto else None
    with jax.sharding.set_mesh(mesh), global_shard_guard(resource):
        program = jax.jit(lambda x, w: dense(x, w, recipe="fp8_block")).trace(x, w)
        text = program.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert [shape for c in hlo.collectives(text) for shape in c.shapes if "f8" in shape]
    transposed = re.findall(r"= f8e4m3fn\[([\d,]+)\]\S* transpose\(.*dimensions={([\d,]+)}", text)
    assert transposed == [(f"{F},2,{D // 2}", "1,0,2")]


@pytest.mark.parametrize(
    "kind, recipe",
    [(AxisType.Auto, None), (AxisType.Explicit, "fp8_block"), (AxisType.Auto, "fp8_current")],
)
def test_nothing_copies_experts_that_fsdp_splits(h100_mesh, kind, recipe):
    """Whole weights are multiplied as they are gathered, and their gradients scattered as they are made."""
    mesh = h100_mesh({"fsdp": 2, "ep": 2}, kind)
    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    config = MoEConfig(num_experts=E, top_k=2, expert_dim=F, recipe=recipe, shard_exp_on_fsdp=True)

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes, specs = param_shapes(D, config), param_specs(config, resource)
    params = {name: struct(shapes[name], jnp.float32, specs[name]) for name in shapes}
    x = struct((T, D), jnp.bfloat16, PartitionSpec(("fsdp", "ep")))

    def gradients(params, x, dy):
        return jax.vjp(lambda params: moe(params, x, config).y, params)[1](dy)[0]

    at_rest = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    with jax.sharding.set_mesh(mesh), global_shard_guard(resource):
        traced = jax.jit(gradients, out_shardings=at_rest).trace(params, x, x)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    over_fsdp = {
        (c.kind, shape)
        for c in hlo.collectives(text)
        if c.groups == ((0, 2), (1, 3))
        for shape in c.shapes
    }
    held = f"{E // 4},{D},2,{F}", f"{E // 4},{F},{D}"
    assert {("reduce-scatter", f"f32[{shape}]") for shape in held} <= over_fsdp
    gathered = {shape.partition("[")[0] for kind, shape in over_fsdp if kind == "all-gather"}
    assert gathered == ({"f8e4m3fn", "f32"} if recipe else {"bf16"})
    # With a scale per tensor the forward reads 8 bits along D of wi and along F of wo, in which a weight does not lie.
    used_as_is = {None: "f32|bf16", "fp8_block": "f32|f8e4m3fn", "fp8_current": "f32"}[recipe]
    whole = rf"(?:{used_as_is})\[{E // 2},(?:{D},2,{F}|2,{F},{D}|{F},{D}|{D},{F})\]"
    ops = re.findall(rf"= {whole}\S* ([\w-]+)\(", text)
    assert ops and not {"copy", "transpose", "fusion"}.intersection(ops), ops
