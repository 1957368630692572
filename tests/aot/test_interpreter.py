"""Bodies of Triton kernels on a CPU, by Triton's interpreter: the tests of few rows that a GPU runs.

Not the other products, which are Gluon and CUDA C++, nor what writes 8 bits, by machine instructions or in types that
NumPy lacks.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from cases.marks import needs_triton

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.aot, needs_triton]


def test_kernels_of_few_rows():
    """In a process of its own: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += [
        "-k",
        "gathered or not products and not quantization",
        "tests/core/kernels/test_small.py",
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "5 passed" in done.stdout
