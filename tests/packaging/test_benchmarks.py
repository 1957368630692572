"""Every benchmark runs, on small shapes: what only a GPU machine runs breaks unseen."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from cases.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNNABLE = load_script(ROOT / "benchmarks/__init__.py").runnable()
# Of seconds; the others are run with all that is long.
QUICK = {"group_bias"}
ALONE = {"compile_time", "moe_block", "dispatch"}  # minutes, or programs of several GPUs


def python(*arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in RUNNABLE
        if name not in ALONE
    ],
)
def test_each_runs_and_writes_its_rows(name, tmp_path):
    done = python("-m", f"benchmarks.{name}", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows and all(row["value"] >= 0 and row["reference"] for row in rows)


def test_each_finds_what_it_imports():
    names = ", ".join(f"benchmarks.{name}" for name in RUNNABLE)
    done = python("-c", f"import {names}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [("group_bias", 1), ("moe_block", 3)])
def test_a_tree_by_turns_with_itself(name, count, tmp_path):
    done = python("-m", "benchmarks.turns", ".", name, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == count
    for row in rows:
        assert row["case"].startswith(f"{name}: ") and "ours once more" in row["reference"]


def test_a_turn_says_for_how_long_it_has_lasted(tmp_path):
    """So that a lane that waits in its turn for good can be ended."""
    turn = load_script(ROOT / "benchmarks/_measure.py").Turns(tmp_path, 0, 1, until=0)
    assert turn.seconds_held() == 0
    with turn.mine():
        assert 0 <= turn.seconds_held() < 600
        os.utime(tmp_path / "held0", (0, 0))
        assert turn.seconds_held() > 1e6
    assert turn.seconds_held() == 0
