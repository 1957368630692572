"""LoRA of a block: against the oracle of merged weights and the chain rule, in each mesh mode; what is not computed."""

import contextlib
import dataclasses
import math
import re
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.covering import full
from expertmesh.core import (
    Adapted,
    Float8BlockScaling,
    QuantizedWeight,
    dense,
    dequantize,
    grouped_dense,
    quantize,
)
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import (
    LoRA,
    hf,
    init_lora,
    init_params,
    linen,
    lora_shapes,
    lora_specs,
    merge_lora,
    moe,
    native_moe,
    nnx,
    param_shapes,
    param_specs,
    peft,
    permute_experts,
    quantize_weights,
    split_wi,
    with_lora,
)
from expertmesh.flax_moe.models.fp8_blocks import block_format
from flax_moe.hf_oracle import QWEN3_EACH
from flax_moe.moe_oracle import (
    MANY,
    Data,
    assert_result,
    make_config,
    make_data,
    run,
)

LORA = LoRA(rank=3, alpha=6)
ROLES = ("fsdp", "ep", "tp")
RESOURCE = MeshResource(**{f"{role}_resource": role for role in ROLES})


def drawn(shapes, seed=1):
    """Adapters of which both sides matter."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (rng.normal(size=shape) * 0.4).astype(np.float32),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def products(name, a, b):
    """A B of each expert and projection, one at a time."""
    if name in ("wi", "wo"):
        return np.stack([products("", *pair) for pair in zip(a, b, strict=True)])
    if a.ndim == 3 or name == "shared_wi":
        return np.stack([a[:, i] @ b[i] for i in (0, 1)], axis=1)
    return a @ b


def chain(name, dw, a, b):
    """(dA, dB) of A B, from the gradient of that."""
    if name in ("wi", "wo"):
        each = [chain("", *triple) for triple in zip(dw, a, b, strict=True)]
        return tuple(map(np.stack, zip(*each, strict=True)))
    if a.ndim == 3:
        halves = [(dw[:, i] @ b[i].T, a[:, i].T @ dw[:, i]) for i in (0, 1)]
        return np.stack([h[0] for h in halves], axis=1), np.stack([h[1] for h in halves])
    return dw @ b.T, a.T @ dw


def merged(data, adapters, lora=LORA):
    """The data with the sums of weights and adapters, in float64."""
    params = {name: w.astype(np.float64) for name, w in data.params.items()}
    for name, parts in adapters.items():
        wide = (part.astype(np.float64) for part in parts.values())
        params[name] = params[name] + lora.alpha / lora.rank * products(name, *wide)
    return Data(params, data.x, data.dy)


def assert_adapters(got, adapters, d_params, tolerance=1e-5, lora=LORA):
    assert {name: set(parts) for name, parts in got.items()} == {n: {"a", "b"} for n in adapters}
    for name, parts in adapters.items():
        wide = (part.astype(np.float64) for part in parts.values())
        want = chain(name, lora.alpha / lora.rank * d_params[name], *wide)
        for part, w in zip("ab", want, strict=True):
            assert relative_error(np.asarray(got[name][part]), w) < tolerance, (name, part)


def loss(config, lora=LORA):
    """Of trainable adapters and tokens; the output with it."""

    def function(adapters, x, params, dy):
        out = moe(with_lora(params, adapters, lora), x, config)
        return jnp.sum(out.y.astype(jnp.float32) * dy) + out.aux_loss + out.z_loss, out

    return function


def place(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def ran(mode, config, data, adapters):
    """((adapters', x's) gradients, output) in a mesh mode."""
    grad = jax.value_and_grad(loss(config), argnums=(0, 1), has_aux=True)
    if mode == "single":
        (_, out), grads = jax.jit(grad)(adapters, data.x, data.params, data.dy)
        return grads, out
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ROLES, axis_types=(kind,) * 3)
    params = place(data.params, param_specs(config, RESOURCE), mesh)
    placed = place(adapters, lora_specs(config, LORA, RESOURCE), mesh)
    x, dy = jax.device_put((data.x, data.dy), NamedSharding(mesh, PartitionSpec(("fsdp", "ep"))))
    guard = global_shard_guard(RESOURCE) if mode == "resource" else contextlib.nullcontext()
    with guard:
        (_, out), grads = jax.jit(grad)(placed, x, params, dy)
    if mode != "auto":
        for got, at in zip(*map(jax.tree.leaves, (grads[0], placed)), strict=True):
            assert got.sharding.is_equivalent_to(at.sharding, got.ndim), (got.sharding, at.sharding)
    return grads, out


@pytest.mark.parametrize(
    "mode, options",
    [
        full("single", MANY),
        ("single", dict(use_bias=False, expert_dim=8, latent_dim=8)),
        full("single", dict(latent_dim=8, activation="gelu_exact")),
        ("explicit", MANY),
        full("resource", MANY),
        full("explicit", dict(shard_exp_on_fsdp=True, ep_axis="ep", use_bias=False)),
        full("resource", dict(shard_exp_on_fsdp=True, latent_dim=8)),
        full("auto", dict(use_bias=False)),
        full("explicit", dict(use_bias=False, transport="ring")),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_weights(mode, options):
    """y, dx, dA and dB by the oracle of W + alpha / r A B, and the chain rule from its dW."""
    config = make_config(**options)
    data = make_data(config, (8, 3, 16))
    adapters = drawn(lora_shapes(16, config, LORA))
    want = run(merged(data, adapters), config)
    (d_adapters, d_x), out = ran(mode, config, data, adapters)
    assert_result(out, ({}, d_x), want._replace(d_params={}))
    assert_adapters(d_adapters, adapters, want.d_params)


@pytest.mark.full
def test_manual_axes():
    """In a shard_map over all axes adapters are shards, as weights are."""
    config = make_config(use_bias=False, ep_axis="ep", aux_loss_coeff=0, z_loss_coeff=0)
    data = make_data(config, (8, 3, 16))
    adapters = drawn(lora_shapes(16, config, LORA))
    want = run(merged(data, adapters), config)
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, tokens = PartitionSpec("ep"), PartitionSpec("ep")
    of_params = {"gate_kernel": PartitionSpec(), "wi": split, "wo": split}

    def gradient(adapters, x, params, dy):
        return jax.grad(lambda a, x: loss(config)(a, x, params, dy)[0], argnums=(0, 1))(adapters, x)

    mapped = jax.shard_map(
        gradient,
        mesh=mesh,
        in_specs=(split, tokens, of_params, tokens),
        out_specs=(split, tokens),
    )
    d_adapters, d_x = jax.jit(mapped)(adapters, data.x, data.params, data.dy)
    assert_adapters(d_adapters, adapters, want.d_params)
    assert relative_error(np.asarray(d_x), want.d_x) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        full(dict(dtype="bfloat16", shared_expert_dim=20)),
        dict(recipe="Float8BlockScaling", expert_dim=128, use_bias=False),
        full(dict(recipe="Float8CurrentScaling", expert_dim=32, num_chunks=2, separate_wi=True)),
        full(dict(recipe="MXFP8BlockScaling", expert_dim=128, shared_expert_dim=128)),
    ],
    ids=str,
)
def test_at_first_the_base_bit_for_bit(options):
    """B is zeros: with adapters, and with frozen weights alone; also of halves of the up projection."""
    config = make_config(**options)
    params = init_params(jax.random.key(0), 128, config)
    adapters = init_lora(jax.random.key(1), 128, config, LORA)
    x = np.random.default_rng(2).normal(size=(4, 4, 128)).astype(np.float32)
    got = moe(with_lora(params, adapters, LORA), x, config).y
    want, frozen = (moe(p, x, config).y for p in (params, with_lora(params, {}, LORA)))
    for y in (got, frozen):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(want))
    assert np.any(np.asarray(want))


def gradients_made(function, *operands):
    """Shapes of what a program's weight gradients write: expert after expert, or by a dense GEMM."""
    text = jax.jit(function).lower(*operands).as_text()
    made = re.findall(r"(?:dynamic_update_slice|dot_general) .*-> tensor<([0-9x]+)xf32>", text)
    return {tuple(map(int, shape.split("x"))) for shape in made}


@pytest.mark.parametrize("recipe", [None, full("Float8BlockScaling")])
def test_no_gradient_of_a_frozen_weight(recipe):
    """No GEMM makes one, even where it is asked for: it is zeros."""
    config = make_config(recipe=recipe, use_bias=False, expert_dim=256, shared_expert_dim=128)
    data = make_data(config, (4, 4, 128))
    adapters = drawn(lora_shapes(128, config, LORA))

    def backward(params, adapters, x, dy):
        y, pull = jax.vjp(lambda p, a: moe(with_lora(p, a, LORA), x, config).y, params, adapters)
        return pull(dy)

    def trained(params, x, dy):
        return jax.vjp(lambda p: moe(p, x, config).y, params)[1](dy)

    of_weights = {(8, 128, 512), (8, 256, 128), (128, 2, 128), (128, 128)}
    of_adapters = {(8, 128, 6), (8, 6, 512), (8, 256, 3), (8, 3, 128), (128, 6), (3, 128)}
    own = gradients_made(backward, data.params, adapters, data.x, data.dy)
    assert of_weights <= gradients_made(trained, data.params, data.x, data.dy)
    assert not of_weights & own and of_adapters <= own
    d_params, _ = jax.jit(backward)(data.params, adapters, data.x, data.dy)
    assert not any(np.any(np.asarray(d_params[name])) for name in ("wi", "wo", "shared_wi"))


def eight_bits(config, data):
    """The experts' weights in blocks of 128 x 128, as a checkpoint of 8 bits is loaded, by scales of any origin."""
    made = {}
    for name in ("wi", "wo"):
        options = dict(axis=1, across=-1, batch_dims=1)
        q = quantize(jnp.bfloat16(data.params[name]), block_format((128, 128)), **options)
        made[name] = dataclasses.replace(q, scale=1.37 * q.scale)
    return {**data.params, **made}


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling(power_2_scale=False)], ids=str)
def test_weights_of_8_bits(recipe):
    """Without a recipe as their numbers, under that of their format as they are; not kept in 16 bits."""
    config = make_config(recipe=recipe, use_bias=False, expert_dim=128, dtype="bfloat16")
    data = make_data(config, (4, 4, 128))
    params = eight_bits(config, data)
    adapters = drawn(lora_shapes(128, config, LORA))
    wide = {name: dequantize(w) if name in ("wi", "wo") else w for name, w in params.items()}
    given = {}
    if recipe is not None:
        given = {
            "weights_quantized": {name: QuantizedWeight(params[name]) for name in ("wi", "wo")}
        }

    @jax.jit
    def function(params, given):
        def forward(adapters, x):
            return moe(with_lora(params, adapters, LORA), x, config, **given).y

        y, pull = jax.vjp(forward, adapters, jnp.bfloat16(data.x))
        return y, pull(jnp.bfloat16(data.dy)), pull

    got, want = function(params, {}), function(wide, given)
    for a, b in zip(*map(jax.tree.leaves, (got[:2], want[:2])), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    kept = [x for x in jax.tree.leaves(got[2]) if getattr(x, "shape", ()) == params["wi"].shape]
    assert kept and all(x.dtype.itemsize == 1 for x in kept)


def test_chunks_quantize_the_base_once():
    options = dict(recipe="fp8_block", use_bias=False, expert_dim=128)
    data = make_data(make_config(**options), (4, 4, 128))
    params = with_lora(data.params, drawn(lora_shapes(128, make_config(**options), LORA)), LORA)
    config = make_config(num_chunks=2, **options)
    whole = moe(params, data.x, make_config(**options)).y
    np.testing.assert_allclose(moe(params, data.x, config).y, whole, rtol=1e-5, atol=1e-6)
    of_base, of_adapted = (quantize_weights(p, config) for p in (data.params, params))
    for want, got in zip(*map(jax.tree.leaves, (of_base, of_adapted)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.full
def test_a_recipe_quantizes_the_base_alone():
    """y is the base's under the recipe, plus the adapters' of what arrives: near the merged block without a recipe."""
    config = make_config(recipe="Float8BlockScaling", use_bias=False, expert_dim=128)
    data = make_data(config, (4, 8, 128))
    adapters = drawn(lora_shapes(128, config, LORA))
    want = run(merged(data, adapters), make_config(use_bias=False, expert_dim=128))
    grad = jax.jit(jax.value_and_grad(loss(config), has_aux=True))
    (_, out), d_adapters = grad(adapters, data.x, data.params, data.dy)
    assert relative_error(np.asarray(out.y), want.y) < 0.1
    assert_adapters(d_adapters, adapters, want.d_params, tolerance=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("width, expert_dim", [(512, 128), (256, 384)], ids=str)
@pytest.mark.parametrize("recipe, tolerance", [(None, 0.02), ("Float8BlockScaling", 0.15)])
def test_on_a_gpu(recipe, tolerance, width, expert_dim):
    """Tokens read where they are and their rows summed, or neither; thin GEMMs of both formats, terms in the sums."""
    lora = LoRA(rank=16, alpha=32)
    config = make_config(
        recipe=recipe, use_bias=False, expert_dim=expert_dim, dtype="bfloat16", aux_loss_coeff=0
    )
    rounded = partial(jax.tree.map, lambda a: np.float32(jnp.bfloat16(a)))
    data, adapters = rounded(
        (make_data(config, (16, 32, width)), drawn(lora_shapes(width, config, lora)))
    )
    adapters = rounded(jax.tree.map(lambda a: a / 4, adapters))
    plain = make_config(use_bias=False, expert_dim=expert_dim, aux_loss_coeff=0)
    want = run(merged(data, adapters, lora), plain)
    grad = jax.jit(jax.value_and_grad(loss(config, lora), argnums=(0, 1), has_aux=True))
    half = {k: w if k == "gate_kernel" else jnp.bfloat16(w) for k, w in data.params.items()}
    (_, out), (d_adapters, d_x) = grad(adapters, jnp.bfloat16(data.x), half, data.dy)
    for got, expected in ((out.y, want.y), (d_x, want.d_x)):
        assert relative_error(np.asarray(got, np.float32), expected) < tolerance
    assert_adapters(d_adapters, adapters, want.d_params, tolerance, lora)


def test_merge():
    config = make_config(shared_expert_dim=20)
    data = make_data(config, (8, 3, 16))
    adapters = drawn(lora_shapes(16, config, LORA))
    want = merged(data, adapters).params
    for params in (data.params, split_wi(data.params)):
        got = merge_lora(params, adapters, LORA)
        assert set(got) == set(params)
        whole = split_wi(want) if "wi_0" in params else want
        for name, w in got.items():
            assert w.dtype == jnp.float32
            assert relative_error(np.asarray(w), np.asarray(whole[name])) < 1e-6, name
    half = jax.tree.map(jnp.bfloat16, data.params)
    rounded = merge_lora(half, adapters, LORA)["wo"]
    exact = merged(Data(jax.tree.map(np.float32, half), data.x, data.dy), adapters).params["wo"]
    np.testing.assert_array_equal(np.asarray(rounded), np.asarray(jnp.bfloat16(np.float32(exact))))


def test_initial_values_and_layouts():
    config = make_config(shared_expert_dim=20, separate_wi=True)
    for init, deviation in (("uniform", 16**-0.5 / 3**0.5), ("normal", 1 / 64)):
        lora = LoRA(rank=64, alpha=1, init=init, dtype="bfloat16")
        adapters = init_lora(jax.random.key(0), 16, config, lora)
        assert jax.tree.map(jnp.shape, adapters) == lora_shapes(16, config, lora)
        a = np.asarray(adapters["wi"]["a"], np.float32)
        assert abs(a.std() / deviation - 1) < 0.05 and abs(a.mean()) < 0.05 * deviation
        assert all(np.all(np.asarray(parts["b"]) == 0) for parts in adapters.values())
        assert {x.dtype.name for x in jax.tree.leaves(adapters)} == {"bfloat16"}
    assert lora_shapes(16, config, LoRA(rank=3, alpha=1, targets=("wo", "shared_wi"))) == {
        "wo": {"a": (8, 12, 3), "b": (8, 3, 16)},
        "shared_wi": {"a": (16, 2, 3), "b": (2, 3, 20)},
    }
    P = PartitionSpec
    assert lora_specs(config, LORA, RESOURCE) == {
        "wi": {"a": P("ep", "fsdp", None, None), "b": P("ep", None, None, "tp")},
        "wo": {"a": P("ep", "tp", None), "b": P("ep", None, "fsdp")},
        "shared_wi": {"a": P("fsdp", None, None), "b": P(None, None, "tp")},
        "shared_wo": {"a": P("tp", None), "b": P(None, "fsdp")},
    }


def test_experts_are_renumbered_with_their_adapters():
    config = make_config(use_bias=False)
    data = make_data(config, (4, 3, 16))
    adapters = drawn(lora_shapes(16, config, LORA))
    order = np.random.default_rng(0).permutation(8)
    params, moved = (permute_experts(tree, order) for tree in (data.params, adapters))
    got, want = (
        moe(with_lora(*trees, LORA), data.x, config).y
        for trees in ((params, moved), (data.params, adapters))
    )
    assert np.any(moved["wi"]["a"] != adapters["wi"]["a"])
    assert relative_error(np.asarray(got), np.asarray(want)) < 1e-6


@pytest.mark.parametrize("of", ["nnx", "linen"])
def test_a_block_is_renumbered_with_its_adapters(of):
    """The whole state of a module, and its results are as before."""
    config = make_config(use_bias=False)
    data = make_data(config, (4, 3, 16))
    order = np.random.default_rng(0).permutation(8)
    rng = np.random.default_rng(1)

    def drawn_anew(tree):
        return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype) / 4, tree)

    if of == "nnx":
        block = nnx.MoEBlock(16, config, rngs=flax_nnx.Rngs(0), lora=LORA, logical_axes=None)
        graph, tree = flax_nnx.split(block)
        call = lambda tree: flax_nnx.merge(graph, tree)(data.x).y  # noqa: E731
    else:
        block = linen.MoEBlock(config, None, lora=LORA)
        tree = block.init(jax.random.key(0), data.x)
        call = lambda tree: block.apply(tree, data.x).y  # noqa: E731
    tree = drawn_anew(tree)
    moved = permute_experts(tree, order)
    got, want = np.asarray(call(moved)), np.asarray(call(tree))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (moved, tree)), strict=True))
    assert relative_error(got, want) < 1e-6


def test_dense_layer():
    """`dense` of an Adapted: in the dtype of x, a frozen weight's gradient zeros, an adapter's by the chain rule."""
    rng = np.random.default_rng(0)
    x, w, a, b, dy = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((5, 6, 32), (32, 48), (32, 4), (4, 48), (5, 6, 48))
    )
    for recipe, tolerance in ((None, 1e-5), ("Float8CurrentScaling", 0.1)):
        y, pull = jax.vjp(partial(dense, recipe=recipe), x, Adapted(w, a, b))
        d_x, d_w = pull(dy)
        whole = w + a @ b
        assert relative_error(np.asarray(y), x @ whole) < tolerance
        assert relative_error(np.asarray(d_x), dy @ whole.T) < tolerance
        dw = np.einsum("abk,abn->kn", x, dy)
        assert relative_error(np.asarray(d_w.a), dw @ b.T) < tolerance
        assert relative_error(np.asarray(d_w.b), a.T @ dw) < tolerance
        assert not np.any(np.asarray(d_w.weight))


def test_grouped_layer():
    """The same of groups of rows; a frozen weight without an adapter too; a weight with several dimensions of K."""
    rng = np.random.default_rng(0)
    x, w, a, b, dy = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((1, 7, 8), (2, 8, 6), (2, 8, 3), (2, 3, 6), (1, 7, 6))
    )
    sizes = jnp.array([[3, 2]], jnp.int32)  # and two padding rows
    y, pull = jax.vjp(lambda x, w: grouped_dense(x, w, sizes), x, Adapted(w, a, b))
    d_x, d_w = pull(dy)
    for e, rows in enumerate((slice(0, 3), slice(3, 5))):
        whole, dw = w[e] + a[e] @ b[e], x[0, rows].T @ dy[0, rows]
        assert relative_error(np.asarray(y[0, rows]), x[0, rows] @ whole) < 1e-5
        assert relative_error(np.asarray(d_x[0, rows]), dy[0, rows] @ whole.T) < 1e-5
        assert relative_error(np.asarray(d_w.a[e]), dw @ b[e].T) < 1e-5
        assert relative_error(np.asarray(d_w.b[e]), a[e].T @ dw) < 1e-5
    assert not np.any(np.asarray(y[0, 5:])) and not np.any(np.asarray(d_x[0, 5:]))
    y, pull = jax.vjp(lambda x, w: grouped_dense(x, w, sizes), x, Adapted(w))
    np.testing.assert_array_equal(np.asarray(y), np.asarray(grouped_dense(x, w, sizes)))
    d_x, d_w = pull(dy)
    assert np.any(d_x) and not np.any(d_w.weight) and d_w.a is None
    with pytest.raises(ValueError, match="dense: an Adapted must have one dimension of K"):
        dense(x, Adapted(np.ones((7, 8, 6))), contracting_dims=((-2, -1), (0, 1)))


@pytest.mark.parametrize("framework", [full("linen"), "nnx"])
def test_modules(framework):
    """Adapters in a collection, or variables, of their own; y and gradients are those of the function."""
    config = make_config(use_bias=False, shared_expert_dim=20)
    x = np.random.default_rng(0).normal(size=(4, 3, 16)).astype(np.float32)
    drawn_ = drawn(lora_shapes(16, config, LORA))
    if framework == "linen":
        module = linen.MoEBlock(config, lora=LORA)
        variables = flax.linen.meta.unbox(module.init(jax.random.key(0), x))
        assert not any(np.any(v) for k, v in variables["lora"].items() if k.endswith("_b"))
        assert np.any(variables["lora"]["wi_a"])
        adapters = {f"{n}_{part}": v for n, parts in drawn_.items() for part, v in parts.items()}

        def total(adapters):
            return jnp.sum(
                module.apply({"params": variables["params"], "lora": adapters}, x).y ** 2
            )

        got, params = jax.grad(total)(adapters), variables["params"]
        names = "{}_{}"
    else:
        block = nnx.MoEBlock(16, config, rngs=flax.nnx.Rngs(0), lora=LORA)
        assert not np.any(block.wi_lora_b[...]) and np.any(block.wi_lora_a[...])
        for name, parts in drawn_.items():
            for part, v in parts.items():
                getattr(block, f"{name}_lora_{part}")[...] = v
        wanted = flax.nnx.DiffState(0, flax.nnx.LoRAParam)
        got = flax.nnx.grad(lambda block: jnp.sum(block(x).y ** 2), argnums=wanted)(block)
        params = {n: getattr(block, n)[...] for n in param_shapes(16, config)}
        got, names = {k: v[...] for k, v in got.items()}, "{}_lora_{}"
    want = jax.grad(lambda a: jnp.sum(moe(with_lora(params, a, LORA), x, config).y ** 2))(drawn_)
    assert len(got) == len(jax.tree.leaves(want))
    for name, parts in want.items():
        for part, v in parts.items():
            assert relative_error(got[names.format(name, part)], v) < 1e-5, (name, part)


QWEN = QWEN3_EACH | dict(
    num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6, hidden_size=8
)
DEEPSEEK = QWEN | dict(
    model_type="deepseek_v3",
    n_routed_experts=3,
    n_shared_experts=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
)
STEM = "base_model.model.model.layers.1.mlp."


def peft_names(adapters):
    """By loops, [out, in] as torch has it."""
    named = {}
    for part, letter in (("a", "A"), ("b", "B")):
        for e in range(3):
            wi, wo = adapters["wi"][part][e], adapters["wo"][part][e]
            halves = (wi[:, 0], wi[:, 1]) if part == "a" else (wi[0], wi[1])
            for module, x in zip(("gate_proj", "up_proj", "down_proj"), (*halves, wo), strict=True):
                named[f"{STEM}experts.{e}.{module}.lora_{letter}.weight"] = x.T
    return named


@pytest.mark.parametrize("hf_config", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_peft_files(hf_config, tmp_path):
    lora = LoRA(rank=2, alpha=5.0, targets=("wi", "wo"))
    adapters = drawn(lora_shapes(8, hf.moe_config(hf_config), lora))
    tensors = peft.export_adapters(adapters, hf_config, 1, lora)
    want = peft_names(adapters)
    assert set(tensors) == set(want)
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, want[name])
    peft.write_adapters(tmp_path, tensors, peft.adapter_config(lora, hf_config))
    weights, config = peft.read_adapters(tmp_path)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 5.0, "LORA")
    assert config["task_type"] == "CAUSAL_LM"
    again = peft.lora_config(config, hf_config)
    assert again == lora
    loaded = peft.load_adapters(weights, hf_config, 1, again)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    name = next(iter(weights)).replace("lora_A.weight", "lora_B.bias")
    with pytest.raises(ValueError, match="of layer 1 must be lora_A and lora_B .*lora_B.bias"):
        peft.load_adapters(weights | {name: np.ones(8)}, hf_config, 1, again)
    with pytest.raises(ValueError, match="of layer 1 must be lora_A and lora_B of lora's targets"):
        peft.load_adapters(weights, hf_config, 1, LoRA(rank=2, alpha=5.0, targets=("wi",)))


def test_peft_of_a_model_with_another_prefix():
    """Of weights whose modules' names other weights of the block have, too."""
    lora = LoRA(rank=2, alpha=5.0, targets=("wi", "wo"))
    shared = DEEPSEEK | dict(n_shared_experts=1)
    prefix = "model.language_model."
    adapters = drawn(lora_shapes(8, hf.moe_config(shared), lora))
    tensors = peft.export_adapters(adapters, shared, 1, lora, prefix=prefix)
    config = peft.adapter_config(lora, shared, prefix=prefix)
    for name in tensors:
        module = name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
        assert re.fullmatch(config["target_modules"], module), module
    assert peft.lora_config(config, shared, prefix=prefix) == lora
    with pytest.raises(ValueError, match="pass the model's prefix"):
        peft.lora_config(config, shared)


def test_peft_configs():
    config = peft.adapter_config(LoRA(rank=2, alpha=3.0), DEEPSEEK)
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert peft.lora_config(config, DEEPSEEK).targets == ("wi", "wo", "shared_wi", "shared_wo")
    rs = peft.lora_config(config | {"use_rslora": True, "r": 4}, QWEN)
    assert rs.scale == pytest.approx(3 / math.sqrt(4))
    for changes, words in (
        ({"use_dora": True}, "use_dora must be False"),
        ({"rank_pattern": {"up_proj": 4}}, "rank_pattern must be"),
        ({"lora_bias": True}, "lora_bias must be None; got lora_bias=True; merge"),
        ({"layer_replication": [[0, 1]]}, "layer_replication must be"),
        ({"of_next_year": 3}, "of_next_year must be None; got of_next_year=3"),
        ({"r": None}, "must have r and lora_alpha; got none of r"),
        ({"target_modules": None}, "whole weights of the block"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be"),
        ({"target_modules": ["gate_proj"]}, "both gate and up projections"),
        ({"target_modules": ["q_proj"]}, "whole weights of the block"),
    ):
        with pytest.raises(ValueError, match=words):
            peft.lora_config(config | changes, QWEN)
    one_array = QWEN | {"model_type": "granitemoe", "num_local_experts": 3, "intermediate_size": 6}
    with pytest.raises(ValueError, match="must be a module with a weight .*input_linear"):
        peft.adapter_config(LoRA(rank=2, alpha=3.0), one_array)
    lora = LoRA(rank=2, alpha=3.0)
    with pytest.raises(ValueError, match="missing 18: .*lora_A.weight"):
        peft.load_adapters({}, QWEN, 0, lora)
    with pytest.raises(ValueError, match="adapters must be"):
        peft.export_adapters({}, QWEN, 0, lora)


def test_errors():
    config = make_config()
    data = make_data(config, (8, 3, 16))
    adapters = drawn(lora_shapes(16, config, LORA))
    with pytest.raises(ValueError, match=r"a of wi must be \(8, 16, 2, 4\)"):
        with_lora(data.params, adapters, LoRA(rank=4, alpha=1))
    with pytest.raises(
        ValueError, match="adapters must be of weights of the block, wi, wo; got gate_kernel"
    ):
        merge_lora(data.params, {"gate_kernel": adapters["wo"]}, LORA)
    with pytest.raises(
        TypeError, match=r"targets must be a tuple of names; got 'wi'; pass \('wi',"
    ):
        LoRA(rank=4, alpha=1, targets="wi")
    with pytest.raises(TypeError, match=r"lora: wo.a must be an array of floats .*; got None"):
        with_lora(data.params, {"wo": {}}, LORA)
    with pytest.raises(
        ValueError, match="targets must be weights of the block, wi, wo; got shared_wi"
    ):
        lora_shapes(16, config, LoRA(rank=4, alpha=1, targets=("shared_wi",)))
    with pytest.raises(
        TypeError, match="native_moe: wi must be an array; got an Adapted; merge_lora"
    ):
        native_moe(with_lora(data.params, adapters, LORA), data.x, config)
    for fields, words in (
        (dict(rank=0, alpha=1), "rank must be at least 1"),
        (dict(rank=1, alpha=math.nan), "alpha must be finite"),
        (dict(rank=1, alpha=1, init="zeros"), "init must be one of"),
        (dict(rank=1, alpha=1, targets=("q_proj",)), "targets must be of wi"),
    ):
        with pytest.raises(ValueError, match=words):
            LoRA(**fields)
    assert LoRA.from_json(LORA.to_json()) == LORA
