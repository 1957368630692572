"""The kernels of the transport "nvlink", compiled for GPUs that are not there."""

import pathlib
import re
import shutil
import subprocess

import pytest

from expertmesh.ep import _native

pytestmark = pytest.mark.aot


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_kernels_compile_and_keep_their_values_in_registers(architecture, tmp_path):
    tools = _native.Tools(str(shutil.which("nvcc")), pathlib.Path("not-needed"))
    command = _native.compile_commands(tools, architecture, tmp_path)[0]
    assert command[-3].endswith("exchange.cu")
    said = subprocess.run([*command, "-Xptxas=-v"], capture_output=True, text=True, check=True)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.stderr)
    # Dispatch of rows of whole words or not; the same of combine, of three types as three types.
    assert len(spilled) == 2 + 3 * 3 * 2
    assert set(spilled) == {("0", "0")}
