"""A LoRA step compiled for 16 H100s: what crosses devices is of adapters, tokens and frozen weights, and no more."""

import collections
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import MeshResource, global_shard_guard, hlo
from expertmesh.flax_moe import (
    LoRA,
    MoEConfig,
    lora_shapes,
    lora_specs,
    moe,
    param_shapes,
    param_specs,
    with_lora,
)

pytestmark = pytest.mark.aot

AXES = {"fsdp": 2, "ep": 8}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
D, F, E, r = 512, 384, 64, 8
e = E // 8
CONFIG = MoEConfig(num_experts=E, top_k=3, expert_dim=F, transport="all_to_all")
LORA = LoRA(rank=r, alpha=16)


def structs(mesh, shapes, specs, dtype):
    return jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


@pytest.fixture(scope="module", params=("explicit", "resource"))
def program(request, h100_mesh):
    explicit = request.param == "explicit"
    mesh = h100_mesh(AXES, AxisType.Explicit if explicit else AxisType.Auto)
    params = structs(mesh, param_shapes(D, CONFIG), param_specs(CONFIG, RESOURCE), jnp.bfloat16)
    adapters = structs(
        mesh, lora_shapes(D, CONFIG, LORA), lora_specs(CONFIG, LORA, RESOURCE), jnp.float32
    )
    x = structs(mesh, (32, 96, D), PartitionSpec(("fsdp", "ep")), jnp.bfloat16)

    def step(adapters, params, x, dy):
        def block(adapters, x):
            return moe(with_lora(params, adapters, LORA), x, CONFIG).y

        return jax.vjp(block, adapters, x)[1](dy)

    with global_shard_guard(None if explicit else RESOURCE):
        return jax.jit(step).lower(adapters, params, x, x).compile()


def crossing(program, size):
    """Elements that each kind of collective moves in each dtype, over groups of so many devices."""
    moved = collections.Counter()
    for found in hlo.collectives(program.as_text()):
        for shape in found.shapes:
            dtype, _, sizes = shape.rstrip("]").partition("[")
            if len(found.groups[0]) == size:
                moved[found.kind, dtype] += prod(map(int, filter(None, sizes.split(","))))
    return moved


def test_what_crosses_fsdp(program):
    """Weights and adapters are gathered in bfloat16; of gradients those of adapters alone cross, in float32."""
    moved = crossing(program, 2)
    weights, split = e * 3 * D * F, e * D * (2 * r + r)  # A of wi, B of wo
    gathered = moved.pop(("all-gather", "bf16"))
    assert weights + split <= gathered <= 2 * (weights + split), "for both ways, or for each"
    assert moved == {
        ("reduce-scatter", "f32"): split // 2,
        # B of wi with its zeros, A of wo: fsdp does not split them.
        ("all-reduce", "f32"): e * (2 * r * 2 * F + F * r),
    }


def test_kernels(program):
    """Of four GEMMs, and of six thin ones for each of the two weights."""
    assert program.as_text().count("expertmesh_core_launch") >= 4 + 2 * 6
