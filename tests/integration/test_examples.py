"""The examples run, on 1 device, on 6 and on 8, and the README shows what is run."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_model.py"


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 6, 8])
def test_own_model_runs(devices):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, EXAMPLE], env=env, capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    assert "loss" in out.stdout and "'ep'" in out.stdout


def test_the_readme_shows_the_example():
    body = EXAMPLE.read_text().split("\n\n", 1)[1]
    assert body in (ROOT / "README.md").read_text()
