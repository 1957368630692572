"""Writes the tables and plots of docs/performance.md and README.md from the files of benchmarks/results.

python docs/performance.py            write them
python docs/performance.py --check    exit status 1 if a page is not what would be written
"""

import argparse
import json
import pathlib
import sys

import block
from marks import filled

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN = "<!-- docs/performance.py -->"
BLOCK = "moe_block"


def read(folder: pathlib.Path) -> dict[str, list[dict]]:
    """The rows of each file, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(rows: list[dict]) -> str:
    lines = ["| case | value | reference | ratio |", "|---|---|---|---|"]
    for row in rows:
        value = f"{row['value']:.4g} {row['unit']}"
        lines.append(f"| {row['case']} | {value} | {row['reference']} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def origin(rows: list[dict]) -> str:
    """Where the rows were measured; one sentence for each different answer."""
    found = {
        f"{row['gpus']} x {row['device']}, commit {row['commit']}, {row['date']}, "
        + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        for row in rows
    }
    return "; ".join(sorted(found))


def sections(results: dict[str, list[dict]]) -> str:
    parts = [
        f"## {name}\n\n`python -m benchmarks.{name}`: {origin(rows)}.\n\n{table(rows)}"
        for name, rows in results.items()
    ]
    charts = ["![Ratios to the reference of the same run](performance.png)"]
    charts += [f"![{shows}]({file})" for file, shows, _ in block.charts(results.get(BLOCK, []))]
    return "\n\n".join([*charts, *parts])


def plot(results: dict[str, list[dict]], path: pathlib.Path) -> None:
    """The ratios, one bar a row."""
    from matplotlib.figure import Figure

    rows = [row for each in results.values() for row in each]
    figure = Figure(figsize=(9, 1 + 0.16 * len(rows)), layout="constrained")
    axes = figure.subplots()
    start = 0
    for name, each in results.items():
        places = range(start, start + len(each))
        axes.barh(places, [row["ratio"] for row in each], height=0.8, label=name)
        start += len(each)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=5)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times the reference of the same run; higher is better")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = read(RESULTS)
    rows = results.get(BLOCK, [])
    contents = {
        DOCS / "performance.md": sections(results),
        DOCS.parent / "README.md": block.table(rows, origin),
    }
    old = {page: page.read_text() for page in contents}
    new = {page: filled(old[page], BEGIN, content) for page, content in contents.items()}
    if options.check:
        return int(new != old)
    for page, text in new.items():
        page.write_text(text)
    plot(results, DOCS / "performance.png")
    for file, _, draw in block.charts(rows):
        draw(DOCS / file)
    for one in block.growth(rows):
        print(one.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
