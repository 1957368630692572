"""The block's rows of benchmarks/results: README's table, and charts against the native block, by phase and of growth.

docs/performance.py writes them; they are read from the words of a row's case.
"""

import collections
import dataclasses
import pathlib
import re
import statistics
import textwrap
from collections.abc import Callable

NATIVE = "native_moe"
SHAPE = re.compile(r"([\dx]+) x (\d+), F (\d+), (\d+) experts, top (\d+)")
MESH = re.compile(r"\{[^}]*\}")
# Sizes that the time grows with, by the rows' names of them.
GROWTH = {"num_tokens": "tokens", "num_choices": "choices", "num_experts": "experts"}
PHASE = re.compile(r"^(\w+) ([^,]+), (forward|backward), ")
# Where a phase stands in a bar.
PHASES = ("route", "dispatch", "GEMM 1", "activation", "GEMM 2", "combine", "sums over devices")
PUBLISHED = """\
The last column is what the tutorial of Transformer Engine's own block gives at these sizes on four GB200s; it was not
run here. What of Transformer Engine runs on one H200 is [beside ours](docs/beside-transformer-engine.md)."""
RESIDUAL, DEARER = (
    0.15,
    0.25,
)  # what is wanted: off the line at most; more for 16 times the experts at most


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a case says of its sizes; `tokens` as it says them, of all devices."""

    tokens: str
    width: int
    expert_width: int
    experts: int
    top_k: int


def shape_of(row: dict) -> Shape:
    found = SHAPE.search(row["case"])
    assert found, f"no shape in {row['case']!r}"
    return Shape(found[1], *map(int, found.groups()[1:]))


def mesh_of(row: dict) -> str:
    """Such as "fsdp 2 x ep 2"."""
    found = MESH.search(row["case"])
    return " x ".join(
        " ".join(pair) for pair in re.findall(r"'(\w+)': (\d+)", found[0] if found else "")
    )


def against_native(rows: list[dict]) -> list[dict]:
    """Those that were timed against the native block in the same run."""
    return [row for row in rows if row["reference"].startswith(NATIVE)]


def both_passes(rows: list[dict]) -> list[dict]:
    """Those of them with a backward, on the most GPUs."""
    found = [row for row in against_native(rows) if "backward" in row["case"]]
    most = max((row["gpus"] for row in found), default=0)
    return [row for row in found if row["gpus"] == most]


def table(rows: list[dict], origin: Callable[[list[dict]], str]) -> str:
    """What the README shows."""
    rows = both_passes(rows)
    if not rows:
        return "Not measured on several GPUs yet."
    shapes = [shape_of(row) for row in rows]
    one = shapes[0]
    said = textwrap.fill(
        f"One MoE block, forward and backward in bfloat16, {one.experts} experts, top {one.top_k}, "
        f"mesh {mesh_of(rows[0])}, here and in plain JAX (`ragged_all_to_all` and `ragged_dot`) in one run:",
        120,
        break_on_hyphens=False,
    )
    published = all("gb200" in row for row in rows)
    names = ["tokens", "width", "expert width", "plain JAX, ms", "here, ms", "times as fast"]
    names += [
        "[Transformer Engine](https://github.com/NVIDIA/TransformerEngine) on GB200, ms"
    ] * published
    lines = [_line(names), "|---" * len(names) + "|"]
    for shape, row in zip(shapes, rows, strict=True):
        native = [
            f"{row['value'] * row['ratio']:.3g}",
            f"{row['value']:.3g}",
            f"**{row['ratio']:.1f}**",
        ]
        elsewhere = [f"{row['gb200']:.3g}"] if published else []
        lines.append(_line([shape.tokens, shape.width, shape.expert_width, *native, *elsewhere]))
    if published:
        lines += ["", PUBLISHED]
    chart = "![The block in plain JAX and here](docs/moe_block.png)"
    return "\n".join(
        [said, "", *lines, "", f"{chart}\n\n{origin(rows)}; [more](docs/performance.md)."]
    )


def _line(cells: list) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def phases(rows: list[dict]) -> dict[tuple[str, str], dict[str, float]]:
    """(of what, pass) -> microseconds of each phase."""
    found: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if match := PHASE.match(row["case"]):
            dtype, phase, which = match.groups()
            rest = f"{dtype}, {row['case'][match.end() :]}"
            found[rest, which][phase] = found[rest, which].get(phase, 0) + row["value"]
    return dict(found)


@dataclasses.dataclass(frozen=True)
class Growth:
    """Times that differ in one size.

    Attributes:
      size: its name, "tokens" (of a GPU), "choices" or "experts".
      values: ascending.
      times: ms.
    """

    size: str
    values: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def fit(self) -> tuple[float, ...]:
        """ms of the affine fit; for experts the time of the fewest."""
        if self.size == "experts":
            return (self.times[0],) * len(self.times)
        slope, start = statistics.linear_regression(self.values, self.times)
        return tuple(slope * value + start for value in self.values)

    @property
    def off(self) -> float:
        """The largest part by which a time is off the fit; of experts, dearer than the fewest."""
        pairs = zip(self.times, self.fit, strict=True)
        if self.size == "experts":
            return max(time / fit - 1 for time, fit in pairs)
        return max(abs(time / fit - 1) for time, fit in pairs)

    def describe(self) -> str:
        if self.size == "experts":
            sizes = f"{self.values[-1]} experts against {self.values[0]}"
            return f"{sizes}: {self.off:+.0%} (at most {DEARER:.0%} is wanted)"
        return f"affine in {self.size}: off by {self.off:.0%} at most ({RESIDUAL:.0%} is wanted)"


def growth(rows: list[dict]) -> list[Growth]:
    """One for each size that rows differ in."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for row in rows:
        if "growth" in row:
            found[row["growth"]][row["size"]] = row["value"]
    ascending = {name: sorted(points.items()) for name, points in found.items() if len(points) > 1}
    return [Growth(GROWTH[name], *zip(*points, strict=True)) for name, points in ascending.items()]


def plot_native(rows: list[dict], path: pathlib.Path) -> None:
    """Two bars a row, the native block's and ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    native = [row["value"] * row["ratio"] for row in rows]
    for name, up, times in (
        ("plain JAX: ragged_all_to_all and ragged_dot", 0.2, native),
        ("here", -0.2, [row["value"] for row in rows]),
    ):
        axes.barh([i - up for i in range(len(rows))], times, height=0.38, label=name)
    for i, row in enumerate(rows):
        axes.text(
            row["value"] + 0.01 * max(native),
            i + 0.2,
            f"{row['ratio']:.1f} x",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{rows[0]['unit']}; lower is better")
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def _label(row: dict) -> str:
    shape = shape_of(row)
    which = "forward and backward" if "backward" in row["case"] else "forward"
    return (
        f"{which}, {shape.tokens} tokens\nwidth {shape.width}, expert width {shape.expert_width}, "
        f"{shape.experts} experts, top {shape.top_k}, {mesh_of(row)}"
    )


def plot_phases(rows: list[dict], path: pathlib.Path) -> None:
    """A bar for each pass of what was traced, its phases one after the other."""
    from matplotlib.figure import Figure

    bars = phases(rows)
    figure = Figure(figsize=(9, 1.2 + 0.6 * len(bars)), layout="constrained")
    axes = figure.subplots()
    others = sorted({phase for bar in bars.values() for phase in bar} - set(PHASES))
    left = [0.0] * len(bars)
    for phase in (*PHASES, *others):
        times = [bar.get(phase, 0.0) for bar in bars.values()]
        axes.barh(range(len(bars)), times, left=left, height=0.6, label=phase)
        left = [start + time for start, time in zip(left, times, strict=True)]
    labels = [f"{which}\n{what}" for what, which in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("us of kernels on one GPU, by a profiler's trace")
    figure.legend(loc="outside upper center", ncols=5, fontsize=7)
    figure.savefig(path, dpi=110)


def plot_growth(rows: list[dict], path: pathlib.Path) -> None:
    """A panel for each size: what was measured, and the line that it is compared with."""
    from matplotlib.figure import Figure

    grown = growth(rows)
    figure = Figure(figsize=(3.2 * len(grown), 3.2), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(grown), squeeze=False)[0], grown, strict=True):
        axes.plot(one.values, one.fit, color="grey", linestyle="--")
        axes.plot(one.values, one.times, "o")
        name = {"tokens": "tokens a GPU", "choices": "K, experts of a token"}.get(
            one.size, one.size
        )
        axes.set(xlabel=name, ylabel="ms, forward and backward", ylim=(0, 1.1 * max(one.times)))
        axes.set_title(one.describe().partition(" (")[0], fontsize=8)
    figure.savefig(path, dpi=110)


def charts(rows: list[dict]) -> list[tuple[str, str, Callable[[pathlib.Path], None]]]:
    """(file, what it shows, what draws it) of those that there are rows for."""
    native = against_native(rows)
    every = (
        (native, "moe_block.png", "The block beside the native one", plot_native),
        (phases(rows), "moe_block_phases.png", "Where the block's time goes", plot_phases),
        (growth(rows), "moe_block_growth.png", "How the block's time grows", plot_growth),
    )
    return [
        (file, shows, lambda path, draw=draw: draw(native if draw is plot_native else rows, path))
        for found, file, shows, draw in every
        if found
    ]
