"""Lists and runs the CI cells of matrix.toml. Standard library only.

    ci/matrix.py list [--json] [--platform cpu] [--workflow ci] [--local]
    ci/matrix.py run NAME... [--summary PATH] [-- PYTEST-ARGUMENTS...]
    ci/matrix.py venv NAME

A CPU cell makes its venv under .venvs/ on first use. A GPU cell uses the interpreter that runs this
program and installs nothing: the packages come from PYTHONPATH, so it works offline. `venv` installs
a cell's versions, those of CUDA included, and prints the interpreter to run the cell by.
"""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
MATRIX = tomllib.loads((ROOT / "ci/matrix.toml").read_text())
VERSIONS = MATRIX["versions"]
CUDA = "cuda13"  # the extra of GPU cells
NO_TESTS = 5  # pytest's exit status
PROBE = """
import importlib.metadata, json, sys
import jax
names = "jax jaxlib flax numpy triton jax-triton nvidia-cuda-nvrtc".split()
names += ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]
found = {}
for d in importlib.metadata.distributions():
    found.setdefault(d.metadata["Name"], d.version)  # the first on the path is what is imported
versions = {"python": sys.version.split()[0]} | {n: found[n] for n in names if n in found}
devices = jax.devices()
device = f"{len(devices)} x {devices[0].device_kind}"
print(json.dumps({"versions": versions, "platform": devices[0].platform, "device": device}))
"""


def cells() -> dict[str, dict]:
    """Every cell by name: the product of the axes, then the ones with a name of their own, which have the tests of all
    packages if they name none and no command."""
    cells = [package_cell(*values) for values in itertools.product(*MATRIX["axes"].values())]
    for name, cell in MATRIX["cells"].items():
        like = MATRIX["cells"][cell["like"]] if "like" in cell else {}
        cell = {"name": name, "platform": "cpu", "versions": []} | like | cell
        cells.append(cell if {"tests", "command"} & cell.keys() else of_all_packages(cell))
    return {variant["name"]: variant for cell in cells for variant in variants(cell)}


def of_all_packages(cell: dict) -> dict:
    tests = [*itertools.chain(*MATRIX["tests"].values())]
    return {"tests": tests, "select": MATRIX["select"][cell["platform"]]} | cell


def package_cell(package: str, processes: str, platform: str) -> dict:
    """Of all versions, which its `versions` names."""
    select = MATRIX["select"]
    cell = {
        "name": f"{package}-{processes}-{platform}",
        "platform": platform,
        "package": package,
        "versions": MATRIX["versions_of"][platform],
        "tests": MATRIX["tests"][package],
        "select": f"({select[platform]}) and ({select[processes]})",
    }
    gpus = MATRIX["gpus"][f"{package}-{processes}"]
    return cell | ({"gpus": gpus} if platform == "gpu" else {})


def variants(cell: dict) -> Iterator[dict]:
    """A cell for each choice of its versions, which become keys of it: {"jax": "0.11.2"}."""
    cell = {"workflow": MATRIX["workflows"][cell["platform"]]} | cell
    for values in itertools.product(*(VERSIONS[name] for name in cell["versions"])):
        chosen = dict(zip(cell["versions"], values, strict=True))
        newest = all(value == VERSIONS[name][-1] for name, value in chosen.items())
        variant = cell | chosen | {"local": newest and cell["name"] in MATRIX["local"]["names"]}
        variant["name"] += suffix(variant)
        if "jax" in others(variant):
            of_versions = MATRIX["select"]["other_jax"]
            variant["select"] = f"({variant['select']}) and ({of_versions})"
        yield variant


def others(cell: dict) -> dict[str, str]:
    """The cell's versions that are not the default."""
    return {name: cell[name] for name in cell["versions"] if cell[name] != VERSIONS[name][0]}


def suffix(cell: dict) -> str:
    return "".join(f"-{name}{version}" for name, version in others(cell).items())


def jobs(cell: dict) -> list[dict]:
    """What GitHub Actions runs of a cell: a GPU cell once for each number of GPUs."""
    sizes = cell.get("gpus", [])
    if len(sizes) < 2:
        return [cell | {"job": cell["name"], "gpus": sum(sizes)}]
    return [cell | {"job": f"{cell['name']}-{size}-gpus", "gpus": size} for size in sizes]


def run(cell: dict, extra: list[str]) -> dict:
    """Runs a cell and returns its summary; `ok` says whether it passed."""
    start = time.monotonic()
    summary = {"cell": cell["name"], "ok": False, "passed": 0, "failed": 0, "skipped": 0}
    try:
        python = interpreter(cell)
        found = probe(cell, python)
        summary |= {key: found[key] for key in ("versions", "device")}
        if error := misfit(cell, found):
            summary["error"] = error
        elif "command" in cell:
            summary["ok"] = command(cell, python) == 0
        else:
            summary |= pytest(cell, python, extra)
    except subprocess.CalledProcessError as error:
        summary["error"] = f"{pathlib.Path(error.cmd[0]).name} ended with {error.returncode}"
    done = {"commit": commit(), "date": datetime.date.today().isoformat()}
    return summary | done | {"seconds": round(time.monotonic() - start, 1)}


def commit() -> str:
    """Of the sources that were tested."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def probe(cell: dict, python: str) -> dict:
    """What the cell meets: versions, platform, device."""
    done = subprocess.run(
        [python, "-c", PROBE],
        cwd=ROOT,
        env=os.environ | environment(cell),
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def misfit(cell: dict, found: dict) -> str:
    """Why what was found is not what the cell's name says; else empty."""
    if (found["platform"] == "gpu") != (cell["platform"] == "gpu"):
        return f"{cell['name']} does not run on {found['device']}"
    pairs = [(name, cell[name], found["versions"].get(name, "none")) for name in cell["versions"]]
    wrong = [f"{name} must be {want}; got {name}={got}" for name, want, got in pairs if want != got]
    remedy = f"`ci/matrix.py venv {cell['name']}` installs the cell's"
    return "; ".join([*wrong, remedy]) if wrong else ""


def command(cell: dict, python: str) -> int:
    """The exit status; "python" is the cell's interpreter."""
    words = [{"python": python}.get(word, word) for word in cell["command"]]
    return shell(words, environment(cell) | {"PYTHON": python})


def pytest(cell: dict, python: str, extra: list[str]) -> dict:
    folders = [f"tests/{name}" for name in cell["tests"] if (ROOT / "tests" / name).is_dir()]
    # Tests share the GPUs of one machine, and its cores are spread over them otherwise.
    by = ["--dist", cell.get("dist", "loadfile"), "--no-loadscope-reorder"]
    parallel = [] if cell["platform"] == "gpu" else ["-n", "auto", *by]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        chosen = ["-m", cell["select"], *(["-k", cell["keyword"]] if "keyword" in cell else [])]
        chosen += cell.get("options", [])
        arguments = ["-q", *parallel, *chosen, f"--junitxml={report}", *folders, *extra]
        test = [python, "-m", "pytest", *arguments]
        status = shell(test, environment(cell)) if folders else NO_TESTS
        count = counts(report) if report.exists() else {"passed": 0}
    enough = count["passed"] > 0 or not cell.get("must_run")
    return count | {"ok": status in (0, NO_TESTS) and enough}


def counts(report: pathlib.Path) -> dict[str, int]:
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    number = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    return {"passed": passed, "failed": failed, "skipped": number["skipped"]}


def interpreter(cell: dict) -> str:
    """The Python that runs a cell, after its venv has been made where it has one."""
    if cell["platform"] == "cpu":
        return venv(cell)
    # Nothing is installed: this is what an installation would have built.
    for package in MATRIX["axes"]["package"]:
        if (ROOT / "packages" / package / "setup.py").exists():
            shell([sys.executable, "-m", f"expertmesh.{package}._native"], environment(cell))
    return sys.executable


def venv(cell: dict) -> str:
    """The Python of the cell's venv, which is made on first use; make's words go to stderr."""
    options = make_options(cell)
    subprocess.run(
        ["make", "setup", *(f"{key}={value}" for key, value in options.items())],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
    )
    return str(ROOT / options["VENV"] / "bin/python")


def make_options(cell: dict) -> dict[str, str]:
    """The Makefile's variables that make the cell's venv."""
    packages = list(cell.get("with", []))
    if "without_ptxas" in cell and not shutil.which("ptxas"):
        packages += cell["without_ptxas"]
    extra = CUDA if cell["platform"] == "gpu" else cell.get("extra", "")
    own = packages or extra or others(cell)
    if not own:
        return {"VENV": ".venv"}
    # One for all cells of the same versions, unless they add packages to them.
    name = cell["name"] if packages or "extra" in cell else cell["platform"] + suffix(cell)
    options = {
        "VENV": f".venvs/{name}",
        "GROUP": "test",
        "EXTRA": extra,
        "WITH": " ".join(packages),
    }
    options |= {"ALONE": " ".join(cell["alone"])} if "alone" in cell else {}
    options |= {name.upper(): version for name, version in others(cell).items()}
    return options | ({"UNPINNED": cell["unpinned"]} if "unpinned" in cell else {})


def environment(cell: dict) -> dict[str, str]:
    if cell["platform"] == "cpu":
        return {"JAX_PLATFORMS": "cpu"} | cell.get("env", {})
    sources = [str(ROOT / "packages" / package / "src") for package in MATRIX["axes"]["package"]]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": os.pathsep.join(sources + inherited)}


def shell(
    command: list[str], env: dict[str, str] | None = None, folder: pathlib.Path = ROOT
) -> int:
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=folder, env=os.environ | (env or {})).returncode


def main() -> int:
    arguments, extra = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, extra = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="print the names of the cells")
    listing.add_argument("--json", action="store_true", help="as GitHub Actions' matrix")
    listing.add_argument("--platform", choices=MATRIX["axes"]["platform"])
    listing.add_argument("--workflow", choices=sorted({c["workflow"] for c in cells().values()}))
    listing.add_argument("--local", action="store_true", help="the cells that .ci/run adds")
    running = verbs.add_parser("run", help="run cells; arguments after -- go to pytest")
    running.add_argument("names", nargs="+", metavar="NAME")
    running.add_argument("--summary", type=pathlib.Path, help="write JSON, a list of one per cell")
    making = verbs.add_parser("venv", help="make a cell's venv and print its interpreter")
    making.add_argument("names", nargs=1, metavar="NAME")
    options = parser.parse_args(arguments)

    every = cells()
    if options.verb == "list":
        chosen = [c for c in every.values() if options.platform in (None, c["platform"])]
        chosen = [c for c in chosen if options.workflow in (None, c["workflow"])]
        chosen = [c for c in chosen if c["local"] or not options.local]
        print(
            json.dumps({"include": [job for c in chosen for job in jobs(c)]})
            if options.json
            else "\n".join(c["name"] for c in chosen)
        )
        return 0

    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"no cell is named {', '.join(unknown)}; `list` prints the names")
    if options.verb == "venv":
        print(venv(every[options.names[0]]))
        return 0
    summaries = [run(every[name], extra) for name in options.names]
    for s in summaries:
        tests = f"{s['passed']} passed, {s['failed']} failed, {s['skipped']} skipped"
        state = "ok" if s["ok"] else "FAILED"
        print(f"{state:6} {s['cell']}: {tests}, {s['seconds']} s {s.get('error', '')}".rstrip())
    if options.summary:
        options.summary.parent.mkdir(parents=True, exist_ok=True)
        options.summary.write_text(json.dumps(summaries, indent=1) + "\n")
    failed = sum(not s["ok"] for s in summaries)
    print(f"{len(summaries) - failed} passed, {failed} failed", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
