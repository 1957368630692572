"""Writes the tables and the plot of docs/ep-at-scale.md: exchanges over up to 128 hosts, simulated.

python docs/scale.py            write them
python docs/scale.py --check    exit status 1 if they are not what would be written

Choices are drawn, bytes counted and divided by rates; nothing runs on a device. Rates are what was measured inside a
host (docs/performance.md), and what a network of 400 Gb/s for each GPU brings.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys

import jax
import numpy as np
from exchange import picture, words
from marks import filled

from expertmesh.ep import CopyPlan, plan_copies
from expertmesh.ep.capacity import most_hosts, most_rows
from expertmesh.ep.transports.two_level import ROUNDS, first_rows

DOCS = pathlib.Path(__file__).resolve().parent
PAGE, PLOT = DOCS / "ep-at-scale.md", DOCS / "scale.svg"
BEGIN, BEGIN_BALANCED = "<!-- docs/scale.py -->", "<!-- docs/scale.py, balanced -->"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of the EP group
RANKS, T, K, D, F = 8, 8192, 8, 7168, 2048
SPARE, ALIGNMENT = 2, 128  # spare slots of a rank; rows of a slot are padded to so many
GROUPS = (8, 4)  # num_groups, group_topk
BETWEEN, INSIDE = 45e9, 300e9  # bytes a second, of a GPU
SENT = D + D // 128 * 4  # bytes of a row of 8 bits, with scales
COPY = 3 * D * F  # bytes of an expert's weights of 8 bits
SUMS, BACK = (
    4 * D,
    2 * D,
)  # of what a rank adds up, in float32, and of what a host does, in bfloat16
DRAWN = 8192  # tokens that shares are counted of
DEVIATIONS = 4  # standard deviations by which the fullest pair of hosts has more tokens than others
# Ranks -> logical GB/s between hosts of dispatch and combine, with T, K and D as above, on H100s: DeepEP V2's README.
# Rows to a token's own host are counted too.
DEEPEP = {16: (90, 81), 32: (61, 61)}
COLORS = {
    "one level": "#9e9ac8",
    "two levels": "#08519c",
    "two levels, zipf": "#fd8d3c",
    "two levels, zipf, balanced": "#a63603",
    "two levels, 4 of 8 groups": "#74c476",
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a dispatch and a combine, for the rank that has most to receive.

    Attributes:
      between, inside: bytes that come from other hosts, and from other ranks of the host.
      blocks: bytes of the blocks between hosts, or ranks: a side.
    """

    between: float
    inside: float
    blocks: float

    @property
    def ms(self) -> float:
        return 1e3 * (self.between / BETWEEN + self.inside / INSIDE)


def num_experts(size: int) -> int:
    return max(256, size)


jitted_plan = jax.jit(plan_copies, static_argnames=("num_ranks", "num_spare"))


@functools.cache
def plan_of_copies(size: int) -> tuple[np.ndarray, CopyPlan]:
    """Choices of each expert under zipf, of all ranks' tokens, and the plan that levels the ranks."""
    E = num_experts(size)
    drawn = np.bincount(choices(E, "zipf").ravel(), minlength=E)
    counts = (drawn * size * T // DRAWN).astype(np.int32)
    plan = jitted_plan(jax.numpy.asarray(counts), num_ranks=size, num_spare=SPARE)
    return counts, CopyPlan(*map(np.asarray, plan))


@functools.cache
def ranks_of_choices(size: int, kind: str) -> np.ndarray:
    """int[DRAWN, K]: the rank that each choice goes to; "balanced" are those of zipf, with copies."""
    E = num_experts(size)
    each = E // size
    if kind != "balanced":
        return choices(E, kind) // each
    experts, (counts, plan) = choices(E, "zipf"), plan_of_copies(size)
    number = np.random.default_rng(1).random(experts.shape) * counts[experts]
    ranks = experts // each
    for x in np.unique(plan.expert[plan.expert >= 0]):
        held, slots = np.nonzero(plan.expert == x)
        ends = counts[x] - np.cumsum(
            plan.rows[held, slots]
        )  # the first copies take the last choices
        at = experts == x
        copy = np.searchsorted(-ends, -number[at], side="left")
        ranks[at] = np.where(copy < len(held), held[np.minimum(copy, len(held) - 1)], x // each)
    return ranks


@functools.cache
def choices(E: int, kind: str) -> np.ndarray:
    """int[DRAWN, K]: different experts of each token, by their chances; experts lie in a drawn order."""
    rng = np.random.default_rng(0)
    chances = np.zeros(E)
    if kind == "zipf":
        chances = -np.log(rng.permutation(E) + 1.0)
    scores = chances + rng.gumbel(size=(DRAWN, E))
    if kind == "groups":
        groups = scores.reshape(DRAWN, GROUPS[0], -1)
        best = np.sort(groups, axis=2)[:, :, -K // GROUPS[1] :].sum(axis=2)
        kept = np.argsort(-best, axis=1)[:, : GROUPS[1]]
        out = np.ones((DRAWN, GROUPS[0]), bool)
        np.put_along_axis(out, kept, False, axis=1)
        scores = np.where(out[:, :, None], -np.inf, groups).reshape(DRAWN, E)
    return np.argpartition(-scores, K - 1, axis=1)[:, :K]


def reached(size: int, kind: str, places: int) -> float:
    """The share of tokens that have a row at the fullest of `places` equal parts of the experts."""
    each = shares(size, kind, places)
    return float(
        each.max() if kind == "zipf" else each.mean()
    )  # the others are alike but for what was drawn


@functools.cache
def shares(size: int, kind: str, places: int) -> np.ndarray:
    """The share of tokens that have a row at each of these parts."""
    at = ranks_of_choices(size, kind) // (size // places)
    rows = np.zeros((DRAWN, places), bool)
    np.put_along_axis(rows, at, True, axis=1)
    return rows.mean(axis=0)


def two_levels(size: int, kind: str) -> Cost:
    """Blocks between hosts as the transport makes them, inside a host what has rows there; needed copies."""
    hosts = size // RANKS
    groups = GROUPS if kind == "groups" else (None, None)
    first = first_rows(T, T, hosts, most_hosts(num_experts(size), hosts, K, *groups))
    part = max(1, first // ROUNDS)
    share = reached(size, kind, hosts)
    fullest = (
        min(T, T * share + DEVIATIONS * math.sqrt(T * share * (1 - share))) if hosts > 1 else 0
    )
    rows = (hosts - 1) * (first + part * math.ceil(max(0, fullest - first) / part))
    # Of each host as many tokens as of its own; those that came to the rank itself are there.
    near = hosts * T * reached(size, kind, size) * (RANKS - 1)
    far_copies, near_copies = copies(size) if kind == "balanced" else (0, 0)
    return Cost(
        between=rows * (SENT + BACK) + far_copies * COPY,
        inside=near * (SENT + SUMS) + near_copies * COPY,
        blocks=hosts * T * BACK if hosts > 1 else 0,
    )


def copies(size: int) -> tuple[int, int]:
    """Of other hosts' experts and of those of the own host: the most that a rank sends or receives."""
    _, plan = plan_of_copies(size)
    held, slots = np.nonzero(plan.expert >= 0)
    owner = plan.expert[held, slots] // (num_experts(size) // size)
    far = held // RANKS != owner // RANKS

    def most(part: np.ndarray) -> int:
        each = (np.bincount(ranks[part], minlength=size).max() for ranks in (held, owner))
        return int(max(each))

    return most(far), most(~far)


def one_level(size: int) -> Cost:
    """A block of T rows for each rank; what ranks add up goes back in float32."""
    return Cost(
        between=(size - RANKS) * T * (SENT + SUMS),
        inside=(RANKS - 1) * T * (SENT + SUMS),
        blocks=size * T * SUMS,
    )


def deepep(size: int) -> float:
    """Milliseconds of what is published of a dispatch and a combine, by the same rows."""
    rows = T * shares(size, "groups", size // RANKS).sum()
    return 1e-6 * rows * sum(b / rate for b, rate in zip((SENT, BACK), DEEPEP[size], strict=True))


@functools.cache
def costs() -> dict[str, dict[int, Cost]]:
    kinds = {
        "two levels": "uniform",
        "two levels, zipf": "zipf",
        "two levels, zipf, balanced": "balanced",
        "two levels, 4 of 8 groups": "groups",
    }
    each = {name: {n: two_levels(n, kind) for n in SIZES} for name, kind in kinds.items()}
    return {"one level": {n: one_level(n) for n in SIZES}} | each


def table() -> str:
    lines = [
        "| EP | hosts of a token | "
        + " | ".join(f"{name}: GB, ms" for name in COLORS)
        + " | blocks: GB | rows: GB |",
        f"|---|---|{'---|' * len(COLORS)}---|---|",
    ]
    all_costs = costs()
    for size in SIZES:
        hosts = shares(size, "uniform", size // RANKS).sum()
        cells = [
            f"{each[size].between / 1e9:.2f}, {each[size].ms:.1f}" for each in all_costs.values()
        ]
        blocks = " and ".join(
            f"{all_costs[n][size].blocks / 1e9:.1f}" for n in ("one level", "two levels")
        )
        rows = size * T * min(K, num_experts(size) // size) * 2 * D / 1e9
        lines.append(f"| {size} | {hosts:.1f} | {' | '.join(cells)} | {blocks} | {rows:.0f} |")
    return "\n".join(lines)


def table_of_balanced() -> str:
    """What copies do under zipf; under uniform routing there are none."""
    lines = [
        "| EP | fullest rank over the mean, balanced | copies, of one rank at most "
        "| received or sent between hosts: GB | ms | buffer, balanced: GB | buffer, worst: GB |",
        "|---|---|---|---|---|---|---|",
    ]
    plain, level = (costs()[f"two levels, zipf{which}"] for which in ("", ", balanced"))
    for size in SIZES:
        counts, plan = plan_of_copies(size)
        each, held = counts.reshape(size, -1).sum(axis=1), num_experts(size) // size
        uneven, even = (load.max() / load.mean() for load in (each, plan.load))
        rows = most_rows(held + SPARE, T * K, ALIGNMENT), size * T * min(K, held)
        buffers = " | ".join(f"{2 * D * n / 1e9:.2f}" for n in rows)
        lines.append(
            f"| {size} | {uneven:.2f}, {even:.2f} | {np.sum(plan.expert >= 0)}, {sum(copies(size))} | "
            f"{plain[size].between / 1e9:.2f}, {level[size].between / 1e9:.2f} | "
            f"{plain[size].ms:.1f}, {level[size].ms:.1f} | {buffers} |"
        )
    return "\n".join(lines)


def plot() -> str:
    """Milliseconds of a dispatch and a combine, both axes by powers of 2 and 10."""
    left, bottom, width, height = 70, 330, 620, 300

    def x(size: float) -> float:
        return left + width * math.log2(size / SIZES[0]) / math.log2(SIZES[-1] / SIZES[0])

    def y(ms: float) -> float:
        return bottom - height * math.log10(ms) / 4

    parts = [
        words(left - 50, 22, "ms of dispatch and combine, simulated, and ranks of the EP group")
    ]
    for power in range(5):
        parts += [
            f'<line x1="{left}" x2="{left + width}" y1="{y(10**power):g}" y2="{y(10**power):g}" stroke="#ddd"/>',
            words(left - 8, y(10**power) + 4, f"{10**power}", "end", 11),
        ]
    parts += [words(x(size), bottom + 18, f"{size}", "middle", 11) for size in SIZES]
    for n, (name, each) in enumerate(costs().items()):
        points = " ".join(f"{x(size):.1f},{y(cost.ms):.1f}" for size, cost in each.items())
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>',
            f'<rect x="{left + 20}" y="{40 + 18 * n}" width="12" height="12" fill="{COLORS[name]}"/>',
            words(left + 38, 50 + 18 * n, name),
        ]
    for size in DEEPEP:
        parts.append(
            f'<circle cx="{x(size):.1f}" cy="{y(deepep(size)):.1f}" r="5" fill="none" stroke="black"/>'
        )
    parts.append(words(left + 38, 50 + 18 * len(COLORS), "o  DeepEP, by its published bandwidth"))
    return picture(720, 370, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    page = filled(PAGE.read_text(), BEGIN, table())
    wanted = {PAGE: filled(page, BEGIN_BALANCED, table_of_balanced()), PLOT: plot()}
    if check:
        return int(
            any(not path.exists() or path.read_text() != new for path, new in wanted.items())
        )
    for path, new in wanted.items():
        path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
