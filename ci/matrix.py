"""Lists and runs the CI cells of matrix.toml. Standard library only.

    ci/matrix.py list [--json] [--platform cpu] [--local]
    ci/matrix.py run NAME... [--summary PATH] [-- PYTEST-ARGUMENTS...]

A CPU cell makes its venv under .venvs/ on first use. A GPU cell uses the interpreter that runs this
program and installs nothing: the packages come from PYTHONPATH, so it works offline.
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
MATRIX = tomllib.loads((ROOT / "ci/matrix.toml").read_text())
NO_TESTS = 5  # pytest's exit status
PROBE = """
import importlib.metadata, json, sys
import jax
names = "jax jaxlib flax numpy triton jax-triton nvidia-nccl-cu13".split()
found = {}
for d in importlib.metadata.distributions():
    found.setdefault(d.metadata["Name"], d.version)  # the first on the path is what is imported
versions = {"python": sys.version.split()[0]} | {n: found[n] for n in names if n in found}
devices = jax.devices()
device = f"{len(devices)} x {devices[0].device_kind}"
print(json.dumps({"versions": versions, "platform": devices[0].platform, "device": device}))
"""


def cells() -> dict[str, dict]:
    """Every cell by name: the product of the axes, then the ones with a name of their own."""
    named = {}
    for values in itertools.product(*MATRIX["axes"].values()):
        cell = dict(zip(MATRIX["axes"], values, strict=True))
        if any(rule.items() <= cell.items() for rule in MATRIX["exclude"]):
            continue
        default = cell["jax"] == MATRIX["default_jax"]
        name = "-".join(values[:3]) + ("" if default else f"-jax{cell['jax']}")
        select = MATRIX["select"]
        selected = f"({select[cell['platform']]}) and ({select[cell['processes']]})"
        if not default:
            selected += f" and ({select['other_jax']})"
        tests = MATRIX["tests"][cell["package"]]
        named[name] = cell | {"name": name, "tests": tests, "select": selected}
    for name, cell in MATRIX["cells"].items():
        named[name] = {"platform": "cpu", "jax": MATRIX["default_jax"]} | cell | {"name": name}
    return named


def is_local(cell: dict) -> bool:
    """Whether .ci/run adds the cell to `make test`."""
    rule = MATRIX["local"]
    return cell["name"] in rule["names"] or rule["cells"].items() <= cell.items()


def run(cell: dict, extra: list[str]) -> dict:
    """Runs a cell and returns its summary; `ok` says whether it passed."""
    start = time.monotonic()
    summary = {"cell": cell["name"], "ok": False, "passed": 0, "failed": 0, "skipped": 0}
    try:
        if "command" in cell:
            summary["ok"] = shell(cell["command"]) == 0
        else:
            summary |= pytest(cell, extra)
    except subprocess.CalledProcessError as error:
        summary["error"] = f"{pathlib.Path(error.cmd[0]).name} ended with {error.returncode}"
    done = {"commit": commit(), "date": datetime.date.today().isoformat()}
    return summary | done | {"seconds": round(time.monotonic() - start, 1)}


def commit() -> str:
    """Of the sources that were tested."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def pytest(cell: dict, extra: list[str]) -> dict:
    python, env = interpreter(cell), environment(cell)
    probe = subprocess.run(
        [python, "-c", PROBE], cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, check=True
    )
    found = json.loads(probe.stdout.splitlines()[-1])
    if (found.pop("platform") == "gpu") != (cell["platform"] == "gpu"):
        return found | {"error": f"{cell['name']} does not run on {found['device']}"}
    folders = [f"tests/{name}" for name in cell["tests"] if (ROOT / "tests" / name).is_dir()]
    # Tests share the GPUs of one machine, and its cores are spread over them otherwise.
    by = ["--dist", cell.get("dist", "loadfile"), "--no-loadscope-reorder"]
    parallel = [] if cell["platform"] == "gpu" else ["-n", "auto", *by]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        chosen = ["-m", cell["select"], *(["-k", cell["keyword"]] if "keyword" in cell else [])]
        arguments = ["-q", *parallel, *chosen, f"--junitxml={report}", *folders]
        status = shell([python, "-m", "pytest", *arguments, *extra], env) if folders else NO_TESTS
        count = counts(report) if report.exists() else {"passed": 0}
    enough = count["passed"] > 0 or not cell.get("must_run")
    return found | count | {"ok": status in (0, NO_TESTS) and enough}


def counts(report: pathlib.Path) -> dict[str, int]:
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    number = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    return {"passed": passed, "failed": failed, "skipped": number["skipped"]}


def interpreter(cell: dict) -> str:
    """The Python that runs a cell, after its venv has been made where it has one."""
    if cell["platform"] == "gpu":
        # Nothing is installed: this is what an installation would have built.
        for package in ("core", "ep"):
            shell([sys.executable, "-m", f"expertmesh.{package}._native"], environment(cell))
        return sys.executable
    packages = list(cell.get("with", []))
    if not shutil.which("ptxas"):
        packages += cell.get("without_ptxas", [])
    venv, options = ".venv", {}
    if packages or cell["jax"] != MATRIX["default_jax"]:
        venv = f".venvs/{cell['name']}" if packages else f".venvs/jax-{cell['jax']}"
        options = {"JAX": cell["jax"], "GROUP": "test", "WITH": " ".join(packages)}
    options["VENV"] = venv
    subprocess.run(
        ["make", "setup", *(f"{key}={value}" for key, value in options.items())],
        cwd=ROOT,
        check=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
    )
    return str(ROOT / venv / "bin/python")


def environment(cell: dict) -> dict[str, str]:
    if cell["platform"] == "cpu":
        return {"JAX_PLATFORMS": "cpu"} | cell.get("env", {})
    sources = [str(ROOT / "packages" / package / "src") for package in MATRIX["axes"]["package"]]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": os.pathsep.join(sources + inherited)}


def shell(command: list[str], env: dict[str, str] | None = None) -> int:
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | (env or {})).returncode


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
    listing.add_argument("--local", action="store_true", help="the cells that .ci/run adds")
    running = verbs.add_parser("run", help="run cells; arguments after -- go to pytest")
    running.add_argument("names", nargs="+", metavar="NAME")
    running.add_argument("--summary", type=pathlib.Path, help="write JSON, a list of one per cell")
    options = parser.parse_args(arguments)

    every = cells()
    if options.verb == "list":
        chosen = [c for c in every.values() if options.platform in (None, c["platform"])]
        chosen = [c for c in chosen if is_local(c) or not options.local]
        print(
            json.dumps({"include": chosen})
            if options.json
            else "\n".join(c["name"] for c in chosen)
        )
        return 0

    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"no cell is named {', '.join(unknown)}; `list` prints the names")
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
