"""Two levels compiled for H100s over hosts: what crosses each link is what docs/wire_bytes.py says of it."""

import math
import pathlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.scripts import load_script
from expertmesh.core import hlo
from expertmesh.ep import EpConfig, combine, dispatch, prepare

pytestmark = pytest.mark.aot

T, K, E, D = 64, 8, 64, 128  # tokens of a rank
GROUPS = {2: (None, None), 8: (8, 2)}  # of the router, where a token goes to two hosts
AXIS = ("host", "ep")


@pytest.fixture(scope="module")
def script():
    return load_script(pathlib.Path(__file__).resolve().parents[2] / "docs/wire_bytes.py")


def lowered(mesh, transport, groups=(None, None)):
    """Dispatch and combine, and the gradient, which is a combine and a dispatch."""
    num_groups, group_topk = groups
    config = EpConfig(
        num_experts=E, axis=AXIS, transport=transport, num_groups=num_groups, group_topk=group_topk
    )

    def round_trip(topk_idx, tokens):
        handle = prepare(topk_idx, config)
        return combine(handle, jnp.sin(dispatch(handle, tokens)))

    def both(topk_idx, tokens, g):
        y, pull = jax.vjp(partial(round_trip, topk_idx), tokens)
        return y, pull(g)[0]

    def struct(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    N = T * math.prod(mesh.shape.values())
    operands = struct((N, K), jnp.int32), *[struct((N, D), jnp.bfloat16)] * 2
    return jax.jit(both).lower(*operands)


def compiled(*arguments):
    return lowered(*arguments).compile().as_text()


@pytest.mark.parametrize("num_hosts", [2, 8])
@pytest.mark.parametrize("transport", ["all_to_all", "two_level:all_to_all"])
def test_bytes_of_each_link(h100_mesh, script, num_hosts, transport):
    mesh = h100_mesh({"host": num_hosts, "ep": script.RANKS}, AxisType.Explicit)
    text = compiled(mesh, transport, GROUPS[num_hosts])
    links = script.links(transport, num_hosts, most_hosts=2)
    # Forward and backward are a dispatch and a combine each.
    want = {link: 2 * sum(each) * T * D for link, each in links.items()}
    assert script.received_over_links(text) == want


def test_rounds(h100_mesh, script):
    """Each of an eighth of a block; their number is one scalar over hosts. Nothing else crosses but ids."""
    mesh = h100_mesh({"host": 8, "ep": script.RANKS}, AxisType.Explicit)
    found = hlo.collectives(compiled(mesh, "two_level:all_to_all", GROUPS[8]))
    rounds = [x for x in found if "while/body" in x.op_name]
    first = T * 2 // 8
    assert len(rounds) == 4 and {x.kind for x in rounds} == {"all-to-all"}
    assert {sum(map(hlo.num_bytes, x.shapes)) for x in rounds} == {8 * first // 8 * D * 2}
    over_hosts = {tuple(range(i, 64, 8)) for i in range(8)}
    assert all(set(x.groups) == over_hosts for x in rounds)
    others = [x for x in found if x.kind != "all-to-all"]
    assert {x.kind for x in others} == {"all-gather", "all-reduce"}
    assert all(shape.startswith("s32") for x in others for shape in x.shapes)
    assert all(x.shapes == ("s32[]",) for x in others if x.kind == "all-reduce")


def test_inside_a_host_by_nvlink(h100_mesh, script):
    """Only what goes between hosts is XLA's; XLA compiles a call of ours only where a GPU is."""
    mesh = h100_mesh({"host": 2, "ep": script.RANKS}, AxisType.Explicit)
    text = lowered(mesh, "two_level:nvlink").as_text()
    assert len(re.findall(r"stablehlo.custom_call @expertmesh_ep_nvlink_\w+", text)) == 4
    sent = re.findall(r"stablehlo.all_to_all.* -> tensor<(\w+)>", text)
    assert sent == [f"2x{T}x{D}xbf16"] * 4
