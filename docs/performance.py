"""Writes the figures and tables of performance.md, of other pages here and of README.md from benchmarks/results.

python docs/performance.py            write them
python docs/performance.py --check    exit status 1 if a page is not what would be written
"""

import argparse
import collections
import html
import json
import pathlib
import re
import statistics
import sys

import block
import figures
from marks import filled

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN = "<!-- docs/performance.py -->"
README_CHART = "performance_beside.png"
MEAN = re.compile(r"(\w+) (\w+), mean of (\d+) shapes$")
FEW = re.compile(r"(\w+) forward, (\d+ x \d+, F \d+, .*), (\d+) of them chosen")
BOTH_WAYS = re.compile(r"nvlink, both ways, (\d+) ranks, (\d+) tokens each x (\d+)$")


def read(folder: pathlib.Path) -> figures.Results:
    """The rows of each file, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def origin(rows: list[dict]) -> str:
    """Where the rows were measured; one sentence for each different answer."""
    found = {
        f"{row['gpus']} x {row['device']}, commit {row['commit']}, {row['date']}, "
        + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        for row in rows
    }
    return "; ".join(sorted(found))


def line(cells: list) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def lines(head: list[str], rows: list[list]) -> str:
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def of_gpus(results: figures.Results) -> str:
    """How many rows there are of which GPUs."""
    found = collections.defaultdict(list)
    for row in (row for each in results.values() for row in each if row["gpus"]):
        found[row["device"], row["gpus"]].append(row)
    head = ["GPUs", "rows", "commits", "newest"]
    rows = [
        [
            f"{count} x {device}",
            len(each),
            ", ".join(sorted({row["commit"] for row in each})),
            max(row["date"] for row in each),
        ]
        for (device, count), each in sorted(found.items())
    ]
    return lines(head, rows)


def times_of(row: dict) -> list[str]:
    """The reference's and ours, ms."""
    return [f"{row['value'] * row['ratio']:.3g}", f"{row['value']:.3g}"]


def of_plain_jax(results: figures.Results) -> str:
    """Times at the sizes of the tutorial of Transformer Engine's block, which publishes its own on other GPUs."""
    head = ["tokens", "width", "expert width", "plain JAX, ms", "here, ms", "times as fast"]
    head.append("Transformer Engine as published, on four GB200s, ms")
    rows = []
    for row in block.both_passes(results.get("moe_block", [])):
        shape, times = block.shape_of(row), [*times_of(row), f"**{row['ratio']:.1f}**"]
        published = f"{row['gb200']:.3g}" if "gb200" in row else "-"
        rows.append([shape.tokens, shape.width, shape.expert_width, *times, published])
    return lines(head, rows)


def spread(of: str, found: dict[str, list[float]]) -> str:
    """A table of ratios by name."""
    head = [of, "mean", "least", "most", "shapes"]
    rows = [
        [name, *(f"{f(ratios):.2f}" for f in (statistics.geometric_mean, min, max)), len(ratios)]
        for name, ratios in found.items()
    ]
    return lines(head, rows)


def of_engines(results: figures.Results) -> str:
    """The times of Transformer Engine's block with its own exchange, by turns with ours."""
    rows = results.get("moe_block", [])
    found = [row for row in rows if row["reference"].startswith("Transformer Engine")]
    head = ["T", "D", "F", "fsdp x ep", "Transformer Engine, ms", "here, ms", "times as fast"]
    cells = []
    for row in found:
        shape, times = block.shape_of(row), [*times_of(row), f"{row['ratio']:.2f}"]
        mesh = " x ".join(re.findall(r"'(?:fsdp|ep)': (\d+)", row["case"]))
        cells.append([shape.tokens, shape.width, shape.expert_width, mesh, *times])
    return f"{lines(head, cells)}\n\nFrom: {origin(found)}."


def of_sonic(results: figures.Results) -> str:
    """The rates beside SonicMoE's, without pauses and in bursts."""
    found = collections.defaultdict(list)
    for row in results.get("single_gpu_blocks", []):
        if row["reference"].startswith("SonicMoE") and row["metric"] == "rate":
            found[row["case"].partition(",")[0]].append(row["ratio"])
    return spread("over SonicMoE's rate, as published", found)


def of_recipes(results: figures.Results) -> str:
    """The speeds of recipes over that of bfloat16, of narrow experts and of all others."""
    found = collections.defaultdict(list)
    for row in results.get("single_gpu_blocks", []):
        if row["reference"].startswith("our bfloat16 block"):
            width = block.shape_of(row).expert_width
            narrow = f"F {width}" if width < 512 else "F 512 and more"
            name = f"{figures.recipe_of(row)}, {narrow}, {row['device'].split()[1]}"
            found[name].append(row["ratio"])
    return spread("times as fast as in bfloat16", dict(sorted(found.items())))


def beside(results: figures.Results) -> str:
    return "\n\n".join(table(results) for table in (of_plain_jax, of_sonic, of_gpus))


def of_few_tokens(results: figures.Results) -> str:
    """The forward beside a copy of the chosen weights' bytes."""
    rows = [
        [*match.groups(), f"{row['value']:.0f}", f"{row['value'] * row['ratio']:.0f}"]
        for row in results.get("few_tokens", [])
        if (match := FEW.match(row["case"]))
    ]
    return lines(["dtype", "tokens and experts", "chosen", "forward, us", "copy, us"], rows)


def of_means(results: figures.Results) -> str:
    """The means of the grouped GEMMs."""
    rows = []
    for file in ("grouped_gemm", "quantized_by_tensor", "quantized_grouped_gemm"):
        for row in results.get(file, []):
            if match := MEAN.match(row["case"]):
                recipe, which, shapes = match.groups()
                name = figures.PASSES.get(which, which)
                rows.append([recipe, name, f"{row['ratio']:.2f}", row["reference"], shapes])
    return lines(["format", "GEMM", "relative speed", "relative to", "shapes"], rows)


def of_shapes(results: figures.Results) -> str:
    return "\n\n".join(table(results) for table in (of_means, of_few_tokens))


def of_exchange(results: figures.Results) -> str:
    """How an exchange of tokens there and back grows."""
    found: dict[tuple, list] = {}
    for row in results.get("dispatch", []):
        if match := BOTH_WAYS.match(row["case"]):
            name = row["reference"].partition(",")[0]
            cells = found.setdefault(match.groups(), [row["value"], {}])
            cells[1][name] = row["value"] * row["ratio"]
    head = ["tokens of a GPU", "GPUs", "`nvlink`, us", "`ring`, us", "`all_to_all`, us"]
    rows = [
        [
            f"{tokens} x {width}",
            ranks,
            f"{ours:.4g}",
            *(f"{others.get(n, 0):.4g}" for n in ("ring", "all_to_all")),
        ]
        for (ranks, tokens, width), (ours, others) in found.items()
    ]
    return lines(head, rows)


def of_phases(results: figures.Results) -> str:
    """Each phase's part of both passes."""
    bars = block.phases(results.get("moe_block", []))
    total = sum(sum(bar.values()) for bar in bars.values())
    names = list(dict.fromkeys(phase for bar in bars.values() for phase in bar))
    ordered = [n for n in (*block.PHASES, *names) if n in names]
    rows = [
        [name, *(f"{bar.get(name, 0) / total:.1%}" for bar in bars.values())]
        for name in dict.fromkeys(ordered)
    ]
    return lines(["phase", *(which for _, which in bars)], rows)


TABLES = {
    "performance_beside.png": beside,
    "performance_shapes.png": of_shapes,
    "performance_fp8.png": of_recipes,
    "performance_scale.png": of_exchange,
    "performance_phases.png": of_phases,
}
ANSWERS = {
    "performance_beside.png": """\
On H200s and H100s; kernels for other GPUs are [compiled, not run](core.md#kernels). Plain JAX is `native_moe`
(`ragged_all_to_all` and `ragged_dot`), timed in the same run on the mesh fsdp 2 x ep 2. Transformer Engine's block was
run on the same GPU ([how](beside-transformer-engine.md)); it has no 8 bits on Hopper, so it is BF16 throughout.
SonicMoE's rates are what its paper gives for an H100 (arXiv 2512.14080, figure 14, within 5 TFLOP/s). Ours are without
pauses, and in bursts of half a second, as its benchmark times it; at three sizes it was [run on the same
GPU](beside-sonicmoe.md). The first table has the times beside plain JAX on four H200s, at the sizes of the tutorial of
Transformer Engine's block; its last column is what that tutorial gives for four GB200s, not run here.""",
    "performance_shapes.png": """\
Rows, contraction and width of a GEMM, and its groups. Large groups reach the rate of a dense GEMM; the fewer rows a
group has, the more its weights' bytes count: 256 groups of 128 rows are at 0.6 of 32 groups of 1024. `fp8_block` was
measured at the two shapes that have its bar. The last table (`benchmarks/few_tokens.py`) has the block's forward of few
tokens, as in generation: of 16 and more it takes about as long as a copy of as many bytes as the chosen experts'
weights have, of one it takes longer.""",
    "performance_fp8.png": """\
Wide experts gain most: their GEMMs take most of the time, and 8-bit GEMMs are nearly twice as fast. Narrow experts (F
of 512 and below) gain little: the work of quantizing a row grows with D + F, that of its GEMMs with D F. "In 6
microbatches" weights are quantized once for six calls ({py:func}`expertmesh.flax_moe.quantize_weights`), as the
trainer does with several microbatches; elsewhere in each call. `fp8_current` reads activations once more to find their
largest value; on one GPU its GEMMs read tokens in 8 bits where they are. Tokens that are dispatched in 8 bits
(`fp8_block`, `mxfp8`) take little more than half the time on NVLink. For your own shape run
`python examples/fp8_for_your_shape.py --help`: it times the block, its up projection and quantizing, by recipe.""",
    "performance_scale.png": """\
The time grows linearly with tokens and with choices; 16 times the experts cost 8 %. Each of four GPUs keeps 80 % of one
GPU's speed: the rest is the exchange, and the reduction of the weights' gradients.""",
    "performance_phases.png": """\
GEMMs take two thirds of the time. Those of the backward were told apart by their order, which the compiler may
change: read GEMM 1 and GEMM 2 together there. "Sums over devices" is the reduce-scatter of the weights' gradients over
fsdp.""",
}


def sections(results: figures.Results) -> str:
    parts = []
    for figure in figures.figures(results):
        part = [f"## {figure.question}", f"![{figure.shows}]({figure.file})", ANSWERS[figure.file]]
        if figure.file in TABLES:
            part.append(TABLES[figure.file](results))
        parts += [*part, f"From: {origin(figure.rows)}."]
    return "\n\n".join(parts)


def readme(results: figures.Results) -> str:
    """The chart that the README shows."""
    (figure,) = [each for each in figures.figures(results) if each.file == README_CHART]
    return f"![{figure.shows}](docs/{figure.file})"


def every_row(results: figures.Results) -> str:
    """A table in HTML, as its rows are filtered by what is typed."""
    head = ["program", "case", "value", "reference", "ratio", "GPUs", "commit", "date"]
    body = []
    for name, rows in results.items():
        for row in rows:
            cells = [name, row["case"], f"{row['value']:.4g} {row['unit']}", row["reference"]]
            cells += [f"{row['ratio']:.2f}", f"{row['gpus']} x {row['device']}"]
            cells += [row["commit"], row["date"]]
            body.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    rows = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    return (
        "```{raw} html\n"
        '<p><label for="rows-filter">Show rows with</label> '
        '<input id="rows-filter" type="search" placeholder="fp8_block dgrad"> '
        '<span id="rows-count" role="status"></span></p>\n'
        '<div class="table-wrapper">\n'
        f'<table id="rows" class="docutils">\n<thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n```"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = read(RESULTS)
    contents = {
        DOCS / "performance.md": sections(results),
        DOCS / "performance-rows.md": every_row(results),
        DOCS / "beside-transformer-engine.md": of_engines(results),
        DOCS.parent / "README.md": readme(results),
    }
    old = {page: page.read_text() for page in contents}
    new = {page: filled(old[page], BEGIN, content) for page, content in contents.items()}
    if options.check:
        return int(new != old)
    for page, text in new.items():
        page.write_text(text)
    for figure in figures.figures(results):
        figure.draw(DOCS / figure.file)
    for one in block.growth(results.get("moe_block", [])):
        print(one.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
