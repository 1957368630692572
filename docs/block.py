"""What the block's rows of benchmarks/results say: shapes, phases, growth, read from the words of a row's case."""

import collections
import dataclasses
import re
import statistics

NATIVE = "native_moe"
SHAPE = re.compile(r"([\dx]+) x (\d+), F (\d+), (\d+) experts, top (\d+)")
# Sizes that the time grows with, by the rows' names of them.
GROWTH = {"num_tokens": "tokens", "num_choices": "choices", "num_experts": "experts"}
PHASE = re.compile(r"^(\w+) ([^,]+), (forward|backward), ")
# Where a phase stands in a bar.
PHASES = ("route", "dispatch", "GEMM 1", "activation", "GEMM 2", "combine", "sums over devices")
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


def against_native(rows: list[dict]) -> list[dict]:
    """Those that were timed against the native block in the same run."""
    return [row for row in rows if row["reference"].startswith(NATIVE)]


def both_passes(rows: list[dict]) -> list[dict]:
    """Those of them with a backward, on the most GPUs."""
    return on_most_gpus([row for row in against_native(rows) if "backward" in row["case"]])


def on_most_gpus(rows: list[dict]) -> list[dict]:
    """Those of the machine with the most of them."""
    most = max((row["gpus"] for row in rows), default=0)
    return [row for row in rows if row["gpus"] == most]


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
