"""ci/: the matrix, the pins and the search for an interpreter."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from cases.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
MATRIX = tomllib.loads((ROOT / "ci/matrix.toml").read_text())


def matrix(*arguments):
    command = [sys.executable, ROOT / "ci/matrix.py", *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def cells():
    """The program as a module."""
    return load("matrix")


def load(name):
    return load_script(ROOT / f"ci/{name}.py")


def listed(*options):
    """The jobs that GitHub Actions makes of the cells."""
    return json.loads(matrix("list", "--json", *options).stdout)["include"]


def test_names_are_unique_and_short_on_the_default_versions():
    names = matrix("list").stdout.split()
    assert len(names) == len(set(names))
    packages, kinds = ["core", "ep", "flax_moe", "train"], ["single", "multi"]
    for platform in ["cpu", "gpu"]:
        assert {f"{p}-{k}-{platform}" for p in packages for k in kinds} <= set(names)
    assert {"aot", "newest", "core-multi-cpu-jax0.12.0.1"} <= set(names)


def test_each_pair_of_versions_has_cells_that_compile_and_cells_for_gpus():
    cells, versions = listed(), MATRIX["versions"]
    pairs = set(itertools.product(versions["jax"], versions["triton"]))
    assert len(pairs) == 4 and ("0.12.0.1", "3.9.0") in pairs
    compiling = [cell for cell in cells if cell.get("tests") == ["aot"] and cell["versions"]]
    assert {(cell["jax"], cell["triton"]) for cell in compiling} == pairs and len(compiling) == 4
    for package, kind in itertools.product(
        ["core", "ep", "flax_moe", "train"], ["single", "multi"]
    ):
        name = f"{package}-{kind}-gpu"
        of = [cell for cell in cells if cell["name"].startswith(name)]
        assert sorted((cell["jax"], cell["triton"]) for cell in of) == sorted(pairs), name
    exchange = [cell for cell in cells if cell["name"].startswith("nvlink")]
    sizes = {(cell["jax"], cell["triton"], cell["gpus"]) for cell in exchange}
    assert sizes == {(*pair, size) for pair in pairs for size in (2, 4)}


def test_ci_run_has_the_newest_pair():
    local = matrix("list", "--local").stdout.split()
    assert [name for name in local if "aot" in name] == ["aot-jax0.12.0.1-triton3.9.0"]
    assert sorted(local)[1:] == ["cpu-jax0.12.0.1", "extras", "notebooks"]


def test_json_is_what_actions_expects():
    jobs = listed()
    assert list(dict.fromkeys(job["name"] for job in jobs)) == matrix("list").stdout.split()
    assert len({job["job"] for job in jobs}) == len(jobs) < 256
    gpu = listed("--platform", "gpu")
    assert {job["gpus"] for job in gpu} == {1, 2, 4}
    assert {job["gpus"] for job in jobs if job["platform"] == "cpu"} == {0}


def test_a_package_cell_runs_every_folder_of_tests():
    """`make test` alone runs this folder: it does not depend on the JAX version."""
    named = {name for cell in listed() for name in cell.get("tests", [])}
    tests = ROOT / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")}
    assert folders - named == {"packaging"}


def test_unknown_cells_are_refused():
    result = matrix("run", "core-single-tpu")
    assert result.returncode == 2
    assert "no cell is named core-single-tpu" in result.stderr


def test_a_gpu_cell_fails_without_a_gpu(tmp_path):
    summary = tmp_path / "out/summary.json"
    result = matrix("run", "core-single-gpu", "--summary", str(summary))
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "0 passed, 1 failed"
    (cell,) = json.loads(summary.read_text())
    assert cell["cell"] == "core-single-gpu" and not cell["ok"] and cell["seconds"] > 0


@pytest.mark.parametrize("name", ["constraints.txt", "pins.in"])
def test_pins_name_no_address(name):
    lines = (ROOT / "ci" / name).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .*)?", pin) for pin in pins)
    versions = MATRIX["versions"]
    oldest = {name: versions[name][0] for name in ("jax", "triton", "jax-triton")}
    oldest |= {"jaxlib": oldest["jax"]}
    oldest |= {f"nvidia-nccl-{cuda}": versions["nccl"][0] for cuda in ("cu12", "cu13")}
    assert {f"{name}=={version}" for name, version in oldest.items()} <= set(pins)


def bounds(requirement):
    """{operator: release}, as numbers without zeros at the end."""
    found = {}
    for each in requirement.specifier:
        release = list(Version(each.version).release)
        while release[-1] == 0:
            release.pop()
        assert found.setdefault(each.operator, release) is release
    return found


def admitted(name):
    """What the metadata must say of a distribution: from the oldest tested, below the minor after the newest."""
    versions = sorted(map(Version, MATRIX["versions"][name]))
    least = Requirement(f"x>={versions[0]}")
    if name == "nccl":
        return bounds(least)
    major, minor = versions[-1].release[:2]
    return bounds(least) | bounds(Requirement(f"x<{major}.{minor + 1}"))


@pytest.mark.parametrize("package", ["core", "ep", "flax_moe", "train"])
def test_the_metadata_admits_what_is_tested(package):
    project = tomllib.loads((ROOT / f"packages/{package}/pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = {
        extra: [Requirement(text) for text in texts]
        for extra, texts in ({"": project["dependencies"]} | extras).items()
    }
    kind = {"jax": "jax", "triton": "triton", "jax-triton": "jax-triton"}
    kind |= {f"nvidia-nccl-{cuda}": "nccl" for cuda in ("cu12", "cu13")}
    for extra, each in needs.items():
        named = {need.name: need for need in each if need.name in kind}
        for name, need in named.items():
            assert bounds(need) == admitted(kind[name]), f"{package}[{extra}]: {need}"
        if extra == "":
            assert "jax" in named
        if package == "core" and extra.startswith("cuda"):
            nccl = f"nvidia-nccl-{extra.replace('da', '')}"
            assert named.keys() == {"jax", "triton", "jax-triton", nccl}
            assert named["jax"].extras == {extra}
    assert bounds(Requirement("jax>=0.11.2,<0.13")) == admitted("jax")


def test_a_cell_runs_on_the_versions_of_its_name_alone(cells):
    cell = cells.cells()["aot-jax0.12.0.1"]

    def misfit(platform="cpu", **versions):
        found = {"jax": "0.12.0.1", "triton": "3.8.0"} | versions
        found = {name: version for name, version in found.items() if version}
        return cells.misfit(cell, {"platform": platform, "device": "x", "versions": found})

    assert misfit() == ""
    remedy = "; `ci/matrix.py venv aot-jax0.12.0.1` installs the cell's"
    assert misfit(jax="0.11.2") == f"jax must be 0.12.0.1; got jax=0.11.2{remedy}"
    assert misfit(triton="") == f"triton must be 3.8.0; got triton=none{remedy}"
    assert misfit("gpu") == "aot-jax0.12.0.1 does not run on x"


def test_what_an_index_has_is_compared_with_what_was_tested(cells, monkeypatch):
    """A later patch passes but where --tested is asked for; what is older, or of another minor version, never."""
    monkeypatch.setitem(sys.modules, "matrix", cells)
    fits = load("resolve_extras").fits
    assert fits("0.12.0.1", "0.12.0.1", True) and fits("2.32.3", "", True)
    assert fits("0.12.1", "0.12.0.1", False) and not fits("0.12.1", "0.12.0.1", True)
    for other in ("0.11.2", "0.12.0", "0.13.0"):
        assert not fits(other, "0.12.0.1", False)


def pins_of(options, folder):
    """The constraints that `make setup` would write."""
    command = ["make", "-n", "setup", *(f"{key}={value}" for key, value in options.items())]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    said = subprocess.run(
        [*command, f"VENV={folder}"], cwd=ROOT, capture_output=True, text=True, env=environment
    ).stdout
    (edit,) = re.findall(r"^sed (?:.*\\\n)*.*", said, re.MULTILINE)
    subprocess.run(["sh", "-c", edit], cwd=ROOT, check=True)
    lines = (folder / "constraints.txt").read_text().splitlines()
    return dict(re.split(" ; |==", line)[:2] for line in lines)


def test_a_cells_venv_has_its_versions_and_the_other_pins(cells, tmp_path):
    every = cells.cells()

    def pins(name):
        return pins_of(cells.make_options(every[name]) | {"VENV": tmp_path}, tmp_path)

    plain, pair = pins("aot"), pins("aot-jax0.12.0.1-triton3.9.0")
    jax = {"jax", "jaxlib"} | {
        f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt")
    }
    assert {n for n in pair if plain[n] != pair[n]} == jax | {"triton"}
    assert plain.keys() - pair.keys() == {"nvidia-nccl-cu12", "nvidia-nccl-cu13"}
    assert {pair[name] for name in jax} == {"0.12.0.1"} and pair["triton"] == "3.9.0"
    assert {*every["aot"]["with"], *every["aot"]["without_ptxas"]} <= plain.keys()
    assert pins("newest") == {}
    torch = pins("transformers")
    assert plain.keys() - torch.keys() == {n for n in plain if re.match("triton|nvidia-", n)}
    assert pins("maxtext") == pins("levanter") == plain
    assert "ALONE" not in cells.make_options(every["maxtext"])
    alone = cells.make_options(every["levanter"])
    assert alone["ALONE"].startswith("marin-levanter==") and "levanter" not in alone["WITH"]
    command = ["make", "-n", "setup", f"VENV={tmp_path}", "ALONE=some==1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(r"install -q --no-deps --python \S+ some==1$", said, re.MULTILINE)
    gpu = cells.make_options(every["core-single-gpu-triton3.9.0"])
    assert gpu["EXTRA"] == "cuda13" and gpu["TRITON"] == "3.9.0" and "JAX" not in gpu
    assert cells.make_options(every["full"]) == {"VENV": ".venv"}


def gpu_summaries():
    paths = sorted((ROOT / "ci/summaries").glob("*.json"))
    return [(path.name, s) for path in paths for s in json.loads(path.read_text())]


def test_the_summaries_of_gpu_cells_are_of_runs_that_passed():
    cells = {cell["name"]: cell for cell in listed("--platform", "gpu")}
    found = [s for _, s in gpu_summaries()]
    assert found and {s["cell"] for s in found} <= cells.keys()
    assert all(s["ok"] and s["passed"] and not s["failed"] for s in found)


def test_the_summaries_are_of_their_cells_versions():
    cells = {cell["name"]: cell for cell in listed("--platform", "gpu")}
    for file, s in gpu_summaries():
        want = {name: cells[s["cell"]][name] for name in cells[s["cell"]]["versions"]}
        assert {name: s["versions"].get(name) for name in want} == want, file


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_summaries_are_of_commits_before_this_one():
    """A summary of another history, or of no commit, says nothing of this tree."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs git and the whole history")
    for commit, name in {s["commit"]: name for name, s in gpu_summaries()}.items():
        found = git("merge-base", "--is-ancestor", commit, "HEAD")
        assert found.returncode == 0, f"{name}: {commit} is no commit before this one"


@pytest.fixture
def interpreters(tmp_path):
    """A machine like a pyenv one: the shim of 3.12 fails, python3 is too old, a folder has 3.12."""
    real = f"{sys.version_info.major}.{sys.version_info.minor}"
    shims, versions = tmp_path / "shims", tmp_path / "pyenv/versions"
    shims.mkdir()
    (shims / f"python{real}").write_text("#!/bin/sh\nexit 127\n")
    (shims / "python3").write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    for shim in shims.iterdir():
        shim.chmod(0o755)
    folder = versions / f"{real}.1/bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    environment = {"PATH": f"{shims}:/usr/bin:/bin", "HOME": str(tmp_path)}
    return real, environment | {"PYENV_ROOT": str(tmp_path / "pyenv")}


def find_python(real, environment):
    command = [ROOT / "ci/find-python", real]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_find_python_looks_behind_failing_shims(interpreters):
    result = find_python(*interpreters)
    assert result.returncode == 0
    assert os.path.samefile(result.stdout.strip(), sys.executable)


def test_find_python_takes_the_one_it_is_told(interpreters):
    real, environment = interpreters
    told = environment | {"PYTHON": sys.executable, "PYENV_ROOT": "/none"}
    assert os.path.samefile(find_python(real, told).stdout.strip(), sys.executable)


def test_find_python_says_what_to_do(interpreters):
    real, environment = interpreters
    result = find_python("3.99", environment)
    assert result.returncode == 1
    assert "set PYTHON=" in result.stderr


def test_try_wheels_finds_a_python(interpreters, tmp_path):
    """Where `python3` is too old; it stops here for want of git."""
    _, environment = interpreters
    (tmp_path / "shims/git").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "shims/git").chmod(0o755)
    command = [ROOT / "ci/try-wheels", tmp_path / "wheels"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode and "too old" not in result.stderr
    program = "import sys; sys.exit(sys.version_info < (3, 12))"
    subprocess.run([tmp_path / "wheels/env/bin/python", "-c", program], check=True)


WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()
}


def listings(workflow):
    """{job: the options of the list that its matrix is made of}."""
    plan = workflow["jobs"]["plan"]
    (step,) = [step for step in plan["steps"] if step.get("id") == "list"]
    (options,) = re.findall(r"ci/matrix.py list --json (.*?)\)", step["run"])
    found = {}
    for job, body in workflow["jobs"].items():
        if isinstance(body.get("strategy", {}).get("matrix"), str):
            output = re.fullmatch(
                r"\$\{\{ fromJSON\(needs.plan.outputs.(\w+)\) \}\}", body["strategy"]["matrix"]
            )[1]
            assert plan["outputs"][output] == f"${{{{ steps.list.outputs.{output} }}}}"
            found[job] = options.replace('"$platform"', output).split()
    return found


def steps_of(body):
    return " ".join(step["run"] for step in body["steps"] if "run" in step)


def test_each_cell_is_run_by_one_workflow():
    """But the one that stands for others in .ci/run."""
    run = []
    for name in ("ci", "nightly"):
        for job, options in listings(WORKFLOWS[name]).items():
            assert 'ci/matrix.py run "$CELL" --summary' in steps_of(WORKFLOWS[name]["jobs"][job])
            run += [each["job"] for each in listed(*options)]
    jobs = {job["job"]: job["workflow"] for job in listed()}
    assert sorted(run) == sorted(name for name in jobs if jobs[name] != "local")


def test_workflows_run_by_the_clock_and_on_demand():
    minutes = {}
    for name in ("ci", "nightly"):
        on = WORKFLOWS[name][True]  # YAML 1.1 reads the key "on" as true
        (clock,) = on["schedule"]
        assert "workflow_dispatch" in on
        minutes[name] = clock["cron"].split()
    assert {"push", "pull_request"} <= WORKFLOWS["ci"][True].keys()
    assert minutes["ci"][2:] == ["*", "*", "0"], "weekly"
    assert minutes["nightly"][2:] == ["*", "*", "*"], "daily"
    assert "full" in [job["name"] for job in listed("--workflow", "nightly", "--platform", "cpu")]


def test_the_whole_history_is_there_where_every_test_runs():
    """Without it the commits of summaries are not looked at."""
    (checkout,) = [
        step.get("with", {})
        for step in WORKFLOWS["ci"]["jobs"]["readme"]["steps"]
        if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert "make test" in steps_of(WORKFLOWS["ci"]["jobs"]["readme"])
    assert checkout.get("fetch-depth") == 0


def test_wheels_are_tried_and_released_for_the_pythons_that_the_metadata_names():
    jobs = [WORKFLOWS["ci"]["jobs"]["wheels"], WORKFLOWS["release"]["jobs"]["wheel"]]
    pythons = {tuple(job["strategy"]["matrix"]["python"]) for job in jobs}
    prefix = "Programming Language :: Python :: "
    for path in (ROOT / "packages").glob("*/pyproject.toml"):
        classifiers = tomllib.loads(path.read_text())["project"]["classifiers"]
        minors = [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix + "3.")]
        assert pythons == {tuple(minors)}, path
    row = re.search(r"^\| Python \| (.*?) \|", (ROOT / "docs/support.md").read_text(), re.MULTILINE)
    assert row and pythons == {tuple(row[1].split(", "))}


def test_a_release_is_of_the_repository_that_its_metadata_names():
    environment = os.environ | {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "a/b"}
    result = subprocess.run(
        [ROOT / "ci/build-release", "ep-v0.1.0"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 1
    assert "packages/ep/pyproject.toml must be https://host/a/b" in result.stderr


def test_gpu_cells_run_where_the_gpus_are():
    """On runners with as many, in a venv of the cell's versions, if the repository says that there are any."""
    platforms = {
        (name, job): {each["platform"] for each in listed(*options)}
        for name in ("ci", "nightly")
        for job, options in listings(WORKFLOWS[name]).items()
    }
    assert [where for where, found in platforms.items() if "gpu" in found] == [("nightly", "gpu")]
    jobs = WORKFLOWS["nightly"]["jobs"]
    assert platforms["nightly", "gpu"] == {"gpu"}
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gpu-${{ matrix.gpus }}"]
    assert jobs["gpu"]["if"] == "vars.EXPERTMESH_GPU_RUNNERS == 'true'"
    assert 'python=$(python ci/matrix.py venv "$CELL")\n"$python" ci/matrix.py run' in steps_of(
        jobs["gpu"]
    )
    assert "pull_request" not in WORKFLOWS["nightly"][True], "others' code on one's own machines"


@pytest.fixture
def report(monkeypatch, cells):
    monkeypatch.setitem(sys.modules, "matrix", cells)
    return load("report")


def test_the_tables_of_versions_are_made_from_the_cells():
    command = [sys.executable, ROOT / "ci/report.py", "table", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python ci/report.py table`"


def test_a_row_of_the_table_has_what_the_cells_and_the_summaries_have(report, monkeypatch):
    def ran(device, triton):
        return "file", {"versions": {"python": "3.12.3", "triton": triton}, "device": device}

    found = [ran("1 x B", "3.10.0"), ran("4 x A", "3.9.0"), ran("2 x A", "3.9.0")]
    monkeypatch.setattr(report, "summaries", lambda: found)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in report.table().splitlines()]
    by_name = {row[0]: row[1:] for row in rows}
    compiled, runs = "3.8.0, 3.9.0", "3.9.0 on 2, 4 x A; 3.10.0 on 1 x B"
    assert by_name["triton"] == [">=3.8, <3.10", "-", compiled, runs]
    assert by_name["jax"][1:] == ["0.11.2, 0.12.0.1", "0.11.2, 0.12.0.1", "-"]
    assert by_name["NCCL"][1:] == ["-", "-", "-"] and by_name["Python"][-1] == "3.12.3"


def test_the_badge_counts_jobs_that_said_nothing(report, tmp_path):
    jobs = [job["job"] for job in listed("--platform", "gpu")]
    assert report.badge(tmp_path) == {
        "schemaVersion": 1,
        "label": "GPU cells",
        "message": f"0 of {len(jobs)} passed",
        "color": "red",
    }

    def end(job, ok):
        path = tmp_path / f"gpu-{job}/summary.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([{"ok": ok, "date": "2026-11-24"}]))

    for job in jobs[1:]:
        end(job, True)
    some = report.badge(tmp_path)
    assert some["message"] == f"{len(jobs) - 1} of {len(jobs)} passed, 2026-11-24"
    end(jobs[0], False)
    assert report.badge(tmp_path) == some and some["color"] == "red"
    end(jobs[0], True)
    assert report.badge(tmp_path)["color"] == "brightgreen"
