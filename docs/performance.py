"""Writes the tables and plots of docs/performance.md and README.md from the files of benchmarks/results.

python docs/performance.py            write them
python docs/performance.py --check    exit status 1 if a page is not what would be written
"""

import argparse
import json
import pathlib
import sys
import textwrap

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- docs/performance.py -->", "<!-- end -->"
BLOCK, NATIVE = "moe_block", "native_moe"
# What the block's time grows with.
GROWTH = {"num_tokens": "tokens a GPU", "num_choices": "choices a token", "num_experts": "experts"}


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
        *["![How the block's time grows](growth.png)"] * all(growth(results).values()),
    )
    return "\n\n".join([*charts, *parts])


def against_native(results: dict[str, list[dict]]) -> list[dict]:
    """The rows of the block that were timed against the native one in the same run."""
    return [row for row in results.get(BLOCK, []) if row["reference"].startswith(NATIVE)]


def block_table(rows: list[dict]) -> str:
    """What the README shows: the rows with a backward."""
    if not rows:
        return "Not measured on several GPUs yet."
    rows = [row for row in rows if "backward" in row["case"]] or rows
    lines = ["| MoE block | plain JAX | here | times as fast |", "|---|---|---|---|"]
    for row in rows:
        native = f"{row['value'] * row['ratio']:.3g} {row['unit']}"
        value = f"{row['value']:.3g} {row['unit']}"
        lines.append(f"| {row['case']} | {native} | {value} | **{row['ratio']:.1f}** |")
    chart = "![The block in plain JAX and here](docs/moe_block.png)"
    return "\n".join([*lines, "", f"{chart}\n\n{origin(rows)}; [more](docs/performance.md)."])


def plot_block(rows: list[dict], path: pathlib.Path) -> None:
    """Two bars a row, the native block's and ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for name, up, times in (
        (
            "plain JAX: ragged_all_to_all and ragged_dot",
            0.2,
            [r["value"] * r["ratio"] for r in rows],
        ),
        ("here", -0.2, [r["value"] for r in rows]),
    ):
        axes.barh([i - up for i in range(len(rows))], times, height=0.38, label=name)
    for i, row in enumerate(rows):
        axes.text(row["value"] * 1.05, i + 0.2, f"{row['ratio']:.1f} x", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [textwrap.fill(row["case"], 48) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{rows[0]['unit']}; lower is better")
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def growth(results: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """The rows of the block that were measured for several values of one size, by its name."""
    rows = [row for row in results.get(BLOCK, []) if "growth" in row]
    return {name: [row for row in rows if row["growth"] == name] for name in GROWTH}


def plot_growth(found: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Time against each size, and what its rows are compared with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        sizes = [row["size"] for row in rows]
        expected = [row["value"] * row["ratio"] for row in rows]
        axes.plot(sizes, expected, "--", label=rows[0]["reference"].partition(",")[0])
        axes.plot(sizes, [row["value"] for row in rows], "o", label="measured")
        axes.set_xlabel(GROWTH[name])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(rows[0]["unit"])
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


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


def filled(text: str, content: str) -> str:
    """The text with what stands between the marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = read(RESULTS)
    rows = against_native(results)
    contents = {
        DOCS / "performance.md": sections(results),
        DOCS.parent / "README.md": block_table(rows),
    }
    old = {page: page.read_text() for page in contents}
    new = {page: filled(old[page], content) for page, content in contents.items()}
    if options.check:
        return int(new != old)
    for page, text in new.items():
        page.write_text(text)
    plot(results, DOCS / "performance.png")
    if rows:
        plot_block(rows, DOCS / "moe_block.png")
    if all(growth(results).values()):
        plot_growth(growth(results), DOCS / "growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
