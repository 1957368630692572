"""The whole block, forward and backward, compiled for 16 H100s: what crosses which devices, in which dtype; memory.

Two hosts of 8 GPUs, mesh (fsdp=2, ep=8): ep within a host, fsdp across. Numbers are those of one device.
"""

import collections
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import Float8BlockScaling, MeshResource, global_shard_guard, hlo
from expertmesh.flax_moe import MoEConfig, moe
from expertmesh.flax_moe.params import param_shapes, param_specs

pytestmark = pytest.mark.aot

AXES = {"fsdp": 2, "ep": 8}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
B, S, D, F, E, K = 32, 96, 512, 384, 64, 3
R, e, T = 8, E // 8, B * S // 16
G = R * T  # tokens of an EP group
C = G * K  # the worst case: all of its choices, without alignment
OVER_EP = (tuple(range(8)), tuple(range(8, 16)))
OVER_FSDP = tuple((i, i + 8) for i in range(8))
OVER_ALL = (tuple(range(16)),)
NAMES = {OVER_EP: "ep", OVER_FSDP: "fsdp", OVER_ALL: "all"}

# (kind, group, shape) of everything that may cross devices. XLA gathers and scatters wo transposed.
GATHERED = {
    ("all-gather", "fsdp", f"bf16[{e},{D},2,{F}]"),
    ("all-gather", "fsdp", f"bf16[{e},{D},{F}]"),
}
SCATTERED = {
    ("reduce-scatter", "fsdp", f"f32[{e},{D // 2},2,{F}]"),
    ("reduce-scatter", "fsdp", f"f32[{e},{D // 2},{F}]"),
}
ROUTING = {
    ("all-gather", "ep", f"s32[{G},{K}]"),  # choices
    ("all-gather", "ep", f"f32[{G},{K}]"),  # their weights
    ("reduce-scatter", "ep", f"f32[{T},{K}]"),  # and the weights' gradients
}
# Elements that are all-reduced over all devices; XLA joins them in one buffer.
SUMS = {
    "f32": D * E + 1,  # the gate's gradient; the loss, to which XLA adds the router's before
    "s32": E + 1,  # each expert's choices, dropped rows
}
EXCHANGE = {
    # A block of T tokens per peer: out and the gradients in bf16, sums of rows in f32.
    "all_to_all": {
        ("all-to-all", "ep", f"bf16[{R * T},{D}]"),
        ("all-to-all", "ep", f"f32[{R * T},{D}]"),
    },
    "ring": {
        ("all-gather", "ep", f"bf16[{G},{D}]"),
        ("reduce-scatter", "ep", f"f32[{T},{D}]"),
    },
}


def config(transport, recipe=None, spare=0):
    return MoEConfig(
        num_experts=E,
        top_k=K,
        expert_dim=F,
        aux_loss_coeff=0.01,
        z_loss_coeff=0.001,
        transport=transport,
        recipe=recipe,
        num_spare_experts=spare,
    )


def compiled(mesh, transport, resource, recipe=None, spare=0):
    """Loss and gradients of the parameters and the tokens."""
    tokens = PartitionSpec(("fsdp", "ep"))
    block = config(transport, recipe, spare)

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    specs = param_specs(block, RESOURCE)
    params = {
        name: struct(shape, jnp.float32, specs[name])
        for name, shape in param_shapes(D, block).items()
    }
    x = struct((B, S, D), jnp.bfloat16, tokens)

    def loss(params, x, dy):
        out = moe(params, x, block)
        error = jnp.sum(out.y.astype(jnp.float32) * dy.astype(jnp.float32))
        return error + out.aux_loss + out.z_loss, (out.tokens_per_expert, out.num_dropped)

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with global_shard_guard(resource):
        return function.lower(params, x, x).compile()


@pytest.fixture(scope="module", params=("explicit", "resource"))
def mode(request, h100_mesh):
    kind = AxisType.Explicit if request.param == "explicit" else AxisType.Auto
    return h100_mesh(AXES, kind), RESOURCE if request.param == "resource" else None


@pytest.fixture(scope="module", params=EXCHANGE)
def program(request, mode):
    return request.param, compiled(mode[0], request.param, mode[1])


def crossing(program):
    """How often each (kind, group, shape) crosses devices; XLA may join several in one."""
    return collections.Counter(
        (found.kind, NAMES.get(found.groups, found.groups), shape)
        for found in hlo.collectives(program.as_text())
        for shape in found.shapes
    )


def test_what_crosses_devices(program):
    """Float32 masters cross in bf16; no logits, no tokens over fsdp, no whole weight gradients."""
    transport, compiled_program = program
    moved = {key for key in crossing(compiled_program) if key[0] != "all-reduce"}
    allowed = GATHERED | SCATTERED | ROUTING | EXCHANGE[transport]
    assert moved == allowed


def test_sums(program):
    found = crossing(program[1])
    elements = collections.Counter()
    for (kind, group, shape), count in found.items():
        if kind == "all-reduce":
            assert group == "all"
            dtype, _, sizes = shape.rstrip("]").partition("[")
            elements[dtype] += count * prod(map(int, filter(None, sizes.split(","))))
    assert elements == SUMS


def test_how_often(program):
    """Two exchanges forward and two backward; a weight is gathered at most once each way, its gradient moves once."""
    transport, compiled_program = program
    found = crossing(compiled_program)
    assert all(found[key] == 2 for key in EXCHANGE[transport])
    assert all(found[key] == 1 for key in SCATTERED)
    over_fsdp = [
        n for (kind, group, _), n in found.items() if (kind, group) == ("all-gather", "fsdp")
    ]
    assert len(over_fsdp) == 2 and max(over_fsdp) <= 2


def test_memory(program):
    """A few copies of the rows and of the gathered weights; nothing of [rows, E, F] or [E, rows, D]."""
    weights = e * 3 * D * F
    rows = C * (2 * D + 3 * F)  # into and out of each of the two GEMMs and the activation
    blocks = G * D
    # Weights: gathered in bf16, whole gradients in f32. Rows: bf16, forward and backward. Blocks: bf16 and f32.
    bound = weights * (2 + 4) + rows * (2 + 2) + blocks * (2 + 4)
    memory = program[1].memory_analysis()
    assert memory.temp_size_in_bytes < bound
    # This device's part of every parameter, of x and of dy.
    assert memory.argument_size_in_bytes == 4 * (weights // 2 + D * E) + 2 * 2 * T * D


def test_quantized(mode):
    """Weights are gathered as 8-bit data and scales, tokens dispatched as bytes; sums cross in float32."""
    program = compiled(mode[0], "all_to_all", mode[1], Float8BlockScaling())
    moved = {key for key in crossing(program) if key[0] != "all-reduce"}
    # Along D, or along a dimension before: what kernels write has its dimensions in this order, and XLA then gathers
    # the parts one after the other.
    weights = {
        ("all-gather", "fsdp", f"{dtype}[{sizes}]")
        for dtype, block in [("f8e4m3fn", 1), ("f32", 128)]
        for d, f in [(D // block, F // block)]
        for sizes in [
            f"{e},{d},2,{f}",
            f"{2 * e},{d // 2},2,{f}",
            f"{e},{f},{d}",
            f"{2 * e},{f},{d // 2}",
            f"{e},{d},{f}",  # wo, which XLA may gather transposed
        ]
    }
    dispatched = ("all-to-all", "ep", f"u8[{R * T},{D + 4 * D // 128}]")
    over_fsdp = {key for key in moved if key[1] == "fsdp"}
    assert SCATTERED <= over_fsdp <= SCATTERED | weights
    assert {key[2].partition("[")[0] for key in over_fsdp - SCATTERED} == {"f8e4m3fn", "f32"}
    assert moved - over_fsdp == ROUTING | EXCHANGE["all_to_all"] | {dispatched}
    # One kernel projects the rows that arrive, activates them and quantizes them.
    assert program.as_text().count('name = "block_scaled_activation"') == 1


def test_spare_experts(mode):
    """A block of two weights for each two ranks there in bf16 and back in f32, of this device's part of D; counts."""
    spare, slots = 2, e + 2
    program = compiled(mode[0], "all_to_all", mode[1], spare=spare)
    moved = {key for key in crossing(program) if key[0] != "all-reduce"}
    copies = {
        ("all-to-all", "ep", f"{dtype}[{R * spare},{D // 2 * width}]")
        for dtype in ("bf16", "f32")
        for width in (2 * F, F)
    }
    weights = {
        (kind, over, shape.replace(f"[{e},", f"[{slots},"))
        for kind, over, shape in GATHERED | SCATTERED
    }
    counts = {("all-gather", "ep", f"s32[{R},{E}]")}
    assert moved == copies | weights | counts | ROUTING | EXCHANGE["all_to_all"]
    assert crossing(program)["all-reduce", "fsdp", f"s32[{E}]"] == 1
