"""A quantized expert layer compiled for 16 H100s: what of the weights crosses which devices, and how wide.

Two hosts of 8 GPUs, mesh (fsdp=2, ep=8): ep within a host, fsdp across.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, global_shard_guard, grouped_dense
from expertmesh.core.hlo import axes_of, collectives

pytestmark = pytest.mark.aot

AXES = {"fsdp": 2, "ep": 8}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
TOKENS = P(("fsdp", "ep"))
C, K, N, E = 512, 512, 768, 16


def crossing(recipe, w_spec, kind, h100_mesh):
    """(kind, axes, dtype) -> elements that a device gets."""
    mesh = h100_mesh(AXES, kind)

    def operand(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x, dy = (operand((16, C, width), jnp.bfloat16, TOKENS) for width in (K, N))
    weight = operand((E, K, N), jnp.float32, w_spec)
    sizes, key = operand((16, 2), jnp.int32, TOKENS), operand((2,), jnp.uint32, P())
    bias = operand((E, N), jnp.float32, P("ep"))

    def both(x, weight, sizes, bias, dy, key):
        def layer(x, weight, bias):
            return grouped_dense(x, weight, sizes, bias, recipe=recipe, key=key, w_spec=w_spec)

        y, pull = jax.vjp(layer, x, weight, bias)
        return y, pull(dy)

    with global_shard_guard(RESOURCE if kind == AxisType.Auto else None):
        text = jax.jit(both).lower(x, weight, sizes, bias, dy, key).compile().as_text()
    moved = Counter()
    for found in collectives(text):
        for shape in found.shapes:
            dtype, _, dims = shape.rstrip("]").partition("[")
            moved[found.kind, axes_of(found.groups, AXES), dtype] += prod(
                map(int, filter(None, dims.split(",")))
            )
    return moved


WEIGHT = E // 8 * K * N
SUMS = {
    ("reduce-scatter", ("fsdp",), "f32"): WEIGHT // 2,
    ("all-reduce", ("fsdp",), "f32"): E // 8 * N,
}
AMAX = {("all-reduce", ("fsdp",), "s32"): E // 8}


@pytest.mark.parametrize(
    "recipe, w_spec, kind, gathered",
    [
        ("fp8_block", P("ep", None, "fsdp"), AxisType.Auto, {"f8e4m3fn": 1, "f32": 1 / 128**2}),
        ("mxfp8", P("ep", "fsdp"), AxisType.Explicit, {"f8e4m3fn": 1, "f8e8m0fnu": 1 / 32}),
        ("fp8_current", P("ep", "fsdp"), AxisType.Auto, {"f8e4m3fn": 1}),
        # Two numbers of four bits in a byte.
        ("nvfp4", P("ep", None, "fsdp"), AxisType.Explicit, {"s8": 1 / 2, "f8e4m3fn": 1 / 16**2}),
    ],
)
def test_weights_cross_hosts_in_eight_bits(recipe, w_spec, kind, gathered, h100_mesh):
    """Once forward and once backward; their gradients are scattered in float32; nothing of 16 bits moves."""
    want = {("all-gather", ("fsdp",), d): 2 * WEIGHT * share for d, share in gathered.items()}
    amax = AMAX if recipe in ("fp8_current", "nvfp4") else {}
    assert crossing(recipe, w_spec, kind, h100_mesh) == want | SUMS | amax
