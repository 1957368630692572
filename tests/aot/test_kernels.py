"""Triton kernels assemble for the GPUs that they are for: no spills, shared memory within limits, tensor cores used."""

import pathlib
import re
import subprocess
import tempfile

import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.aot

triton = pytest.importorskip("triton", reason="needs triton: `ci/matrix.py run aot` installs it")
pytest.importorskip("jax_triton")

SHARED_LIMIT = 232448
MATRIX_INSTRUCTION = {90: "wgmma", 100: "tcgen05"}


def _compile(kernel, tiles, constants, arch, out="*bf16"):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {"NUM_PROGRAMS": 132, "BM": tiles.m, "BN": tiles.n, "BK": tiles.k}
    pointers = dict(zip(kernel.arg_names[:4], ("*bf16", "*bf16", "*i32", out), strict=True))
    signature = pointers | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _stack_bytes(cubin: bytes) -> int:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("which", ["rows", "rows_transposed", "weights", "weights_float32"])
def test_grouped_gemm(which, arch):
    from expertmesh.core.kernels import grouped_gemm as kernels

    sizes = {"C": 16384, "K": 4096, "N": 28672, "G": 8, "G_POW2": 8}
    if which.startswith("rows"):
        constants = sizes | {
            "TRANSPOSED": which == "rows_transposed",
            "GROUP_M": kernels.ROWS.group_m,
        }
        compiled = _compile(kernels._rows_kernel, kernels.ROWS, constants, arch)
    else:
        wide = which == "weights_float32"
        tiles = kernels._fit(kernels.WEIGHTS, sizes["N"], jnp.float32 if wide else jnp.bfloat16)
        compiled = _compile(
            kernels._weights_kernel, tiles, sizes, arch, "*fp32" if wide else "*bf16"
        )
    assert _stack_bytes(compiled.asm["cubin"]) == 0, "registers spill"
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert MATRIX_INSTRUCTION[arch] in compiled.asm["ptx"]
