"""The docs name what exists."""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import zlib

import pytest

from cases.scripts import load_script
from expertmesh.flax_moe import MoEConfig
from multiprocess_runner import COMPILE_QUICKLY

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


def test_the_tables_of_gpus_are_made_from_what_is_committed():
    command = [sys.executable, ROOT / "docs/gpus.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/gpus.py`"


@pytest.fixture
def gpus():
    return load_script(ROOT / "docs/gpus.py")


H100 = "1 x NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "gpu, recipe, said",
    [
        ("V100, T4", "fp8_block", "reference"),
        ("A100", "bfloat16", "run elsewhere"),
        ("A100", "fp8_block", "run elsewhere, emulated"),  # its GEMMs are of 16 bits
        ("A10, RTX 30", "bfloat16", "compiled"),
        ("L40, RTX 40", "bfloat16", "compiled"),  # PTX of 8.9 has 8 bits alone here
        ("L40, RTX 40", "fp8_block", "run elsewhere"),
        ("H100", "bfloat16", "run"),
        ("H100", "mxfp8", "run, emulated"),
        ("H200", "bfloat16", "measured"),
        ("H200", "mxfp8", "run elsewhere, emulated"),
        ("B200", "mxfp8", "not compiled"),
        ("B200", "nvfp4", "not compiled"),
        ("H200", "nvfp4", "run elsewhere, emulated"),
    ],
)
def test_what_is_said_of_a_gpu(gpus, monkeypatch, gpu, recipe, said):
    """Of other facts than the committed ones."""
    facts = {
        "compiled": {False: (80, 86, 89, 90, 100), True: (89, 90)},
        "run_as_ptx": {False: (80,), True: (89,)},
        "tested": (H100,),
        "measured": {("NVIDIA H200", "bfloat16"), ("NVIDIA H200", "router")},
    }
    for name, value in facts.items():
        monkeypatch.setattr(gpus, name, lambda value=value: value)
    (row,) = (each for each in gpus.GPUS if each.name == gpu)
    assert gpus.cell(row, recipe) == said


def test_without_a_run_nothing_ran_elsewhere(gpus, monkeypatch):
    monkeypatch.setattr(gpus, "tested", lambda: ())
    monkeypatch.setattr(gpus, "measured", frozenset)
    found = {gpus.cell(gpu, recipe) for gpu in gpus.GPUS for recipe in gpus.WHOLE}
    assert found == {"compiled", "compiled, emulated", "reference"}


def test_the_page_of_exchanges_at_scale_is_made_by_its_script():
    command = [sys.executable, ROOT / "docs/scale.py", "--check"]
    # Its loops over 1024 ranks run for longer than they are compiled.
    flags = COMPILE_QUICKLY.replace("optimization_level=0", "optimization_level=1")
    optimized = os.environ | {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "1"}
    assert subprocess.run(command, env=optimized).returncode == 0, "run `python docs/scale.py`"


@pytest.fixture
def block():
    return load_script(ROOT / "docs/block.py")


SHAPE = "{} x 2048, F 768, {} experts, top {}"


def row_of(case, value, reference="", ratio=1.0):
    return {"case": case, "value": value, "reference": reference, "ratio": ratio} | {
        "unit": "ms",
        "gpus": 4,
        "commit": "abc",
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


@pytest.fixture
def figures(block, monkeypatch):
    monkeypatch.setitem(sys.modules, "block", block)
    return load_script(ROOT / "docs/figures.py")


ONE = {"unit": "TFLOP/s", "gpus": 1}


def rows_of_results():
    """As the benchmarks write them, by file."""
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
    weak = row_of(f"bfloat16 forward and backward, weak scaling, 4 GPUs, {shape}", 9, "", 0.8)
    one = SHAPE.format(4096, 128, 8) + ", 1 device"
    published = "SonicMoE on H100, published, 200 TFLOP/s"
    single = [
        row_of(f"bfloat16 forward, {one}", 100.0, published, 0.5) | ONE,
        row_of(f"bfloat16 backward, {one}", 400.0, published, 2.0) | ONE,
        row_of(f"bfloat16 backward in bursts, {one}", 800.0, published, 4.0) | ONE,
        row_of(f"fp8_block forward and backward, {one}", 3.0, "our bfloat16 block, 6 ms", 2.0),
        row_of(f"fp8_current forward and backward, {one}", 3.0, "our bfloat16 block, 6 ms", 2.0)
        | {"commit": "older"},
        row_of(f"fp8_block forward and backward, {one}", 3.0, "Transformer Engine 2, 9 ms", 3.0),
    ]
    gemm = "fprop mixtral w13 16384x4096x28672, 8 groups"
    dense = [
        row_of(f"bfloat16 {gemm}", 810, "dense XLA GEMM, 821 TFLOP/s") | ONE,
        row_of("bfloat16 fprop, mean of 6 shapes", 0.97, "dense XLA GEMM") | {"unit": "times"},
    ]
    eight = [row_of(f"fp8_current {gemm}", 1551, "dense 8-bit XLA GEMM, 1589 TFLOP/s") | ONE]
    sent = "4 ranks, 4096 tokens each x 7168, 8 of 256 experts"
    exchange = [
        row_of(f"nvlink, dispatch bfloat16, {sent}", 507),
        row_of(f"nvlink:48, dispatch bfloat16, {sent}", 518),
        row_of(f"nvlink, dispatch float8 with scales, {sent}", 285),
        row_of(f"nvlink, combine bfloat16, sums travel in bfloat16, {sent}", 506),
        row_of(f"nvlink, combine bfloat16, sums travel in float32, {sent}", 976),
        row_of(f"nvlink, dispatch bfloat16, {sent}, time against 2 ranks", 2.2),
    ]
    grown = growth_of("num_tokens", (4096, 8192), (1, 2))
    return {
        "moe_block": [*native, other, *traced, weak, *grown],
        "single_gpu_blocks": single,
        "grouped_gemm": dense,
        "quantized_by_tensor": eight,
        "dispatch": exchange,
    }


def test_figures_show_what_the_rows_say(block, figures):
    results, name = rows_of_results(), "4096 tokens, D 2048, F 768, E 128, K 8"
    assert figures.beside_plain(results) == {
        "8x1024 tokens, D 2048, F 768, E 8, K 2": {"bfloat16": 5.0}
    }
    assert figures.beside_engine(results) == {name: {"fp8_block": 3.0}}
    # SonicMoE at 200 both ways: 3 units of work in 3 / 200; ours 1 / 100 + 2 / 400, hot. No recipe of another commit.
    sonic = figures.beside_sonic(results)[name]
    assert sonic == pytest.approx({"bfloat16": 1.0, "fp8_block": 2.0})
    assert figures.gemms(results)["fprop"] == {
        "16384 x 4096 x 28672, 8 groups": {
            "bfloat16": {"ours": 810, "dense": 821.0},
            "fp8_current": {"ours": 1551, "dense": 1589.0},
        }
    }
    few = results["dispatch"][0] | {"gpus": 2, "value": 231}
    assert figures.exchanges({"dispatch": [*results["dispatch"], few]})[1] == {
        ("dispatch", "bfloat16"): 507,
        ("dispatch", "float8"): 285,
        ("combine", "bfloat16"): 506,
    }
    assert figures.weak_scaling(results) == {1: 1.0, 4: 0.8}
    bars = block.phases(results["moe_block"])
    assert list(bars.values()) == [{"GEMM 1": 70, "other": 5}, {"GEMM 1": 140}]


def test_five_figures_are_drawn_and_none_without_rows(figures, tmp_path):
    assert list(figures.figures({})) == []
    for figure in figures.figures(rows_of_results()):
        assert figure.question.endswith("?") and figure.rows
        figure.draw(tmp_path / figure.file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"performance_{name}.png" for name in ("beside", "fp8", "phases", "scale", "shapes")
    ]


def test_the_table_of_rows_has_each_row():
    page = (ROOT / "docs/performance-rows.md").read_text()
    files = (ROOT / "benchmarks/results").glob("*.json")
    assert page.count("<tr><td>") == sum(len(json.loads(path.read_text())) for path in files)


@pytest.mark.parametrize("program", ["exchange.py", "house.py", "pictures.py"])
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


DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|auto\w+):: ([\w.]+)$|^   :members: (.+)$", re.MULTILINE
)


def documented(page):
    """The dotted name of each object that a page of the API lists."""
    module = ""
    for kind, name, members in DIRECTIVE.findall(page.read_text()):
        if kind == "currentmodule":
            module = name
        elif kind == "automodule":
            module = name
            yield name
        else:
            yield from (f"{module}.{each}" for each in (members or name).split(", "))


@pytest.mark.parametrize("package", ["core", "ep", "flax_moe"])
def test_every_public_name_is_on_one_page_of_the_api(package):
    """`remat`'s names are public in the package too."""
    pages = (ROOT / "docs/api").rglob("*.md")
    shown = [name.replace(".remat.", ".") for page in pages for name in documented(page)]
    module = f"expertmesh.{package}"
    public = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    assert {name: shown.count(name) for name in public if shown.count(name) != 1} == {}


@pytest.fixture
def docstrings():
    return load_script(ROOT / "docs/docstrings.py")


def test_docstrings_become_restructured_text(docstrings):
    """By docutils' own reading: what is code, what is a list, what is text."""
    source = """Rows [*N] times `w`, where a|b and x_ stand.

Formula:

    out[p] = sum_k w[k] * y[p]

* one `route` of `x_spec=`
* two

| a | b |
|---|---|
| 1 | `c` |

Args:
  x, y: float[P, *N], see `route`.
  r: r. Not a list.

Returns:
  MoEOutput: its y [*N],
  and more.

Last."""
    lines = docstrings.as_rst(source.splitlines(), {"route": "expertmesh.core.route"})
    text = "\n".join(lines)
    assert r"Rows [\*N] times ``w``, where a\|b and x\_ stand." in text
    assert ".. code-block:: none\n\n    out[p] = sum_k w[k] * y[p]\n" in text
    assert "\n\n* one :py:obj:`route <expertmesh.core.route>` of ``x_spec=``\n* two" in text
    table = ".. list-table::\n   :header-rows: 1\n\n   * - a\n     - b\n   * - 1\n     - ``c``\n"
    assert table in text
    assert "Args:\n  x, y: float[P, \\*N], see :py:obj:`route <expertmesh.core.route>`." in text
    assert "\n  r: r\\. Not a list." in text
    assert "\n:returns: MoEOutput: its y [\\*N],\n  and more." in text
    assert text.rstrip().endswith("\n\nLast.")


def test_what_follows_code_at_once_is_parted_from_it(docstrings):
    assert docstrings.inline("`a`s and ``b``.", {}) == "``a``\\ s and ``b``."


def test_a_function_shows_the_formulas_of_its_module(docstrings):
    module = "Summary.\n\n    y = x w\n\nDimension key: x."
    lines = ["Multiplies, by the module's formulas.", "", "Args:", "  x: x."]
    found = docstrings.with_formulas(lines, module)
    assert found == [lines[0], "", "    y = x w", "", "Dimension key: x.", *lines[1:]]
    assert docstrings.with_formulas(["Multiplies."], module) == ["Multiplies."]
    assert docstrings.with_formulas(lines, None) == lines


def test_a_page_gets_what_it_lacks_once():
    accessible = load_script(ROOT / "docs/accessible.py").accessible
    page = '<p role="heading">x</p><pre>y</pre><div class="table-wrapper wide"><dl>\n<dd>a</dd></dl><dl><dt>'
    page += '<p><img src="a.png"></p><span class="pre">core.a_b_</span>'
    found = accessible(page)
    assert found == (
        '<p role="heading" aria-level="2">x</p><pre tabindex="0">y</pre>'
        '<div class="table-wrapper wide" tabindex="0" role="region" aria-label="Table">'
        '<dl role="none">\n<dd>a</dd></dl><dl><dt><p><a href="a.png"><img src="a.png"></a></p>'
        '<span class="pre">core.<wbr>a_<wbr>b_</span>'
    )
    assert accessible(found) == found


# A page that has types of other libraries.
TYPES = """# Types

```{eval-rst}
.. currentmodule:: expertmesh.core

.. autofunction:: grouped_gemm

.. autofunction:: gather_weight

.. currentmodule:: expertmesh.flax_moe.linen

.. autoclass:: MoEBlock
```
"""


INVENTORY = """# Sphinx inventory version 2
# Project: x
# Version: 0
# The remainder of this file is compressed using zlib.
"""


def test_types_of_other_libraries_are_links(tmp_path):
    """With DOCS_ONLINE=1, by inventories of the names that those libraries document."""
    documented_there = {
        "jax": ["jax.Array", "jax.sharding.PartitionSpec", "jax.typing.DTypeLike"],
        "linen": ["flax.linen.Module"],
    }
    mapping = {}
    for library, names in documented_there.items():
        lines = "".join(f"{name} py:class 1 api.html#$ -\n" for name in names)
        file = tmp_path / f"{library}.inv"
        file.write_bytes(INVENTORY.encode() + zlib.compress(lines.encode()))
        mapping[library] = (f"https://{library}", str(file))
    pages, built = tmp_path / "pages", tmp_path / "built"
    pages.mkdir()
    (pages / "index.md").write_text(TYPES)
    build = (
        "import sys; from sphinx.application import Sphinx; pages, settings, built = sys.argv[1:]; "
        f"override = dict(intersphinx_mapping={mapping!r}); "
        "Sphinx(pages, settings, built, built, 'html', override, status=None).build()"
    )
    environment = os.environ | {"DOCS_ONLINE": "1"}
    command = [sys.executable, "-c", build, pages, ROOT / "docs", built]
    subprocess.run(command, check=True, env=environment)
    text = (built / "index.html").read_text()
    links = set(re.findall(r'class="reference external" href="(https://[^"]+)"', text))
    assert links == {
        f"https://{library}/api.html#{name}"
        for library, names in documented_there.items()
        for name in names
    }


@pytest.fixture
def site(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">x</h1><a href="sub/b.html#there">b</a><a href="#top"></a><img src="p.png">'
        '<a href="https://elsewhere/x#y"></a>'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.html").write_text('<p id="there"><a href="../a.html#gone"></a>')
    return tmp_path


def test_broken_links_of_a_site_are_found(site):
    checker = load_script(ROOT / "docs/check_site.py")
    faults = list(checker.broken_links(site))
    assert faults == ["a.html: no file p.png", "sub/b.html: no anchor ../a.html#gone"]
    (site / "p.png").write_text("")
    (site / "a.html").write_text('<a id="gone" href="sub/b.html">')
    assert list(checker.broken_links(site)) == []


def test_a_search_finds_pages_with_all_words():
    checker = load_script(ROOT / "docs/check_site.py")
    index = {"docnames": ["a", "b", "c"], "terms": {"aux": [0, 1], "loss": 1}, "titleterms": {}}
    assert (
        checker.found_by("aux losses", index) == {"b"} and checker.found_by("fp8", index) == set()
    )
    index["titleterms"] = {"fp8": [2]}
    assert checker.found_by("FP8", index) == {"c"}


def test_the_walks_are_those_that_a_browser_does():
    """The words that are searched for, the page that is clicked, and what the browser waits for there."""
    program, page = (ROOT / f"docs/{name}" for name in ("check_pages.mjs", "dev/walks.md"))
    words = re.findall(r'words: "([^"]+)"', program.read_text())
    assert words == re.findall(r"search for `([^`]+)`", page.read_text()) and len(words) == 3
    assert "python examples/maxtext_mixtral.py" in (ROOT / "docs/maxtext.md").read_text()
    assert "python examples/fp8_for_your_shape.py" in (ROOT / "docs/performance.md").read_text()
