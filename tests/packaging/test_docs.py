"""The docs name what exists."""

import dataclasses
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from cases.scripts import load_script
from expertmesh.flax_moe import MoEConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/how-to-add").glob("*.md"),
    ROOT / "README.md",
]
REFERENCE = re.compile(r"\{py:\w+\}`~?(expertmesh[\w.]*)`")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or an attribute of one."""
    module, found = name, []
    while module:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            found.insert(0, attribute)
            continue
        for attribute in found:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_resolve(page):
    """But for what a diff adds."""
    text = re.sub(r"^```diff\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = set(REFERENCE.findall(text))
    assert not [name for name in sorted(names) if not resolves(name)]


def test_what_does_not_exist_does_not_resolve():
    assert resolves("expertmesh.core.route") and resolves("expertmesh.core")
    assert not resolves("expertmesh.core.no_such_name") and not resolves("expertmesh.nothing")


def test_the_migration_page_names_options_of_the_block():
    page = (ROOT / "docs/migrating-from-transformer-engine.md").read_text()
    table = page.partition("## Options of the block")[2].partition("\n## ")[0]
    right = " ".join(row.split("|")[2] for row in table.splitlines() if row.count("|") == 3)
    named = set(re.findall(r"`([a-z_]+)`", right)) - {"logical_axes"}  # of the modules
    fields = {field.name for field in dataclasses.fields(MoEConfig)}
    assert len(named) >= 8 and named <= fields, named - fields


def test_the_performance_page_is_made_from_the_results():
    command = [sys.executable, ROOT / "docs/performance.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/performance.py`"


def test_the_table_of_families_is_made_from_what_was_measured():
    command = [sys.executable, ROOT / "docs/families.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/families.py`"


def test_the_page_of_exchanges_at_scale_is_made_by_its_script():
    command = [sys.executable, ROOT / "docs/scale.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/scale.py`"


@pytest.fixture
def block():
    return load_script(ROOT / "docs/block.py")


SHAPE = "{} x 2048, F 768, {} experts, top {}"


def row_of(case, value, reference="", ratio=1.0):
    return {"case": case, "value": value, "reference": reference, "ratio": ratio} | {
        "unit": "ms",
        "gpus": 4,
    }


def growth_of(name, sizes, times):
    """Rows of growth with a size, as benchmarks.moe_block writes them."""
    case = f"bfloat16 forward and backward, {SHAPE.format(4096, 8, 2)}, growth with {name}"
    return [
        row_of(case, time) | {"growth": name, "size": size}
        for size, time in zip(sizes, times, strict=True)
    ]


def test_growth_is_compared_with_a_line(block):
    """Tokens of a GPU on a line, choices off it; 128 experts 10 % dearer than 8."""
    rows = growth_of("num_tokens", (4096, 1024, 2048, 3072), (9, 3, 5, 7))
    rows += growth_of("num_choices", (1, 2, 4), (1, 2, 2))
    by_tokens, by_choices, by_experts = block.growth(
        [*rows, *growth_of("num_experts", (128, 8), (11, 10))]
    )
    assert by_tokens.values == (1024, 2048, 3072, 4096) and by_tokens.times == (3, 5, 7, 9)
    assert by_tokens.off < 1e-12 and "tokens: off by 0% at most" in by_tokens.describe()
    assert by_choices.off == pytest.approx(3 / 11)  # 2 is 11 / 7 on the line 1 + 2 n / 7
    assert by_experts.off == pytest.approx(0.1)
    assert "128 experts against 8: +10%" in by_experts.describe()


def test_the_block_in_charts_and_a_table(block, tmp_path):
    """As benchmarks.moe_block writes its rows; in the table are those of both passes against the native block."""
    shape = SHAPE.format("8x1024", 8, 2)
    mesh = "{'fsdp': 2, 'ep': 2}"
    native = [
        row_of(f"bfloat16 {which}, {shape}, {mesh}", value, "native_moe, 20 ms", 20 / value)
        for which, value in (("forward", 2.0), ("forward and backward", 4.0))
    ]
    other = row_of(f"bfloat16 forward and backward, {shape}, zipf, {mesh}", 4.4, "ours, 4 ms", 0.9)
    traced = [
        row_of(f"bfloat16 {phase}, {which}, {shape}, {mesh}", us)
        for phase, which, us in (
            ("GEMM 1", "forward", 70),
            ("other", "forward", 5),
            ("GEMM 1", "backward", 140),
        )
    ]
    rows = [
        *native,
        other,
        *traced,
        *growth_of("num_tokens", (4096, 8192), (1, 2)),
    ]
    table = block.table(rows, lambda rows: f"origin of {len(rows)}")
    assert "mesh fsdp 2 x ep 2" in table and table.count("\n| 8x1024") == 1
    assert "| 8x1024 | 2048 | 768 | 20 | 4 | **5.0** |" in table and "origin of 1" in table
    with_published = block.table([native[1] | {"gb200": 10.5}], lambda rows: "origin")
    assert "| 8x1024 | 2048 | 768 | 20 | 4 | **5.0** | 10.5 |" in with_published
    bars = block.phases(rows)
    assert list(bars.values()) == [{"GEMM 1": 70, "other": 5}, {"GEMM 1": 140}]
    assert block.charts([]) == []
    for file, _, draw in block.charts(rows):
        draw(tmp_path / file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "moe_block.png",
        "moe_block_growth.png",
        "moe_block_phases.png",
    ]


@pytest.mark.parametrize("program", ["exchange.py", "house.py"])
def test_figures_are_made_from_the_results_and_the_sources(program):
    command = [sys.executable, ROOT / "docs" / program, "--check"]
    assert subprocess.run(command).returncode == 0, f"run `python docs/{program}`"


def test_a_walk_from_the_block_to_a_launch_is_of_twelve_files():
    page = (ROOT / "docs/architecture.md").read_text()
    walk = page.partition("to a kernel's launch it is twelve files:")[2].partition("\n\n")[0]
    names = [pathlib.Path(name).stem for name in re.findall(r"`([\w/]+)\.py`", walk)]
    assert len(names) == 12 and names[0] == "moe" and names[-1] == "launcher"
    files = {path.stem for path in (ROOT / "packages").glob("*/src/**/*.py")}
    assert set(names) <= files
