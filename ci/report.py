"""What the cells of matrix.toml and their summaries say: the tables of versions, and a badge. Standard library only.

ci/report.py table            writes the tables of README.md and docs/versions.md, from ci/summaries
ci/report.py table --check    exit status 1 if a page is not what would be written
ci/report.py badge FOLDER     prints shields.io's "endpoint" JSON of the GPU jobs whose summaries are in
                              FOLDER/gpu-JOB/summary.json
"""

import argparse
import collections
import itertools
import json
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable

import matrix

BEGIN, END = "<!-- ci/report.py -->", "<!-- end of ci/report.py -->"
# A row of the table -> what a summary calls it, and the metadata.
NAMES = {"jax": ["jax"], "triton": ["triton"], "jax-triton": ["jax-triton"]}
NAMES |= {"nccl": ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]}
TITLES = {"nccl": "NCCL"}


def summaries() -> list[tuple[str, dict]]:
    """(file, summary) of each run on GPUs."""
    paths = sorted((matrix.ROOT / "ci/summaries").glob("*.json"))
    return [(path.stem, summary) for path in paths for summary in json.loads(path.read_text())]


def of_name(found: dict[str, str], name: str) -> str | None:
    """A row's version among those of a summary, or its bounds among those of the metadata."""
    return next((found[each] for each in NAMES[name] if each in found), None)


def requirements() -> dict[str, str]:
    """The bounds in core's metadata, by name."""
    text = (matrix.ROOT / "packages/core/pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    needs = project["dependencies"] + project["optional-dependencies"][matrix.CUDA]
    parts = (re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", need) for need in needs)
    return {part[1]: part[2].replace(",", ", ") for part in parts if part}


def used(cells: Iterable[dict], name: str) -> list[str]:
    """The versions of a row that cells pin, oldest first."""
    found = set()
    for cell in cells:
        if name in cell["versions"]:
            found.add(cell[name])
        elif name in cell.get("with", []):
            found.add(matrix.VERSIONS[name][0])
    return [version for version in matrix.VERSIONS[name] if version in found]


def devices(found: Iterable[str]) -> str:
    """Such as "1, 2, 4 x NVIDIA H200", of three devices of summaries."""
    kinds = collections.defaultdict(set)
    for device in found:
        count, _, kind = device.partition(" x ")
        kinds[kind].add(int(count))
    parts = (f"{', '.join(map(str, sorted(n)))} x {kind}" for kind, n in sorted(kinds.items()))
    return "; ".join(parts)


def number(item: tuple[str, object]) -> list[int]:
    """What versions are sorted by."""
    return [int(part) for part in re.findall(r"\d+", item[0])]


def on_gpus(name: str) -> str:
    """The versions of a row that summaries have, each with its GPUs."""
    found = collections.defaultdict(set)
    for _, summary in summaries():
        if version := of_name(summary["versions"], name):
            found[version].add(summary["device"])
    return "; ".join(
        f"{version} on {devices(each)}" for version, each in sorted(found.items(), key=number)
    )


def table() -> str:
    """A row for each distribution."""
    cells = matrix.cells().values()
    tests = [c for c in cells if c["platform"] == "cpu" and "package" in c]
    compiling = [c for c in cells if c.get("tests") == ["aot"]]
    python = (matrix.ROOT / ".python-version").read_text().strip()
    pythons = sorted({summary["versions"]["python"] for _, summary in summaries()})
    rows = [
        [
            "distribution",
            "admitted",
            "tests on CPUs",
            "compiled for sm_90 and sm_100",
            "run on GPUs",
        ]
    ]
    rows += [["---"] * 5, ["Python", f">={python}", python, python, ", ".join(pythons)]]
    for name in matrix.VERSIONS:
        admitted = of_name(requirements(), name) or ""
        each = [", ".join(used(some, name)) for some in (tests, compiling)]
        rows.append([TITLES.get(name, name), admitted, *each, on_gpus(name)])
    return lines(rows)


def runs() -> str:
    """The summaries, and of which jax with which triton there is none."""
    rows = [["jax", "triton", "run", "passed", "GPUs", "commit", "date"], ["---"] * 7]
    for pair in itertools.product(matrix.VERSIONS["jax"], matrix.VERSIONS["triton"]):
        ran = [
            [*pair, f"`{file}`", str(s["passed"]), s["device"], s["commit"], s["date"]]
            for file, s in summaries()
            if (s["versions"].get("jax"), s["versions"].get("triton")) == pair
        ]
        rows += ran or [[*pair, "none", *["-"] * 4]]
    return lines(rows)


def lines(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows)


def filled(text: str, content: str) -> str:
    """The text with what stands between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"report: a page must have the marks {BEGIN} and {END}; put them in")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def write_tables(check: bool) -> int:
    pages = {
        matrix.ROOT / "README.md": table(),
        matrix.ROOT / "docs/versions.md": f"{table()}\n\n{runs()}",
    }
    stale = 0
    for page, content in pages.items():
        old = page.read_text()
        new = filled(old, content)
        stale += new != old
        if not check:
            page.write_text(new)
    return int(check and stale > 0)


def badge(folder: pathlib.Path) -> dict:
    """Of the GPU jobs; one without a summary has not passed."""
    cells = [cell for cell in matrix.cells().values() if cell["platform"] == "gpu"]
    jobs = [job["job"] for cell in cells for job in matrix.jobs(cell)]
    passed, dates = 0, set()
    for job in jobs:
        path = folder / f"gpu-{job}/summary.json"
        found = json.loads(path.read_text()) if path.exists() else []
        passed += bool(found) and all(summary["ok"] for summary in found)
        dates |= {summary["date"] for summary in found}
    date = f", {max(dates)}" if dates else ""
    color = "brightgreen" if passed == len(jobs) else "red"
    message = f"{passed} of {len(jobs)} passed{date}"
    return {"schemaVersion": 1, "label": "GPU cells", "message": message, "color": color}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("table", help="write the tables of versions")
    writing.add_argument("--check", action="store_true", help="write nothing")
    verbs.add_parser("badge", help="print a badge").add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.verb == "table":
        return write_tables(options.check)
    print(json.dumps(badge(options.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
