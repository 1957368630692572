"""What crosses devices in a quantized dense layer, forward and backward: 8 bits of the weight, sums in float32.

The same layouts as test_gemm_partition; grouped_dense is tests/conformance/test_quantized_dense.py.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from expertmesh.core import (
    Float8BlockScaling,
    MeshResource,
    dense,
    gemm,
    global_shard_guard,
    grouped_dense,
    quantize,
    quantize_weight,
)
from expertmesh.core.hlo import axes_of, collectives
from expertmesh.core.testing import compile_partitioned, magnitudes, relative_error

AXES = {"fsdp": 2, "ep": 2, "tp": 2}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
TOKENS = ("fsdp", "ep")
FSDP, TP = ("fsdp",), ("tp",)
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(kind):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


@functools.cache
def data():
    rng = np.random.default_rng(3)
    x, dy = magnitudes(rng, (4, 64, 128)), magnitudes(rng, (4, 64, 128))
    return x, magnitudes(rng, (128, 128)), rng.normal(size=128).astype(np.float32), dy


def value_and_gradients(options, x, weight, bias, dy):
    y, pull = jax.vjp(lambda *floats: dense(*floats, **options), x, weight, bias)
    return y, *pull(dy)


def crossing(text):
    return Counter(
        (found.kind, axes_of(found.groups, AXES), shape)
        for found in collectives(text)
        for shape in found.shapes
    )


DATA, GATHER, SCATTER, TOTAL = "f8e4m3fn", "all-gather", "reduce-scatter", "all-reduce"
# layout -> recipe, kind of axes, specs of x, weight, bias, y; what crosses
LAYOUTS = {
    "compound on K": (
        "mxfp8",
        EXPLICIT,
        (P(TOKENS), P(TOKENS), P(), P(TOKENS)),
        [
            (GATHER, TOKENS, "f8e4m3fn[128,128]"),
            (GATHER, TOKENS, "f8e8m0fnu[4,128]"),
            (GATHER, TOKENS, "f8e4m3fn[128,128]"),
            (GATHER, TOKENS, "f8e8m0fnu[128,4]"),
            (SCATTER, TOKENS, "f32[32,128]"),
            (TOTAL, TOKENS, "f32[128]"),
        ],
    ),
    "tp columns": (
        "mxfp8",
        AUTO,
        (P(TOKENS), P("fsdp", "tp"), P("tp"), P(TOKENS, None, "tp")),
        [
            (GATHER, FSDP, "f8e4m3fn[128,64]"),
            (GATHER, FSDP, "f8e8m0fnu[4,64]"),
            (GATHER, FSDP, "f8e4m3fn[128,64]"),
            (GATHER, FSDP, "f8e8m0fnu[128,2]"),
            (TOTAL, TP, "f32[1,64,128]"),
            (SCATTER, FSDP, "f32[64,64]"),
            (TOTAL, ("ep",), "f32[64,64]"),
            (TOTAL, TOKENS, "f32[64]"),
        ],
    ),
    "tp rows": (
        "fp8_current",
        EXPLICIT,
        (P(TOKENS, None, "tp"), P("tp", "fsdp"), P(), P(TOKENS)),
        [
            (TOTAL, ("fsdp", "ep", "tp"), "s32[]"),
            (TOTAL, ("fsdp", "tp"), "s32[]"),
            (TOTAL, TOKENS, "s32[]"),
            (GATHER, FSDP, "f8e4m3fn[64,128]"),
            (GATHER, FSDP, "f8e4m3fn[64,128]"),
            (TOTAL, TP, "f32[1,64,128]"),
            (SCATTER, FSDP, "f32[64,64]"),
            (TOTAL, ("ep",), "f32[64,64]"),
            (TOTAL, TOKENS, "f32[128]"),
        ],
    ),
    "tp columns of a split sequence": (
        "mxfp8",
        AUTO,
        (P(TOKENS, "tp"), P(None, "tp"), P("tp"), P(TOKENS, None, "tp")),
        [
            (GATHER, TP, "f8e4m3fn[1,64,128]"),
            (GATHER, TP, "f8e8m0fnu[1,64,4]"),
            (GATHER, TP, "u8[1,64,128]"),  # what a checkpoint policy may keep, as bits
            (GATHER, TP, "u8[1,2,128]"),
            (SCATTER, TP, "f32[1,32,128]"),
            (TOTAL, TOKENS, "f32[128,64]"),
            (TOTAL, TOKENS, "f32[64]"),
        ],
    ),
}


@functools.cache
def on_one_device(recipe):
    return jax.jit(functools.partial(value_and_gradients, dict(recipe=recipe)))(*data())


@covering("layout", LAYOUTS, covers=["tp rows", "tp columns"])
def test_dense(layout):
    recipe, kind, specs, expected = LAYOUTS[layout]
    mesh = mesh_of(kind)
    placed = [put(mesh, x, spec) for x, spec in zip(data(), specs, strict=True)]
    options = dict(recipe=recipe)
    if kind == AUTO:
        options |= dict(x_spec=specs[0], w_spec=specs[1], out_spec=specs[3])
    with global_shard_guard(RESOURCE if kind == AUTO else None):
        lowered = jax.jit(functools.partial(value_and_gradients, options)).lower(*placed)
        program, text = compile_partitioned(lowered)
    got = program(*placed)
    for result, want, primal in zip(
        got, on_one_device(recipe), [placed[3], *placed[:3]], strict=True
    ):
        assert relative_error(result, want) < 1e-6
        assert result.sharding.is_equivalent_to(primal.sharding, primal.ndim)
    assert crossing(text) == Counter(expected)


def test_specs_of_several_contracted_dimensions():
    """Of K in two dimensions the first is sharded: what crosses is what crosses where K is one dimension."""
    mesh, (x, weight, _, dy) = mesh_of(AUTO), data()

    def compiled(shape, *specs):
        count = len(shape)
        options = dict(x_spec=specs[0], w_spec=specs[1], out_spec=specs[2], recipe="mxfp8")
        dims = tuple(range(2, 2 + count)), tuple(range(count))

        def both(x, weight, dy):
            y, pull = jax.vjp(lambda x, w: dense(x, w, contracting_dims=dims, **options), x, weight)
            return y, *pull(dy)

        operands = x.reshape(*x.shape[:2], *shape), weight.reshape(*shape, -1), dy
        placed = [put(mesh, a, spec) for a, spec in zip(operands, specs, strict=True)]
        with global_shard_guard(RESOURCE):
            program, text = compile_partitioned(jax.jit(both).lower(*placed))
        return crossing(text), program(*placed)

    one = compiled((128,), P(TOKENS, None, "tp"), P("tp", "fsdp"), P(TOKENS))
    two = compiled((2, 64), P(TOKENS, None, "tp"), P("tp", None, "fsdp"), P(TOKENS))
    assert one[0] == two[0], (one[0] - two[0], two[0] - one[0])
    for got, want in zip(two[1], one[1], strict=True):
        np.testing.assert_array_equal(got, want.reshape(got.shape))


@pytest.mark.parametrize("mode", ["explicit", "resource", "auto"])
@pytest.mark.parametrize("layer", ["dense", "grouped_dense"])
def test_a_block_on_two_shards_is_an_error(layer, mode):
    """128 does not divide 192 / 2; without a mesh the last block is just shorter."""
    mesh = mesh_of(EXPLICIT if mode == "explicit" else AUTO)
    x, weight = jnp.ones((4, 64, 192)), jnp.ones((192, 128))
    specs, sizes = (P(TOKENS), P("fsdp")), jnp.full((4, 1), 64)
    layers = {
        "dense": lambda x, weight: dense(x, weight, recipe="fp8_block"),
        "grouped_dense": lambda x, weight: grouped_dense(
            x, weight, put(mesh, sizes, P(TOKENS)), recipe="fp8_block"
        ),
    }
    if layer == "grouped_dense":
        weight, specs = weight[None], (P(TOKENS), P(None, "fsdp"))
    placed = put(mesh, x, specs[0]), put(mesh, weight, specs[1])
    # Where the compiler asks for the plan, JAX raises its own error, with ours in it.
    kind = jax.errors.JaxRuntimeError if mode == "auto" else ValueError
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        with pytest.raises(kind) as info:
            jax.jit(layers[layer]).lower(*placed).compile()
    words = ["whole blocks", "192", "128", "fsdp"]
    assert all(word in str(info.value) for word in words), info.value


def test_scales_decide_where_blocks_may_be_cut():
    """Data that were laid out anew, so that a shard ends within a block, are gathered: values are the same."""
    x, weight, *_ = data()
    x = np.concatenate([x, 64 * x[:, :, :64]], axis=2)  # 192 = 128 + 64, and 2 * 96
    weight = np.concatenate([weight, weight[:64]])
    formats = Float8BlockScaling().formats()
    q = quantize(x, formats.x), quantize(weight, formats.weight, axis=0, across=1)
    mesh = mesh_of(EXPLICIT)
    cut, whole = (jax.tree.map(lambda a: put(mesh, a, P()), one) for one in q)
    cut = dataclasses.replace(cut, data=put(mesh, q[0].data, P(None, None, "tp")))
    function = functools.partial(gemm, out_dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(function)(cut, whole), function(*q))


def test_the_cache_lies_where_the_kernel_is():
    """Under roles that nobody gave: of dense over fsdp along K, of grouped_dense over ep along E as well."""
    mesh, weight = mesh_of(AUTO), data()[1]
    with global_shard_guard(RESOURCE):
        one = jax.jit(lambda w: quantize_weight(w, "mxfp8"))(put(mesh, weight, P("fsdp")))
        experts = put(mesh, np.stack([weight, weight]), P("ep", "fsdp"))
        some = jax.jit(lambda w: quantize_weight(w, "mxfp8", batch_dims=1))(experts)
    for cached, spec in ((one, P("fsdp")), (some, P("ep", "fsdp"))):
        for x in jax.tree.leaves(cached):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
