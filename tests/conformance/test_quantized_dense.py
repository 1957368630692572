"""Test 21: expert weights sharded over fsdp are quantized where they are, and gathered in 8 bits; nothing else changes.

Two experts per participant, 256 to 256, groups of 128 rows; mesh (fsdp=2, ep=2), forward and backward.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases.covering import covering
from expertmesh.core import MeshResource, global_shard_guard, grouped_dense
from expertmesh.core.hlo import axes_of, collectives
from expertmesh.core.testing import compile_partitioned, magnitudes

AXES = {"fsdp": 2, "ep": 2}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
TOKENS = P(("fsdp", "ep"))
ALONG_K, ALONG_N = P("ep", "fsdp"), P("ep", None, "fsdp")
SIZES = np.array([[128, 100], [0, 256], [128, 128], [0, 0]], np.int32)
ROWS, K, N = 256, 256, 256


@functools.cache
def operands():
    rng = np.random.default_rng(21)
    x, dy = (magnitudes(rng, (4, ROWS, width), "bfloat16") for width in (K, N))
    bias = rng.normal(size=(4, N)).astype(np.float32)
    # Experts and columns of other magnitudes: a scale that is not theirs would show.
    weight = magnitudes(rng, (4, K, N)) * 4.0 ** np.arange(4, dtype=np.float32)[:, None, None]
    return x, weight, SIZES, bias, dy


def value_and_gradients(recipe, w_spec, x, weight, sizes, bias, dy, key):
    y, pull = jax.vjp(
        lambda *floats: grouped_dense(
            *floats[:2], sizes, floats[2], recipe=recipe, key=key, w_spec=w_spec
        ),
        *(x, weight, bias),
    )
    return y, *pull(dy)


@functools.cache
def on_one_device(recipe):
    key = jax.random.key(0)
    return jax.jit(functools.partial(value_and_gradients, recipe, None))(*operands(), key)


DATA, SCALES = "f8e4m3fn[2,256,256]", "f32[2,2,2]"
# recipe, where the weight is, kind of mesh -> what is gathered, once forward and once backward
CASES = {
    "blocks on K, roles": ("fp8_block", ALONG_K, "resource", [DATA, SCALES]),
    "blocks on N, types": ("fp8_block", ALONG_N, "explicit", [DATA, SCALES]),
    "mx on N, propagation": ("mxfp8", ALONG_N, "auto", [DATA, "f8e8m0fnu[2,8,256]"]),
    "tensors on K, propagation": ("fp8_current", ALONG_K, "auto", [DATA]),
    "bfloat16 on N, roles": (None, ALONG_N, "resource", ["bf16[2,256,256]"]),
}


def crossing(text):
    return Counter(
        (found.kind, axes_of(found.groups, AXES), shape)
        for found in collectives(text)
        for shape in found.shapes
    )


def expected(recipe, w_spec, gathered):
    backward = [shape.replace("[2,8,256]", "[2,256,8]") for shape in gathered]
    shard = "f32[2,128,256]" if w_spec == ALONG_K else "f32[2,256,128]"
    moves = [("all-gather", ("fsdp",), shape) for shape in gathered + backward]
    # One amax per expert, before anything is quantized by it.
    moves += [("all-reduce", ("fsdp",), "s32[2]")] if recipe == "fp8_current" else []
    moves += [("reduce-scatter", ("fsdp",), shard), ("all-reduce", ("fsdp",), "f32[2,256]")]
    return Counter(moves)


@covering("case", CASES, covers=["blocks on K, roles"])
def test_weights_are_gathered_in_eight_bits(case):
    recipe, w_spec, mode, gathered = CASES[case]
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), tuple(AXES), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    specs = TOKENS, w_spec, TOKENS, P("ep"), TOKENS
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = [jax.device_put(x, where) for x, where in zip(operands(), shardings, strict=True)]
    results = shardings[4], shardings[0], shardings[1], shardings[3]
    with global_shard_guard(RESOURCE if mode == "resource" else None):
        function = functools.partial(
            value_and_gradients, recipe, w_spec if mode == "resource" else None
        )
        jitted = jax.jit(function, out_shardings=results if mode == "auto" else None)
        program, text = compile_partitioned(jitted.lower(*placed, jax.random.key(0)))
    got = program(*placed, jax.random.key(0))
    names = ("y", "dx", "dkernel", "dbias")
    for name, x, want, where in zip(names, got, on_one_device(recipe), results, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(want), err_msg=name)
        assert x.sharding.is_equivalent_to(where, x.ndim), name
        assert np.any(np.asarray(x, np.float32)) and jnp.all(jnp.isfinite(x)), name
    found = crossing(text)
    if recipe is None:  # also once for both ways
        assert {key[2] for key in found if key[0] == "all-gather"} == set(gathered)
    else:
        assert found == expected(recipe, w_spec, gathered)
