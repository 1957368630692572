"""Writes the tables of bytes that cross devices, of docs/numerics.md and two pages of exchanges.

    python docs/wire_bytes.py            write them
    python docs/wire_bytes.py --print    only print them

The first is of a step of the block, under each recipe. Nothing runs: it is compiled for a mesh of CPU devices, and its
collectives are read as the partitioner leaves them. XLA:CPU would widen 8-bit collectives afterwards.

The second is of an exchange over hosts, by formula; tests/aot/test_two_level.py compares it with programs that are
compiled for H100s.

The third is of an exchange without NVLink, by `exchange_bytes`, with times that are bytes over a bus' nominal rate.
"""

import argparse
import math
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from marks import filled

from expertmesh.core import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MeshResource,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    global_shard_guard,
    hlo,
)
from expertmesh.core.testing import compile_partitioned
from expertmesh.flax_moe import (
    MoEConfig,
    exchange_bytes,
    init_quant_state,
    moe,
    param_shapes,
    param_specs,
)

PAGE = pathlib.Path(__file__).with_name("numerics.md")
PAGE_OF_LINKS = PAGE.with_name("expert-parallelism.md")
PAGE_OF_BUSES = PAGE.with_name("without-nvlink.md")
BEGIN = "<!-- docs/wire_bytes.py -->"
AXES = {"fsdp": 2, "ep": 4}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
TOKENS_PER_DEVICE, D, F, E, K = 4096, 2048, 768, 64, 6
# name -> options of MoEConfig
ROWS = {
    "bfloat16": {},
    "DelayedScaling": dict(recipe=DelayedScaling(amax_history_len=16)),
    "Float8CurrentScaling": dict(recipe=Float8CurrentScaling()),
    "Float8BlockScaling": dict(recipe=Float8BlockScaling()),
    "Float8BlockScaling, quantize_backward_combine": dict(
        recipe=Float8BlockScaling(), quantize_backward_combine=True
    ),
    "MXFP8BlockScaling": dict(recipe=MXFP8BlockScaling()),
    "NVFP4BlockScaling": dict(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True)),
}
LEGS = (
    "weight gathers",
    "forward dispatch",
    "forward combine",
    "backward dispatch",
    "backward combine",
    "weight gradients",
)
# (hosts, hosts that a token reaches at most), of 8 ranks each; K is 8.
HOSTS = ((2, 2), (4, 4), (4, 2), (8, 8), (8, 2))
RANKS = 8
# Of the table without NVLink: ranks of a group, options of MoEConfig, tokens of a GPU, and a bus' bytes a second.
GROUPS_ON_A_BUS = (2, 4, 8)
OF_RECIPES = {
    "bfloat16": {},
    "fp8_current": dict(recipe="fp8_current"),
    "fp8_block": dict(recipe="fp8_block"),
    "fp8_block, quantize_backward_combine": dict(
        recipe="fp8_block", quantize_backward_combine=True
    ),
    "mxfp8, quantize_backward_combine": dict(recipe="mxfp8", quantize_backward_combine=True),
}
TOKENS_ON_A_BUS = 8192
BUSES = {"PCIe 4.0": 31.5e9, "PCIe 5.0": 63e9}
LINKS = ("between hosts", "inside a host")
_OVER_FSDP = {"all-gather": "weight gathers", "reduce-scatter": "weight gradients"}


def compiled(options: dict, kind: AxisType = AxisType.Explicit) -> str:
    """The partitioned HLO of the block and all its gradients; over Auto axes under a MeshResource."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))
    ep_axis = "ep" if kind == AxisType.Explicit else None
    sizes = dict(num_experts=E, top_k=K, expert_dim=F, transport="all_to_all", ep_axis=ep_axis)
    config = MoEConfig(**sizes, **options)

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    specs = param_specs(config, RESOURCE)
    shapes = param_shapes(D, config)
    params = {name: struct(shape, jnp.float32, specs[name]) for name, shape in shapes.items()}
    tokens = math.prod(AXES.values()) * TOKENS_PER_DEVICE
    x = struct((tokens, D), jnp.bfloat16, PartitionSpec(tuple(AXES)))
    state = jax.tree.map(
        lambda a: struct(a.shape, a.dtype, PartitionSpec()),
        jax.eval_shape(lambda: init_quant_state(config)),
    )

    def step(params, x, dy, state):
        def forward(params, x):
            out = moe(params, x, config, quant_state=state)
            return out.y, out.quant_state

        y, pull, state = jax.vjp(forward, params, x, has_aux=True)
        return y, pull(dy), state

    with global_shard_guard(None if kind == AxisType.Explicit else RESOURCE):
        return compile_partitioned(jax.jit(step).lower(params, x, x, state))[1]


def moved(text: str) -> dict[str, int]:
    """Bytes that one device receives in each of LEGS."""
    legs = dict.fromkeys(LEGS, 0)
    exchanges = []
    for found in hlo.collectives(text):
        axes, size = hlo.axes_of(found.groups, AXES), received(found)
        if found.kind == "all-to-all":
            exchanges.append(size)
        elif axes == ("fsdp",) and found.kind in _OVER_FSDP:
            legs[_OVER_FSDP[found.kind]] += size
    assert len(exchanges) == 4, exchanges
    return legs | dict(zip(LEGS[1:5], exchanges, strict=True))


def received(found: hlo.Collective) -> int:
    """Bytes that one device receives from the others in the group."""
    whole, n = sum(map(hlo.num_bytes, found.shapes)), found.group_size
    if found.kind == "reduce-scatter":
        return whole * (n - 1)
    return whole * (n - 1) // n


def line(name: str, legs: dict[str, int], plain: dict[str, int]) -> str:
    """A row: MiB of each leg, and in how many times the bytes of bfloat16 where they differ."""
    cells = []
    for leg in LEGS:
        ratio = legs[leg] / plain[leg]
        cells.append(f"{legs[leg] / 2**20:.1f}" + (f" ({ratio:.3f})" if ratio != 1 else ""))
    return f"| {name} | {' | '.join(cells)} |"


def links(transport: str, num_hosts: int, most_hosts: int) -> dict[str, tuple[float, float]]:
    """Bytes that a rank receives in a dispatch and in a combine, for each of its tokens and features: of each of LINKS.

    Tokens are of bfloat16, buffers dropless; what ranks add up travels in float32, what hosts add up in bfloat16.
    """
    if transport == "all_to_all":  # a block for each rank
        rows, back = ((num_hosts - 1) * RANKS, RANKS - 1), (4, 4)
    else:  # a block for each host, and inside all that came for each rank
        assert transport == "two_level:all_to_all"
        rows = ((num_hosts - 1) * most_hosts / num_hosts, (RANKS - 1) * num_hosts)
        back = (2, 4)
    return {link: (2 * n, b * n) for link, n, b in zip(LINKS, rows, back, strict=True)}


def received_over_links(text: str) -> dict[str, int]:
    """Bytes that one device receives over each of LINKS by a program's all-to-alls, but for those of rounds."""
    over = dict.fromkeys(LINKS, 0)
    for found in hlo.collectives(text):
        if found.kind == "all-to-all" and "while/body" not in found.op_name:
            group, size = found.groups[0], sum(map(hlo.num_bytes, found.shapes))
            near = sum(rank // RANKS == group[0] // RANKS for rank in group)
            over["between hosts"] += size * (len(group) - near) // len(group)
            over["inside a host"] += size * (near - 1) // len(group)
    return over


def table_of_links() -> str:
    lines = [
        "| hosts | a token goes to | transport | between hosts | inside a host | between hosts, against `all_to_all` |",
        "|---|---|---|---|---|---|",
    ]
    for num_hosts, most_hosts in HOSTS:
        flat = sum(links("all_to_all", num_hosts, most_hosts)["between hosts"])
        for transport in ("all_to_all", "two_level:all_to_all"):
            each = [sum(of) for of in links(transport, num_hosts, most_hosts).values()]
            cells = [f"{value:g} D" for value in each]
            reached = f"{most_hosts} hosts" if most_hosts < num_hosts else "all"
            lines.append(
                f"| {num_hosts} | {reached} | `{transport}` | {' | '.join(cells)} | {each[0] / flat:.3f} |"
            )
    return "\n".join(lines)


def over_a_bus(options: dict, ranks: int) -> dict[str, int]:
    """Bytes of each leg that a GPU receives in one layer, as many as it sends."""
    config = MoEConfig(num_experts=E, top_k=K, expert_dim=F, **options)
    return exchange_bytes(config, model_dim=D, num_tokens=TOKENS_ON_A_BUS, ep_size=ranks)


def table_of_buses() -> str:
    head = ["ranks", "recipe", *(leg.replace("_", " ") for leg in over_a_bus({}, 2)), "all"]
    head += [f"{bus}, ms" for bus in BUSES]
    rows = [head, ["---"] * len(head)]
    for ranks in GROUPS_ON_A_BUS:
        for name, options in OF_RECIPES.items():
            sizes = list(over_a_bus(options, ranks).values())
            each = [f"{size / TOKENS_ON_A_BUS / D:.4g} D" for size in (*sizes, sum(sizes))]
            times = [f"{1e3 * sum(sizes) / rate:.1f}" for rate in BUSES.values()]
            rows.append([str(ranks), name, *each, *times])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table() -> str:
    measured = {name: moved(compiled(options)) for name, options in ROWS.items()}
    head = [f"| | {' | '.join(LEGS)} |", f"|---|{'---|' * len(LEGS)}"]
    plain = measured["bfloat16"]
    return "\n".join(head + [line(name, legs, plain) for name, legs in measured.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="leave the page alone")
    options = parser.parse_args()
    made = {PAGE_OF_LINKS: table_of_links, PAGE_OF_BUSES: table_of_buses, PAGE: table}
    for page, make in made.items():
        new = make()
        if options.print:
            print(new)
        else:
            page.write_text(filled(page.read_text(), BEGIN, new))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", math.prod(AXES.values()))
    main()
