"""The five figures of docs/performance.md, each an answer to a question, from the rows of benchmarks/results.

A figure is drawn from a picture of values, which tests compare; docs/performance.py writes them.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import block

Results = dict[str, list[dict]]
COLORS = {"bfloat16": "#0072b2", "fp8_block": "#d55e00", "fp8_current": "#9a6700"}
OF_BLOCKS = COLORS | {"fp8_block in 6 microbatches": "#00735a"}
PHASES = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#cc79a7", "#009e73", "#999999", "#000000")
GEMM = re.compile(r"(\w+) (fprop|dgrad|wgrad) (.+?) (\d+x\d+x\d+), (\d+) groups$")
PASSES = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}
RATE = re.compile(r", ([\d.]+) TFLOP/s")
EXCHANGE = re.compile(
    r"nvlink, (dispatch|combine) (bfloat16|float8)[^,]*(?:, sums travel in bfloat16)?, (\d+) ranks, "
    r"(\d+) tokens each x (\d+), (\d+) of (\d+) experts$"
)

# {what: {series: value}}, in the order in which it is drawn.
Bars = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One answer.

    Attributes:
      question: the section's title.
      file: in docs/.
      shows: the text in place of the picture.
      draw: writes the picture.
      rows: what it is drawn from.
    """

    question: str
    file: str
    shows: str
    draw: Callable[[pathlib.Path], None]
    rows: list[dict]


def label(shape: block.Shape) -> str:
    return f"{shape.tokens} tokens, D {shape.width}, F {shape.expert_width}, E {shape.experts}, K {shape.top_k}"


def recipe_of(row: dict) -> str:
    return row["case"].partition(" forward")[0]


def beside_plain(results: Results) -> Bars:
    """Our bfloat16 block's speed over that of plain JAX on the most GPUs, by shape."""
    rows = block.both_passes(results.get("moe_block", []))
    return {label(block.shape_of(row)): {"bfloat16": row["ratio"]} for row in rows}


def beside_engine(results: Results) -> Bars:
    """Each recipe's speed over Transformer Engine's bfloat16 block, by shape."""
    bars: Bars = collections.defaultdict(dict)
    for row in results.get("single_gpu_blocks", []):
        if row["reference"].startswith("Transformer Engine"):
            bars[label(block.shape_of(row))][recipe_of(row)] = row["ratio"]
    return dict(bars)


def fp8_speed(rows: list[dict]) -> Bars:
    """Each recipe's speed over our bfloat16 block's, by shape."""
    bars: Bars = collections.defaultdict(dict)
    for row in rows:
        if row["reference"].startswith("our bfloat16 block"):
            bars[label(block.shape_of(row))][recipe_of(row)] = row["ratio"]
    return dict(bars)


def beside_sonic(results: Results) -> Bars:
    """Each recipe's speed of both passes, hot, over SonicMoE's published bfloat16 rates, by shape.

    A pass' time is its operations over its rate; the backward has twice the forward's. A recipe's speed is known by our
    bfloat16 block's: of the same commit.
    """
    rows = results.get("single_gpu_blocks", [])
    ours: Bars = collections.defaultdict(dict)
    theirs: Bars = collections.defaultdict(dict)
    commits: dict[str, str] = {}
    for row in rows:
        if row["reference"].startswith("SonicMoE") and " in bursts" not in row["case"]:
            which, name = row["case"].split(",")[0].split(" ")[1], label(block.shape_of(row))
            commits[name] = row["commit"]
            ours[name][which] = 1 / row["value"]
            theirs[name][which] = row["ratio"] / row["value"]
    bars = {}
    for name, times in ours.items():
        if times.keys() == {"forward", "backward"}:
            one, other = (t["forward"] + 2 * t["backward"] for t in (times, theirs[name]))
            wide = {"bfloat16": other / one}
            beside = [r for r in rows if r["commit"] == commits[name]]
            recipes = fp8_speed(beside).get(name, {})
            bars[name] = wide | {recipe: wide["bfloat16"] * r for recipe, r in recipes.items()}
    return bars


def gemms(results: Results) -> dict[str, dict[str, Bars]]:
    """{pass: {shape: {series: {"ours" or "dense": TFLOP/s}}}} of the grouped GEMMs."""
    found: dict[str, dict[str, Bars]] = {name: collections.defaultdict(dict) for name in PASSES}
    for file in ("grouped_gemm", "quantized_by_tensor", "quantized_grouped_gemm"):
        for row in results.get(file, []):
            match = GEMM.match(row["case"])
            if match and row["unit"] == "TFLOP/s":
                recipe, which, _, sizes, groups = match.groups()
                each = {"ours": row["value"]}
                dense = RATE.search(row["reference"])
                if dense and row["reference"].startswith("dense"):
                    each["dense"] = float(dense[1])
                name = f"{sizes.replace('x', ' x ')}, {groups} groups"
                found[which][name].setdefault(recipe, each)
    return {which: dict(shapes) for which, shapes in found.items()}


def exchanges(results: Results) -> tuple[int, dict[tuple[str, str], float]]:
    """The most GPUs, and {("dispatch" or "combine", dtype): us} of the largest exchange of them measured in both."""
    rows = block.on_most_gpus(results.get("dispatch", []))
    matches = [(row["value"], EXCHANGE.match(row["case"])) for row in rows]
    found = {(match[1], match[2]): us for us, match in matches if match}
    return (rows[0]["gpus"] if rows else 0), found


def weak_scaling(results: Results) -> dict[int, float]:
    """{GPUs: the part of one GPU's speed that each of them keeps}, of the machine with the most of them."""
    found = {}
    for row in block.on_most_gpus(results.get("moe_block", [])):
        if match := re.search(r"weak scaling, (\d+) GPUs", row["case"]):
            found[int(match[1])] = row["ratio"]
    return {1: 1.0} | found if found else {}


def figures(results: Results) -> Iterator[Figure]:
    """Those that there are rows for."""
    of_block = results.get("moe_block", [])
    single = results.get("single_gpu_blocks", [])
    native = block.both_passes(of_block)
    grouped = [
        row
        for file in ("grouped_gemm", "quantized_by_tensor", "quantized_grouped_gemm")
        for row in results.get(file, [])
    ]
    scaled = [row for row in of_block if "growth" in row or "weak scaling" in row["case"]]
    traced = [row for row in of_block if block.PHASE.match(row["case"])]
    every = (
        Figure(
            "Which GPU, and how much faster than what?",
            "performance_beside.png",
            "The block's speed over that of plain JAX, Transformer Engine and SonicMoE, by shape",
            lambda path: draw_beside(results, path),
            [*native, *single],
        ),
        Figure(
            "Which shape?",
            "performance_shapes.png",
            "Rates of the grouped GEMMs beside a dense GEMM of the same size, by shape",
            lambda path: draw_shapes(results, path),
            grouped + results.get("few_tokens", []),
        ),
        Figure(
            "What does FP8 bring?",
            "performance_fp8.png",
            "The block's speed in FP8 over bfloat16, by shape, and an exchange in 8 bits",
            lambda path: draw_fp8(results, path),
            [row for row in single if row["reference"].startswith("our bfloat16")]
            + block.on_most_gpus(results.get("dispatch", [])),
        ),
        Figure(
            "How does it scale?",
            "performance_scale.png",
            "The block's time with GPUs, tokens, choices and experts",
            lambda path: draw_scale(results, path),
            scaled,
        ),
        Figure(
            "Where does the time go?",
            "performance_phases.png",
            "The time of each phase of the block's forward and backward",
            lambda path: draw_phases(traced, path),
            traced,
        ),
    )
    return (figure for figure in every if figure.rows)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


def _stacked(panels: list[Bars], **shared: bool) -> tuple[Any, list[Any]]:
    """A figure with a panel for each, as high as its bars are many."""
    heights = [max(0.9, 0.17 * sum(map(len, bars.values())) + 0.12 * len(bars)) for bars in panels]
    figure = _figure(8, sum(heights) + 0.6 * len(heights))
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, **shared)
    return figure, list(every[:, 0])


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _bars(axes: Any, bars: Bars, colors: dict[str, str], written: str) -> None:
    """Horizontal bars, series of one name beneath each other, with their values."""
    series = [name for name in colors if any(name in each for each in bars.values())]
    height = 0.8 / max(1, len(series))
    for i, name in enumerate(series):
        for place, each in enumerate(bars.values()):
            if name in each:
                y = place + (i - (len(series) - 1) / 2) * height
                axes.barh(y, each[name], height=height * 0.92, color=colors[name])
                text = f"{each[name]:{written}} "
                axes.text(each[name], y, text, va="center", ha="right", color="white", fontsize=8)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _line_at_one(axes: Any) -> None:
    """Behind the bars, whose values are written near it."""
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)


def _legend(figure: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)


def draw_beside(results: Results, path: pathlib.Path) -> None:
    panels = [
        ("over plain JAX, 4 x H200", beside_plain(results)),
        ("over Transformer Engine 2.20.2 in BF16, 1 x H200", beside_engine(results)),
        ("over SonicMoE in BF16 as published, 1 x H100", beside_sonic(results)),
    ]
    panels = [(title, bars) for title, bars in panels if bars]
    figure, every = _stacked([bars for _, bars in panels])
    for axes, (title, bars) in zip(every, panels, strict=True):
        _bars(axes, bars, OF_BLOCKS, ".2f")
        _line_at_one(axes)
        axes.set_title(f"times as fast {title}, forward and backward", fontsize=9, loc="left")
    _legend(figure, OF_BLOCKS)
    _save(figure, path)


def draw_shapes(results: Results, path: pathlib.Path) -> None:
    found = {
        which: {name: each for name, each in shapes.items() if "bfloat16" in each}
        for which, shapes in gemms(results).items()
    }
    found = {which: shapes for which, shapes in found.items() if shapes}
    rates = [
        {name: {recipe: rate["ours"] for recipe, rate in each.items()} for name, each in s.items()}
        for s in found.values()
    ]
    figure, every = _stacked(rates, sharex=True)
    for axes, (which, shapes), bars in zip(every, found.items(), rates, strict=True):
        _bars(axes, bars, COLORS, ".0f")
        for place, each in enumerate(shapes.values()):
            for recipe in ("bfloat16", "fp8_current"):
                if dense := each.get(recipe, {}).get("dense"):
                    axes.plot([dense] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
        title = f"{PASSES[which]}, TFLOP/s; lines: dense GEMMs of XLA"
        axes.set_title(title, fontsize=9, loc="left")
    _legend(figure, COLORS)
    _save(figure, path)


def draw_fp8(results: Results, path: pathlib.Path) -> None:
    speeds = fp8_speed(results.get("single_gpu_blocks", []))
    speeds = dict(sorted(speeds.items(), key=lambda item: max(item[1].values())))
    names = {"bfloat16": "16 bits", "float8": "8 bits and scales"}
    gpus, measured = exchanges(results)
    sent = {f"{what}, {names[dtype]}": {"nvlink": us} for (what, dtype), us in measured.items()}
    figure, (above, below) = _stacked([speeds, sent])
    _bars(above, speeds, OF_BLOCKS, ".2f")
    _line_at_one(above)
    title = "times as fast as the bfloat16 block, forward and backward, 1 GPU"
    above.set_title(title, fontsize=9, loc="left")
    _bars(below, sent, {"nvlink": "#00735a"}, ".0f")
    title = f"us, {gpus} GPUs, 4096 tokens each x 7168, 8 of 256 experts"
    below.set_title(title, fontsize=9, loc="left")
    _legend(figure, {name: color for name, color in OF_BLOCKS.items() if name != "bfloat16"})
    _save(figure, path)


def draw_scale(results: Results, path: pathlib.Path) -> None:
    grown = block.growth(results.get("moe_block", []))
    kept = weak_scaling(results)
    figure = _figure(8, 5.4)
    every = list(figure.subplots(2, 2).flat)
    if kept:
        axes = every.pop(0)
        axes.bar([str(n) for n in kept], list(kept.values()), color="#0072b2")
        for i, value in enumerate(kept.values()):
            axes.text(i, value, f"{value:.0%}", ha="center", va="bottom", fontsize=8)
        axes.set(xlabel="GPUs; tokens grow with them", ylabel="of one GPU's speed", ylim=(0, 1.15))
        axes.set_title("weak scaling", fontsize=9, loc="left")
    for axes, one in zip(every, grown, strict=False):
        axes.plot(one.values, one.fit, color="grey", linestyle="--")
        axes.plot(one.values, one.times, "o", color="#0072b2")
        name = {"tokens": "tokens of a GPU", "choices": "K, experts of a token"}.get(
            one.size, one.size
        )
        axes.set(xlabel=name, ylabel="ms, forward and backward", ylim=(0, 1.1 * max(one.times)))
        axes.set_title(one.describe().partition(" (")[0], fontsize=9, loc="left")
    for axes in every[len(grown) :]:
        axes.set_visible(False)
    _save(figure, path)


def draw_phases(rows: list[dict], path: pathlib.Path) -> None:
    """A bar for each pass of what was traced, its phases one after the other."""
    bars = block.phases(rows)
    figure = _figure(8, 1.4 + 0.6 * len(bars))
    axes = figure.subplots()
    others = sorted({phase for bar in bars.values() for phase in bar} - set(block.PHASES))
    left = [0.0] * len(bars)
    for phase, color in zip((*block.PHASES, *others), PHASES, strict=False):
        times = [bar.get(phase, 0.0) for bar in bars.values()]
        axes.barh(range(len(bars)), times, left=left, height=0.6, label=phase, color=color)
        left = [start + time for start, time in zip(left, times, strict=True)]
    axes.set_yticks(range(len(bars)), [which for _, which in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("us of kernels on one GPU of four, by a profiler's trace", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    _save(figure, path)
