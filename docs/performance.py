"""Writes the tables and the plot of docs/performance.md from the files of benchmarks/results.

python docs/performance.py            write them
python docs/performance.py --check    exit status 1 if the page is not what would be written
"""

import argparse
import json
import pathlib
import sys

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- docs/performance.py -->", "<!-- end -->"


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
    charts = (
        "![Ratios to the reference of the same run](performance.png)",
        "![The block beside the native one](moe_block.png)",
    )
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


def plot_block(rows: list[dict], path: pathlib.Path) -> None:
    """Milliseconds of both passes of the block on a mesh, beside the native block's of the same run."""
    from matplotlib.figure import Figure

    both = [row for row in rows if "forward and backward" in row["case"]]
    rows = [row for row in both if row["unit"] == "ms" and row["reference"].startswith("native")]
    figure = Figure(figsize=(9, 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for offset, name, of in (
        (-0.2, "native JAX", lambda row: row["value"] * row["ratio"]),
        (0.2, "expertmesh", lambda row: row["value"]),
    ):
        places = [place + offset for place in range(len(rows))]
        bars = axes.barh(places, [of(row) for row in rows], height=0.4, label=name)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    names = [row["case"].partition("backward, ")[2] for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms, forward and backward, bfloat16; lower is better")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    page, results = DOCS / "performance.md", read(RESULTS)
    old = page.read_text()
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    new = f"{before}{BEGIN}\n\n{sections(results)}\n\n{END}{after}"
    if options.check:
        return int(new != old)
    page.write_text(new)
    plot(results, DOCS / "performance.png")
    plot_block(results["moe_block"], DOCS / "moe_block.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
