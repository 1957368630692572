"""Draws the figures of docs/expert-parallelism.md: what an exchange does, and how fast it was measured to be.

python docs/exchange.py            write exchange.svg, and bandwidth.svg from benchmarks/results/dispatch.json
python docs/exchange.py --check    exit status 1 if they are not what would be written
"""

import argparse
import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "dispatch.json"
COPY = 394  # GB/s that one memcpy from an H200 to another reaches, one way
COLORS = {
    "nvlink:48": "#6baed6",
    "nvlink": "#08519c",
    "ragged": "#fd8d3c",
    "all_to_all": "#74c476",
    "ring": "#9e9ac8",
}
RATE = re.compile(r"(?P<name>\w+), (?P<us>\d+) us; ")


def box(x, y, width, height, label, color="#eee"):
    middle = x + width / 2, y + height / 2 + 4
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" stroke="#444"/>'
        + words(*middle, label, "middle")
    )


def words(x, y, label, anchor="start", size=12):
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{label}</text>'


def arrow(x0, y0, x1, y1):
    return (
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#444" stroke-width="2" '
        'marker-end="url(#tip)"/>'
    )


def picture(width, height, parts):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#444"/></marker></defs>'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"]
    )


def diagram() -> str:
    """Tokens of two ranks to the rows of their experts, and back."""
    parts = []
    for rank, x in enumerate((20, 400)):
        left, peer = x + 10, 1 - rank
        from_here = x + 310 if rank else x + 35  # tokens that stay, beside the window
        parts += [
            f'<rect x="{x}" y="10" width="340" height="350" fill="none" stroke="#999" stroke-dasharray="4"/>',
            words(left, 30, f"GPU {rank}: experts {2 * rank} and {2 * rank + 1}", size=13),
            box(left, 45, 320, 30, "tokens and their experts", "#deebf7"),
            box(left + 50 * peer, 120, 270, 30, f"window: tokens from GPU {peer}", "#fee6ce"),
            box(left, 195, 155, 30, f"rows of expert {2 * rank}", "#e5f5e0"),
            box(x + 175, 195, 155, 30, f"rows of expert {2 * rank + 1}", "#e5f5e0"),
            box(left, 250, 320, 30, "grouped GEMMs: rows to rows"),
            box(left, 320, 320, 30, f"window: sums from GPU {peer}", "#fee6ce"),
            arrow(from_here, 75, from_here, 193),
            *(arrow(x + 140, 150, x + to, 193) for to in (100, 240)),
            *(arrow(x + to, 225, x + to, 248) for to in (90, 250)),
        ]
    total = (
        "combine: a token's sum is what arrived and what its own GPU added up, in order of ranks"
    )
    parts += [
        arrow(250, 75, 520, 118),
        arrow(520, 75, 250, 118),
        words(380, 88, "a token once to each GPU", "middle", 11),
        arrow(250, 280, 520, 318),
        arrow(520, 280, 250, 318),
        words(380, 293, "a sum of its rows", "middle", 11),
        words(20, 380, total),
    ]
    return picture(760, 395, parts)


def rates(rows: list[dict]) -> dict[str, dict[str, float]]:
    """case -> transport -> GB/s that leave a GPU."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        reference = RATE.match(row["reference"])
        if row["metric"] != "time" or not row.get("bytes") or reference is None:
            continue
        name, _, case = row["case"].partition(", ")
        each = found.setdefault(case, {})
        each[name] = row["bytes"] / row["value"] / 1e3
        each[reference["name"]] = row["bytes"] / int(reference["us"]) / 1e3
    return found


def bandwidth(rows: list[dict]) -> str:
    """Bars: GB/s, against what a copy reaches."""
    left, scale, y, parts = 560, 400 / COPY, 20, []
    for case, each in rates(rows).items():
        parts.append(words(left - 8, y + 8 * len(each), case, "end", 10))
        for name, rate in each.items():
            width = max(1, round(rate * scale))
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width}" height="13" fill="{COLORS[name]}"/>'
            )
            parts.append(words(left + width + 4, y + 11, f"{name} {rate:.0f}", size=10))
            y += 15
        y += 8
    edge = left + 400
    parts += [
        f'<line x1="{edge}" y1="10" x2="{edge}" y2="{y}" stroke="black" stroke-dasharray="4"/>',
        words(edge - 4, y + 14, f"GB/s leaving each GPU; a copy between two: {COPY}", "end", 11),
    ]
    return picture(left + 520, y + 25, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    figures = {
        DOCS / "exchange.svg": diagram(),
        DOCS / "bandwidth.svg": bandwidth(json.loads(RESULTS.read_text())),
    }
    if options.check:
        return int(any(path.read_text() != text for path, text in figures.items()))
    for path, text in figures.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
