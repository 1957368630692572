"""The kernels of the transport "nvlink", compiled for GPUs that are not there."""

import pathlib
import re
import subprocess

import pytest

from expertmesh.ep import _native
from expertmesh.ep._native import kernels

pytestmark = pytest.mark.aot


@pytest.fixture
def headers():
    found = kernels.find_headers()
    # Dispatch and combine need none of NCCL's, whose wheel has 200 MB.
    if isinstance(found, str) and "NCCL" not in found:
        pytest.skip(found)
    return (
        found if isinstance(found, kernels.Headers) else kernels.Headers(kernels.find_cuda(), None)
    )


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_kernels_compile_and_keep_their_values_in_registers(architecture, headers, tmp_path):
    triton = pytest.importorskip("triton")
    names = _native.host().KERNELS
    # Dispatch of rows of whole words or not; the same of combine, of three types as three types; both by row.
    assert len(set(names)) == 2 + 3 * 3 * 2 + 2
    compiled = kernels.exchange(architecture, headers, names).compile()
    file = tmp_path / "exchange.cubin"
    file.write_bytes(compiled.code)
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-res-usage", file]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.findall(r"Function (\S+):\n.*STACK:(\d+) .*LOCAL:(\d+)", said)
    assert {name for name, *_ in used} == set(compiled.names)
    assert {(stack, local) for _, stack, local in used} == {("0", "0")}


def test_peers_compile(headers):
    if headers.nccl is None or headers.nccl_version >= kernels.HOST_TELLS:
        pytest.skip("needs the headers of NCCL 2.28")
    assert kernels.peers("sm_90a", headers).compile().code
