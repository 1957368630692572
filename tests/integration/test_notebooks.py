"""Each notebook runs from its first cell to its last, on virtual devices, and is stored without results."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
PROGRAM = """
import json, sys
space = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
"""


def run(notebook, folder):
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, notebook],
        env=env | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "notebook",
    [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.full) for path in NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(notebook, tmp_path):
    result = run(notebook, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_results(notebook):
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4 and content["cells"][0]["cell_type"] == "markdown"
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_page_of_notebooks_lists_each():
    page = (ROOT / "docs/notebooks.md").read_text()
    assert len(NOTEBOOKS) == 5
    assert all(f"../examples/notebooks/{path.name}" in page for path in NOTEBOOKS)


def test_a_cell_that_fails_is_named(tmp_path):
    cell = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2"]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown"}, cell]}))
    result = run(tmp_path / "a.ipynb", tmp_path)
    assert result.returncode and 'File "cell 1", line 2' in result.stderr
