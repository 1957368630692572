"""What crosses devices in a step of the quantized block, and the tables that docs/wire_bytes.py makes of it."""

import functools
import pathlib
import re

import pytest
from jax.sharding import AxisType

from cases.scripts import load_script
from expertmesh.core import hlo

# The table is of one version of JAX.
pytestmark = pytest.mark.default_jax

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@functools.cache
def script():
    return load_script(DOCS / "wire_bytes.py")


@functools.cache
def _program(name, kind):
    return script().compiled(script().ROWS[name], kind)


def program(name, kind=AxisType.Explicit):
    return _program(name, kind)  # XLA dumps nothing of what JAX has compiled before


def table() -> dict[str, str]:
    """Name -> row of the page."""
    page = (DOCS / "numerics.md").read_text()
    rows = (
        page.partition(script().BEGIN)[2]
        .partition(load_script(DOCS / "marks.py").END)[0]
        .split("\n")
    )
    return {row.split("|")[1].strip(): row for row in rows if row.startswith("|")}


def check(name):
    plain, legs = (script().moved(program(n)) for n in ("bfloat16", name))
    assert table()[name] == script().line(name, legs, plain)


def test_the_table_of_links_is_current():
    page = (DOCS / "expert-parallelism.md").read_text()
    assert f"\n{script().table_of_links()}\n" in page


def test_the_table_of_buses_is_current():
    page = (DOCS / "without-nvlink.md").read_text()
    assert f"\n{script().table_of_buses()}\n" in page


def test_over_a_bus_tokens_are_of_8_bits_under_a_recipe_of_blocks():
    """Three other ranks: tokens and their gradients of a byte and a scale for 128, sums of four, gradients of two."""
    fewest, plain = (
        script().over_a_bus(script().OF_RECIPES[name], 4)
        for name in ("fp8_block, quantize_backward_combine", "bfloat16")
    )
    each = 3 * script().TOKENS_ON_A_BUS * script().D
    scaled = 1 + 4 / 128
    assert list(fewest.values()) == [each * n for n in (scaled, 4, 2, scaled)]
    assert list(plain.values()) == [each * n for n in (2, 4, 2, 4)]


def test_over_hosts_a_token_crosses_once_for_each_host():
    """Four hosts, two of them for a token: less than 0.4 of what one level moves, and the hosts of a token times D."""
    two, one = (
        script().links(transport, 4, 2)["between hosts"]
        for transport in ("two_level:all_to_all", "all_to_all")
    )
    assert sum(two) <= 0.4 * sum(one)
    others = 2 * 3 / 4  # of a token's two hosts, if its own is one as often as any
    assert two == (2 * others, 2 * others)


@pytest.mark.full
def test_the_table_is_current():
    assert set(script().ROWS) <= set(table())
    check("bfloat16")
    check("Float8BlockScaling")


@pytest.mark.full
@pytest.mark.parametrize("name", script().ROWS)
def test_every_row_is_current(name):
    check(name)


def test_no_more_than_0_55_of_the_bytes():
    """Weights under every recipe; dispatched tokens where their scales are their own."""
    head = table()[""].split("|")
    weights, tokens = head.index(" weight gathers "), head.index(" forward dispatch ")
    for name in set(script().ROWS) - {"bfloat16"}:
        ratios = [re.search(r"\((.*)\)", cell) for cell in table()[name].split("|")]
        assert float(ratios[weights][1]) <= 0.55, name
        if "Block" in name and "4" not in name:
            assert float(ratios[tokens][1]) <= 0.55, name


@pytest.mark.parametrize(
    "kind",
    [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.full)],
    ids=lambda kind: kind.name,
)
@pytest.mark.full
def test_what_crosses_devices(kind):
    """Weights: data of one byte and float32 scales, never wider, each way. Their gradients: summed in float32."""
    s = script()
    e, mesh = s.E // s.AXES["ep"], s.AXES
    found = [
        (c.kind, hlo.axes_of(c.groups, mesh), shape)
        for c in hlo.collectives(program("Float8BlockScaling", kind))
        for shape in c.shapes
    ]
    over_fsdp = [(kind, shape) for kind, axes, shape in found if axes == ("fsdp",)]
    gathered = [
        f"f8e4m3fn[{e},{s.D},2,{s.F}]",
        f"f32[{e},{s.D // 128},2,{s.F // 128}]",
        f"f8e4m3fn[{e},{s.F},{s.D}]",
        f"f32[{e},{s.F // 128},{s.D // 128}]",
    ]
    scattered = [f"f32[{e},{s.D // 2},2,{s.F}]", f"f32[{e},{s.F},{s.D // 2}]"]
    want = [("all-gather", shape) for shape in 2 * gathered]
    want += [("reduce-scatter", shape) for shape in scattered]
    assert sorted(over_fsdp) == sorted(want)
    payload = s.D + 4 * s.D // 128
    blocks = s.AXES["ep"] * s.TOKENS_PER_DEVICE
    exchanged = [shape for kind, axes, shape in found if kind == "all-to-all"]
    assert exchanged == [
        f"u8[{blocks},{payload}]",
        f"f32[{blocks},{s.D}]",
        f"bf16[{blocks},{s.D}]",
        f"bf16[{blocks},{s.D}]",
    ]
