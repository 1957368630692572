"""Triton kernels assemble for the GPUs that they are for: no spills, shared memory within limits, tensor cores used."""

import pathlib
import re
import subprocess
import tempfile

import jax.numpy as jnp
import pytest

from expertmesh.core.support import TRITON, missing_distribution

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        any(map(missing_distribution, TRITON)), reason=f"needs {' and '.join(TRITON)}"
    ),
]

SHARED_LIMIT = 232448
MATRIX_INSTRUCTION = {90: "wgmma", 100: "tcgen05"}


def _compile(kernel, types, tiles, constants, arch):
    """`types` of the operands before the constants: "*bf16", or the block of a TMA descriptor."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {"NUM_PROGRAMS": 132, "BM": tiles.m, "BN": tiles.n, "BK": tiles.k}
    types = [t if isinstance(t, str) else f"tensordesc<bf16{list(t)}>" for t in types]
    operands = dict(zip(kernel.arg_names[: len(types)], types, strict=True))
    signature = operands | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t[0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _stack_bytes(cubin: bytes) -> int:
    import triton

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
        tiles, transposed = kernels.ROWS, which == "rows_transposed"
        weight = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
        types = [(tiles.m, tiles.k), weight, "*i32", "*bf16"]
        constants = sizes | {"TRANSPOSED": transposed, "GROUP_M": tiles.group_m}
        compiled = _compile(kernels._rows_kernel, types, tiles, constants, arch)
    else:
        wide = which == "weights_float32"
        tiles = kernels._fit(kernels.WEIGHTS, sizes["N"], jnp.float32 if wide else jnp.bfloat16)
        blocks = [(tiles.k, tiles.m), (tiles.k, tiles.n)]
        types = [*blocks, "*i32", "*bf16", "*bf16", "*fp32" if wide else "*bf16"]
        compiled = _compile(kernels._weights_kernel, types, tiles, sizes, arch)
    _check(compiled, arch)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [28672, 128])
def test_weight_gradients_on_hopper(out, width):
    from triton.experimental.gluon import language as gl

    from expertmesh.core.kernels import grouped_gemm as kernels
    from expertmesh.core.kernels.gluon_call import compile_gluon

    dtype = jnp.float32 if out == "fp32" else jnp.bfloat16
    tiles = kernels._fit_hopper(kernels.WEIGHTS_HOPPER, width, dtype)
    types = ["*i32", f"*{out}"]
    for columns in (tiles.n, tiles.m):
        layout = gl.NVMMASharedLayout.get_default_for([1, tiles.k, columns], gl.bfloat16)
        types.insert(0, f"tensordesc<bf16[1,{tiles.k},{columns}],{layout!r}>")
    constants = {"K": 4096, "N": width, "G": 8, "G_POW2": 32, "NUM_PROGRAMS": 132}
    constants |= {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "BAND": tiles.group_m}
    constants["STAGES"] = tiles.stages
    compiled = compile_gluon(kernels._weights_hopper_kernel, types, constants, 90)
    _check(compiled, 90)
    waits = re.findall(r"wgmma.wait_group.sync.aligned (\d)", compiled.asm["ptx"])
    assert "1" in waits, "every product waits for itself"


def _check(compiled, arch):
    assert _stack_bytes(compiled.asm["cubin"]) == 0, "registers spill"
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert MATRIX_INSTRUCTION[arch] in compiled.asm["ptx"]
