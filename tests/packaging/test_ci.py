"""ci/: the matrix, the pins and the search for an interpreter."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def matrix(*arguments):
    command = [sys.executable, ROOT / "ci/matrix.py", *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_names_are_unique_and_short_on_the_default_jax():
    names = matrix("list").stdout.split()
    assert len(names) == len(set(names))
    packages, kinds = ["core", "ep", "flax_moe"], ["single", "multi"]
    for platform in ["cpu", "gpu"]:
        assert {f"{p}-{k}-{platform}" for p in packages for k in kinds} <= set(names)
    assert {"aot", "core-multi-cpu-jax0.12.0.1"} <= set(names)
    assert not [name for name in names if "gpu-jax" in name]


def test_json_is_what_actions_expects():
    cells = json.loads(matrix("list", "--json").stdout)["include"]
    assert [cell["name"] for cell in cells] == matrix("list").stdout.split()
    assert all({"platform", "jax"} <= cell.keys() for cell in cells)
    gpu = json.loads(matrix("list", "--json", "--platform", "gpu").stdout)["include"]
    assert {cell["jax"] for cell in gpu} == {"0.11.2"}
    assert len(gpu) == 8, "two of each package, the exchange by nvlink, and the sanitizer"


def test_a_package_cell_runs_every_folder_of_tests():
    """`make test` alone runs this folder: it does not depend on the JAX version."""
    cells = json.loads(matrix("list", "--json").stdout)["include"]
    named = {name for cell in cells for name in cell.get("tests", [])}
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
    assert "jax==0.11.2" in pins


def test_the_summaries_of_gpu_cells_are_of_runs_that_passed():
    cells = json.loads(matrix("list", "--json", "--platform", "gpu").stdout)["include"]
    found = [
        s for path in (ROOT / "ci/summaries").glob("*.json") for s in json.loads(path.read_text())
    ]
    assert found and {s["cell"] for s in found} <= {cell["name"] for cell in cells}
    assert all(s["ok"] and s["passed"] and not s["failed"] for s in found)


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
