"""The examples run, on 1 device, on 6 and on 8; README and the landing page show one of them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from cases.covering import full

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(name, devices):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


def body(name):
    """An example without its docstring."""
    return (ROOT / "examples" / name).read_text().split("\n\n", 1)[1]


@pytest.mark.parametrize("devices", [full(1), 6, full(8)])
def test_own_model_runs(devices):
    out = run("own_model.py", devices)
    assert "loss" in out and "'ep'" in out


def test_the_quick_start_runs():
    out = run("quick_start.py", 1)
    assert re.search(r"\(4, 128, 256\) \[[\d ]+\] dropped 0", out)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_state_in_the_hosts_memory_changes_no_bit(devices):
    """Losses of the same digits: each step's but the first follows from an update."""
    hosted, plain = (line.split("]") for line in run("fewer_gpus.py", devices).splitlines())
    assert (hosted[0], plain[0]) == ("['pinned_host'", "['device'")
    assert hosted[1] == plain[1]
    losses = [float(loss) for loss in hosted[1].split()]
    assert len(losses) >= 3 and losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.full
def test_fp8_for_your_shape_runs():
    """A row for each recipe; the speed is that over bfloat16, and a CPU says that it emulates."""
    rows = [line.split(maxsplit=5) for line in run("fp8_for_your_shape.py", 1).splitlines()[2:]]
    assert [row[0] for row in rows] == ["bfloat16", "fp8_block", "fp8_current"]
    block = [float(row[1]) for row in rows]
    assert [float(row[2]) for row in rows] == pytest.approx([block[0] / b for b in block], abs=0.01)
    assert float(rows[0][4]) == 0 < float(rows[1][4])
    assert all("emulated" in row[5] for row in rows[1:])


def test_the_readme_shows_the_quick_start():
    shown = body("quick_start.py")
    assert f"```python\n{shown}```" in (ROOT / "README.md").read_text()
    assert len([line for line in shown.splitlines() if line]) <= 10


def test_the_pages_show_the_examples():
    """By the file: what is shown is what runs."""
    for page, name in (("index.md", "quick_start.py"), ("quick-start.md", "own_model.py")):
        assert f"{{literalinclude}} ../examples/{name}" in (ROOT / "docs" / page).read_text()


def test_the_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
