"""The ragged transport compiled for H100s: the collective is there, within EP groups, and nothing else moves tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import MeshResource, global_shard_guard, hlo
from expertmesh.ep import EpConfig, combine, dispatch, prepare

pytestmark = pytest.mark.aot

T, K, E, D, R = 512, 2, 16, 256, 8
CONFIG = EpConfig(num_experts=E, axis="ep", transport="ragged", alignment=16)
HOSTS = (tuple(range(8)), tuple(range(8, 16)))


def round_trip(topk_idx, tokens):
    handle = prepare(topk_idx, CONFIG)
    return combine(handle, jnp.sin(dispatch(handle, tokens)))


def gradient(topk_idx, tokens, g):
    return jax.vjp(partial(round_trip, topk_idx), tokens)[1](g)[0]


@pytest.mark.parametrize("mode", ["explicit", "resource", "manual", "vmap"])
def test_forward_and_backward(h100_mesh, mode):
    kind = AxisType.Auto if mode == "resource" else AxisType.Explicit
    mesh = h100_mesh({"fsdp": 2, "ep": R}, kind)
    lead = (3,) if mode == "vmap" else ()
    spec = PartitionSpec(*[None] * len(lead), ("fsdp", "ep"))
    function = jax.vmap(gradient) if lead else gradient
    if mode == "manual":
        function = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=NamedSharding(mesh, spec))

    operands = struct((T, K), jnp.int32), *[struct((T, D), jnp.bfloat16)] * 2
    roles = MeshResource(fsdp_resource="fsdp", ep_resource="ep") if mode == "resource" else None
    with global_shard_guard(roles):
        program = jax.jit(function).lower(*operands).compile()
    found = hlo.collectives(program.as_text())
    # The forward's combine is not needed for the gradient of what went before it.
    assert sorted(x.kind for x in found) == ["all-gather"] + ["ragged-all-to-all"] * 3
    assert all(x.groups == HOSTS for x in found)
    (ids,) = (x for x in found if x.kind == "all-gather")
    assert all(shape.startswith("s32") for shape in ids.shapes)
