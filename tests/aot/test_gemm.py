"""Two GEMMs with a gate between, columns then rows over tp, compiled for 16 H100s: what crosses which devices.

Two hosts of 8 GPUs, mesh (fsdp=2, ep=4, tp=2): ep and tp within a host, fsdp across.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource, gated_activation, gemm, global_shard_guard, grouped_gemm
from expertmesh.core.hlo import axes_of, collectives

pytestmark = pytest.mark.aot

AXES = {"fsdp": 2, "ep": 4, "tp": 2}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
TOKENS = ("fsdp", "ep")
B, S, D, F, E, C = 16, 128, 512, 384, 8, 256


def dense(x, wi, wo):
    h = gemm(x, wi, w_spec=P("fsdp", None, "tp"))
    return gemm(gated_activation(h, activation="silu"), wo, w_spec=P("tp", "fsdp"))


def experts(x, wi, wo, group_sizes):
    h = grouped_gemm(x, wi, group_sizes, w_spec=P("ep", "fsdp", None, "tp"))
    a = gated_activation(h, activation="silu")
    return grouped_gemm(a, wo, group_sizes, w_spec=P("ep", "tp", "fsdp"))


def elements(shape):
    dtype, _, sizes = shape.rstrip("]").partition("[")
    return dtype, prod(map(int, filter(None, sizes.split(","))))


def crossing(function, shapes, kind, h100_mesh):
    """(kind, axes, dtype) -> elements that a device gets; XLA may transpose them, and join several in one buffer."""
    mesh = h100_mesh(AXES, kind)
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes
    ]

    def both(x, wi, wo, dy, *rest):
        y, pull = jax.vjp(lambda *floats: function(*floats, *rest), x, wi, wo)
        return y, pull(dy)

    with global_shard_guard(RESOURCE if kind == AxisType.Auto else None):
        text = jax.jit(both).lower(*operands).compile().as_text()
    moved = Counter()
    for found in collectives(text):
        for shape in found.shapes:
            dtype, count = elements(shape)
            moved[found.kind, axes_of(found.groups, AXES), dtype] += count
    return moved


GATHER = ("all-gather", ("fsdp",), "bf16")


KINDS = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda k: k.name)


@KINDS
def test_dense(kind, h100_mesh):
    """Float32 masters are gathered in bfloat16 and keep their part of F; sums cross in float32."""
    x = ((B, S, D), jnp.bfloat16, P(TOKENS))
    wi, wo = ((D, 2, F), jnp.float32, P("fsdp", None, "tp")), ((F, D), jnp.float32, P("tp", "fsdp"))
    weights = 3 * D * F // 2
    moved = crossing(dense, [x, wi, wo, x], kind, h100_mesh)
    assert moved.pop(GATHER) in (weights, 2 * weights)  # for both ways, or for each
    assert moved == {
        ("reduce-scatter", ("fsdp",), "f32"): weights // 2,
        ("all-reduce", ("ep",), "f32"): weights // 2,
        ("all-reduce", ("tp",), "f32"): 2 * B * S // 8 * D,  # the output, and the gradient of x
    }


@KINDS
def test_experts(kind, h100_mesh):
    """The same of a grouped GEMM, whose weights' gradients stay within their part of the experts."""
    x = ((8, C, D), jnp.bfloat16, P(TOKENS))
    wi = ((E, D, 2, F), jnp.float32, P("ep", "fsdp", None, "tp"))
    wo = ((E, F, D), jnp.float32, P("ep", "tp", "fsdp"))
    sizes = ((8, E // 4), jnp.int32, P(TOKENS))
    weights = E // 4 * 3 * D * F // 2
    moved = crossing(experts, [x, wi, wo, x, sizes], kind, h100_mesh)
    assert moved.pop(GATHER) in (weights, 2 * weights)
    assert moved == {
        ("reduce-scatter", ("fsdp",), "f32"): weights // 2,
        ("all-reduce", ("tp",), "f32"): 2 * C * D,
    }
