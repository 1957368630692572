"""Triton kernels assemble for the GPUs that they are for: no spills, shared memory within limits, tensor cores used."""

import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import E4M3, E5M2
from expertmesh.core import _jax
from expertmesh.core.kernels.choice import gathered_activation as activates_at_once
from expertmesh.core.linear import grouped_gemm
from expertmesh.core.op import Kernel, Op
from expertmesh.core.ops import activate_rows, activation
from expertmesh.core.ops.row_map import RowMap
from expertmesh.core.quantization import (
    activate_quantize,
    grouped_requantize,
    quantize,
    quantize_moved,
    quantize_rows,
)
from expertmesh.core.quantization.quantized import QuantizedArray, quantized_like
from expertmesh.core.quantization.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerFormats,
    MXFP8BlockScaling,
)

pytestmark = [pytest.mark.aot, needs_triton]

# Bytes of shared memory of a program, by compute capability.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
ARCHS = tuple(SHARED_LIMIT)
ARCHS_OF_8_BITS = 89, 90, 100, 120
MATRIX_INSTRUCTION = {90: "wgmma", 100: "tcgen05"}  # of the others: mma.sync


def _compile(kernel, types, tiles, constants, arch):
    """`types` of the operands before the constants: "*bf16", or a TMA descriptor."""
    constants = constants | {"NUM_PROGRAMS": 132, "BM": tiles.m, "BN": tiles.n, "BK": tiles.k}
    return _assemble(kernel, types, constants, tiles.warps, tiles.stages, arch)


def _compile_thin(kernel, types, tiles, constants, arch):
    """Of one program for each tile."""
    constants = constants | {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k}
    return _assemble(kernel, types, constants, tiles.warps, tiles.stages, arch)


def _assemble(kernel, types, constants, warps, stages, arch, **more):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name in kernel.arg_names if name not in constants]
    operands = dict(zip(names, types, strict=True))
    signature = {name: operands.get(name, "constexpr") for name in kernel.arg_names}
    pointers = [name for name, kind in operands.items() if kind[0] == "*"]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **more}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _tool(name: str) -> pathlib.Path:
    """A program that comes with Triton."""
    import triton

    return pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / name


def _stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


def _device(arch):
    """Without kernels in CUDA C++."""
    from expertmesh.core.kernels.device import Device

    return Device(capability=arch, nvrtc=False)


def _tiled(tiles, *blocks, dtype="bf16"):
    """Types of what is read in these blocks."""
    return [f"tensordesc<{dtype}{list(b)}>" if tiles.descriptors else f"*{dtype}" for b in blocks]


def _term(rank):
    """Types of the operands of a term of low rank, and its constants; there is none of rank 0."""
    sizes = {"R": rank, "BR": 16}
    return (["*bf16", "*bf16"], sizes) if rank else ([], sizes | {"u": None, "b": None})


# Which product, and the rank of a term that is added to it.
ROWS = [(which, rank) for which in ("rows", "rows_transposed") for rank in (0, 16, 128)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("which, rank", [*ROWS, ("weights", 0)])
def test_grouped_gemm(which, rank, out, arch):
    from expertmesh.core.kernels.choice import grouped_gemm as choice
    from expertmesh.core.kernels.triton import grouped_gemm as kernels

    C, K, N, G = 16384, 4096, 28672, 8
    constants = {"K": K, "N": N, "G": G, "G_POW2": G}
    result = jnp.dtype("float32" if out == "fp32" else "bfloat16")
    if which == "weights":
        tiles = choice.choose_weights(choice.Weights(C, (K, N), G, result, _device(arch))).tiles
        types = [*_tiled(tiles, (tiles.k, tiles.m), (tiles.k, tiles.n)), "*i32"]
        if tiles.flat and not tiles.descriptors:
            kernel, constants["GROUP_M"] = kernels._flat_weights_kernel, tiles.group_m
        else:
            kernel, types = kernels._weights_kernel, [*types, "*bf16", "*bf16"]
        compiled = _compile(kernel, [*types, f"*{out}"], tiles, constants, arch)
    else:
        gemm = choice.Rows(C, K, N, G, jnp.dtype("bfloat16"), result, _device(arch))
        tiles, transposed = choice.choose_rows(gemm).tiles, which == "rows_transposed"
        weight = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
        of_term, more = _term(rank)
        types = [*_tiled(tiles, (tiles.m, tiles.k), weight), "*i32", *of_term, f"*{out}"]
        constants |= {"C": C, "ZEROS_END": C, "TRANSPOSED": transposed, "GROUP_M": tiles.group_m}
        constants |= {"FLATTEN": tiles.flat and not rank, **more}
        compiled = _compile(kernels._rows_kernel, types, tiles, constants, arch)
    _check(compiled, arch)
    if not tiles.descriptors:
        steps = compiled.asm["ptx"].count("cp.async.cg.shared.global")
        # Of 16 bytes, those of as many steps as are under way: before the loop, and in it.
        each = tiles.k * (tiles.m + tiles.n) // (8 * 32 * tiles.warps)
        own = each * tiles.stages
        assert steps == own or rank and steps > own, "rows pass through registers"
    if tiles.flat and arch == 90:
        # A step's product runs on while the next one's loads begin.
        assert "wgmma.wait_group.sync.aligned 1" in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("contraction, rank", [(4096, 0), (4104, 0), (4096, 16)])
def test_gathered_gemm(contraction, rank, transposed, arch):
    from expertmesh.core.kernels.choice import grouped_gemm as choice
    from expertmesh.core.kernels.triton import gathered_gemm as kernels

    bf16 = jnp.dtype("bfloat16")
    gemm = choice.Rows(16384, contraction, 1024, 8, bf16, bf16, _device(arch))
    tiles = choice.choose_gathered(gemm).tiles
    weight = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
    of_term, more = _term(rank)
    types = ["*bf16", "*i32", *_tiled(tiles, weight), "*i32", *of_term, "*bf16"]
    sizes = {"T": 4096, "ZEROS_END": 16384, "D": contraction, "W": 1024, "G": 8, "G_POW2": 8}
    constants = sizes | {"GROUP_M": tiles.group_m, "TRANSPOSED": transposed} | more
    compiled = _compile(kernels._gathered_rows_kernel, types, tiles, constants, arch)
    _check(compiled, arch)
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "rows pass through registers"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gathered_gemm_of_few_columns(transposed, arch):
    from expertmesh.core.kernels.choice import thin_gemm as choice
    from expertmesh.core.kernels.triton import gathered_gemm as kernels

    tiles = choice.choose_gathered(32)
    sizes = {"T": 4096, "ZEROS_END": 16384, "D": 4096, "W": 32, "G": 8, "G_POW2": 8}
    constants = sizes | {"TRANSPOSED": transposed, "NUM_TILES": 136}
    types = ["*bf16", "*i32", "*bf16", "*i32", "*bf16"]
    _check(_compile_thin(kernels._thin_rows_kernel, types, tiles, constants, arch), arch)


@pytest.mark.parametrize("arch", ARCHS_OF_8_BITS)
@pytest.mark.parametrize("along", [0, 128])
@pytest.mark.parametrize("which", ["rows", "weights"])
@pytest.mark.parametrize("T", [16, 128])
def test_thin_gemm_of_quantized_rows(T, which, along, arch):
    from expertmesh.core.kernels.choice import thin_gemm as choice
    from expertmesh.core.kernels.triton import mixed_grouped_gemm as kernels

    constants = {"D": 4096, "T": T, "G": 8, "G_POW2": 8, "ALONG": along}
    types = ["*fp8e4nv", "*fp32", "*bf16", "*i32", "*bf16"]
    if which == "rows":
        tiles, kernel = choice.choose_rows(T), kernels._rows_kernel
        constants |= {"C": 16384, "ZEROS_END": 16384, "TRANSPOSED": True, "NUM_TILES": 136}
    else:
        tiles, kernel = choice.choose_weights(T, _device(arch)), kernels._weights_kernel
        constants |= {"THIN_FIRST": True}
    compiled = _compile_thin(kernel, types, tiles, constants, arch)
    _check_resources(compiled, arch)
    # A tile of fewer rows than 64 is multiplied from registers.
    assert tiles.m < 64 or MATRIX_INSTRUCTION.get(arch, "mma.sync") in compiled.asm["ptx"]


@pytest.mark.parametrize("T", [16, 64])
@pytest.mark.parametrize("arch", [90, 100])
def test_cotangents_of_an_adapter(arch, T):
    from expertmesh.core.kernels.choice import thin_gemm as choice
    from expertmesh.core.kernels.triton import grouped_cotangents as kernels

    slabs = choice.choose_both(T, _device(arch))
    constants = {"C": 16384, "D": 4096, "T": T, "G": 8, "G_POW2": 8, "SLAB": slabs.rows}
    constants |= {"BD": slabs.columns, "BT": choice.columns_of(T), "BR": slabs.step}
    types = ["*bf16", "*bf16", "*bf16", "*i32", "*fp32", "*fp32"]
    parts = _assemble(kernels._parts_kernel, types, constants, slabs.warps, slabs.stages, arch)
    _check(parts, arch)
    sizes = {"SIZE": 4096 * T, "G": 8, "G_POW2": 8, "SLAB": slabs.rows, "BLOCK": kernels.ADDED}
    _assemble(kernels._sum_kernel, ["*fp32", "*i32", "*fp32"], sizes, 4, 3, arch)


def _assemble_cuda(text, stack=0):
    """PTX of a kernel in CUDA C++ for Hopper, which spills so many bytes at most, and what its compiler says."""
    from expertmesh.core import nvrtc
    from expertmesh.core.kernels.cuda import cuda_call

    if cuda_call.nvrtc() is None:
        pytest.skip("needs NVRTC and the extension of core")
    options = "-arch=sm_90a", "-std=c++17", "--ptxas-options=-v"
    made = nvrtc.compile_program(text, *options)
    assert _stack_bytes(made.code) <= stack, "registers spill"
    return made.ptx, made.log


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("term", ["", "bfloat16"])
@pytest.mark.parametrize(
    "lhs, rhs, out, transposed, tiles",
    [
        ("bfloat16", "bfloat16", "bfloat16", False, "ROWS_HOPPER"),
        ("bfloat16", "bfloat16", "bfloat16", True, "ROWS_HOPPER"),
        ("bfloat16", "bfloat16", "float32", False, "ROWS_HOPPER"),
        ("float16", "float16", "float16", True, "ROWS_HOPPER"),
        ("bfloat16", "bfloat16", "bfloat16", True, "SMALL_GROUPS_HOPPER"),
        ("bfloat16", "bfloat16", "float32", False, "SMALL_GROUPS_HOPPER"),
        # Of per-tensor FP8, with one scale per group.
        (E4M3, E4M3, "bfloat16", True, "ROWS_HOPPER"),
        pytest.param(E5M2, E4M3, "bfloat16", True, "ROWS_HOPPER", marks=pytest.mark.full),
        pytest.param(E4M3, E4M3, "float16", True, "ROWS_HOPPER", marks=pytest.mark.full),
        (E4M3, E4M3, "float32", True, "ROWS_HOPPER"),
        (E5M2, E4M3, "bfloat16", True, "SMALL_GROUPS_HOPPER"),
        (E4M3, E4M3, "float32", True, "SMALL_GROUPS_HOPPER"),
    ],
)
def test_rows_on_hopper(lhs, rhs, out, transposed, tiles, term, queued):
    from expertmesh.core.kernels.choice import grouped_gemm as choice
    from expertmesh.core.kernels.cuda import grouped_gemm as kernels

    term = term and (lhs if lhs == "float16" else term)
    tiles = dataclasses.replace(getattr(choice, tiles), waves=int(queued))
    ptx, said = _assemble_cuda(kernels.rows_source((lhs, rhs), out, transposed, tiles, term=term))
    assert "serialized" not in said, "every product waits for itself"
    assert ("st.async" in ptx) == queued, "numbers of tiles"
    assert "wgmma.wait_group.sync.aligned 1" in ptx
    # The columns of the weight are the rows of the instruction.
    scaled = lhs in (E4M3, E5M2)
    kinds = f"k32.f32.{rhs[7:11]}.{lhs[7:11]}" if scaled else "k16.f32."
    assert kinds in ptx
    # A term of 16 bits needs instructions of its own beside those of 8 alone.
    assert ("k16.f32.bf16.bf16" in ptx) == (lhs == "bfloat16" or scaled and bool(term))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("keeps_h", [True, False])
@pytest.mark.parametrize("function", activates_at_once.FUNCTIONS)
def test_gathered_activation_on_hopper(function, keeps_h, dtype):
    from expertmesh.core.kernels.cuda import gathered_activation as kernels

    activates = activation.Activation(function=function, limit=7.0, up_offset=1.0)
    text = kernels.source((dtype, dtype), dtype, activation=activates, keeps_h=keeps_h)
    ptx, said = _assemble_cuda(text)
    assert "serialized" not in said, "every product waits for itself"
    assert ptx.count("cp.async.cg.shared.global") == 8, "of a thread, in a step"
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    # Four along the contraction, of the gate and of the up half.
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind}") == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("function", activates_at_once.FUNCTIONS)
def test_gathered_activation_grad_on_hopper(function, gathers, dtype):
    from expertmesh.core.kernels.cuda import gathered_activation as kernels

    activates = activation.Activation(function=function, limit=7.0, up_offset=1.0)
    text = kernels.grad_source((dtype, dtype), dtype, activation=activates, gathers=gathers)
    # Words of a tile, which wait while it is worked on; without them it reads fewer bytes ahead, and takes up to 1.15
    # of the time.
    ptx, said = _assemble_cuda(text, stack=32)
    assert "serialized" not in said, "every product waits for itself"
    assert ptx.count("cp.async.cg.shared.global") == 8 * gathers, "of a thread, in a step"
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    # Four along the contraction, of both halves of the columns.
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind}") == 8


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", activates_at_once.FUNCTIONS)
def test_activations_with_scales_per_group_on_hopper(function, dtype, gathers):
    from expertmesh.core.kernels.cuda import gathered_activation as kernels

    of = dict(activation=activation.Activation(function=function, limit=7.0, up_offset=1.0))
    forward = kernels.source((E4M3, E4M3), dtype, **of, keeps_h=True, gathers=gathers)
    backward = kernels.grad_source((E5M2, E4M3), dtype, **of, gathers=gathers)
    # As of 16 bits a few words of a tile wait while it is worked on.
    # Of all 256 columns, in products of 128, or of 64 that are added in float32.
    products = (forward, "n128k32.f32.e4m3", 8, 0), (backward, "n64k32.f32.e5m2", 16, 24)
    for text, kind, count, stack in products:
        ptx, said = _assemble_cuda(text, stack)
        assert "serialized" not in said, "every product waits for itself"
        assert ("cp.async.cg.shared.global" in ptx) == gathers, "rows side by side come by TMA"
        assert ptx.count(f"wgmma.mma_async.sync.aligned.m64{kind}.e4m3") == count


# Of gathered rows there is no queue, among other devices either.
@pytest.mark.parametrize("gathers, alone", [("", True), ("", False), ("lhs", True), ("dy", True)])
@pytest.mark.parametrize("operands", ["bfloat16", "float16"])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows, groups", [(32768, 8), (65536, 256), (32768, 256), (65536, 1024)])
def test_weight_gradients_on_hopper(rows, groups, out, operands, gathers, alone):
    from expertmesh.core.kernels.choice import grouped_gemm as choice
    from expertmesh.core.kernels.cuda import grouped_gemm as kernels
    from expertmesh.core.kernels.device import Device

    wide = out == "float32"
    gemm = choice.Weights(rows, (4096, 4096), groups, out, Device(alone=alone))
    tiles = choice.choose_weights(gemm, gathers=bool(gathers)).tiles
    small, many = rows < 192 * groups and not wide, rows == 65536 and groups == 256 and not wide
    queued = 0 if gathers else small if alone or many else 5
    assert tiles.waves == queued
    assert tiles.stages >= tiles.min_stages
    text = kernels.weights_source(operands, out, tiles, gathers)
    ptx, said = _assemble_cuda(text)
    assert "serialized" not in said, "every product waits for itself"
    # Eight rows at once, of 128 columns of lhs or of 256 of dy.
    copies = {"": 0, "lhs": 8 * 2, "dy": 8 * 4}[gathers]
    assert ptx.count("cp.async.cg.shared.global") == copies
    assert ("st.async" in ptx) == bool(queued), "numbers of tiles"
    # Strips of each warp, which need not wait for the last ones.
    waits = 3 if wide else 0
    assert f"cp.async.bulk.wait_group.read {waits};" in ptx
    kind = {"bfloat16": "bf16", "float16": "f16"}[operands]
    products = re.findall(rf"m64n(\d+)k16.f32.{kind}.{kind} .* p, 1, 1, 1, 1;", ptx)
    # Four in a tile's first step, and in the others.
    assert sorted(products) == ["128"] * 8 + ["256"] * 8


# Of float32 no rows are found by an index.
OF_ROWS = [(out, False) for out in ("bfloat16", "float16", "float32")]
OF_ROWS += [(out, True) for out in ("bfloat16", "float16")]


@pytest.mark.parametrize(
    "rank, out, gathers",
    [(0, *kind) for kind in OF_ROWS]
    + [(rank, *kind) for rank in (8, 64, 128) for kind in OF_ROWS if not kind[1]],
)
# The rows of the input gradient may be e5m2.
@pytest.mark.parametrize("lhs, rhs", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("groups, blocks", [(32, True), (1024, True), (32, False)])
def test_rows_of_split_sums_on_hopper(rank, gathers, groups, blocks, lhs, rhs, out):
    """With scales of blocks, or of groups."""
    from expertmesh.core.kernels.choice.quantized_grouped_gemm import ROWS_BLOCKS
    from expertmesh.core.kernels.cuda import quantized_grouped_gemm as kernels

    tiles = ROWS_BLOCKS.fit(groups, out)
    term = (rank, "bfloat16") if rank else ()
    source = kernels.rows_source(lhs, rhs, out, tiles, *term, gathers=gathers, blocks=blocks)
    ptx, said = _assemble_cuda(source)
    assert "serialized" not in said, "every product waits for itself"
    # Two products of four in a step.
    instruction = f"m64n128k32.f32.{lhs[7:11]}.{rhs[7:11]}"
    assert ptx.count(f"wgmma.mma_async.sync.aligned.{instruction}") == 8
    # Of a term two for each 16 of its rank, in the first tile and in the others.
    of_term = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    assert ptx.count(of_term) == 4 * -(-rank // 16)


@pytest.mark.parametrize("out, gathers", OF_ROWS)
@pytest.mark.parametrize("width", [272, 1536, 4096, 7168])
@pytest.mark.parametrize("groups", [1, 32, 1024])
def test_rows_of_blocks_on_hopper_are_launched_with_room_for_all(
    gathers, groups, width, out, monkeypatch
):
    """What a launch says that it takes is what the kernel's text takes."""
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.cuda import quantized_grouped_gemm as kernels
    from expertmesh.core.kernels.device import Device

    launches = []

    def record(*operands, out_type, **launch):
        launches.append((operands, launch))
        return jnp.zeros(out_type.shape, out_type.dtype)

    monkeypatch.setattr(kernels, "cuda_call", record)
    shape, rows = jax.ShapeDtypeStruct, 1000
    operands = (
        shape((rows, 384), E4M3), shape((rows, 3), jnp.float32),
        shape((groups, width, 384), E4M3), shape((groups, -(-width // 128), 3), jnp.float32),
        shape((groups,), jnp.int32),
    )  # fmt: skip
    gemm = choice.Rows(rows, 384, width, groups, E4M3, jnp.dtype(out), Device(), along=128)
    config = choice.choose_rows(gemm)
    options = dict(config=config, out_dtype=jnp.dtype(out), clear_padding=False)
    assert choice.gathers(gemm, config) == (out != "float32")
    places = shape((2 * rows,), jnp.int32) if gathers else None
    jax.eval_shape(lambda i, *z: kernels.launch_rows(*z, index=i, **options), places, *operands)
    ((taken_operands, launch),) = launches
    lhs, *_, rhs, _, _ = taken_operands
    assert rhs.box == (1, 256, 128)
    if gathers:
        assert launch["scalars"] == (rows, 384, 2 * rows, 0, 3, width, groups)
    else:
        assert lhs.box == (128, 128) and launch["scalars"] == (rows, 0, 3, width, groups)
    stages = int(re.search(r"#define STAGES (\d+)", launch["source"])[1])
    staged = 2 * 64 * 256 * 2 if out != "float32" else 2 * 64 * 128 * 4
    of_index = stages * 128 * 4 * gathers
    taken = staged + stages * (128 + 256) * 128 + 320 + 8 * (groups + 1) + of_index
    assert taken <= launch["shared"] == SHARED_LIMIT[90]
    assert stages == 3


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("dtype, power_2_scale", [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("function", activates_at_once.FUNCTIONS)
def test_block_scaled_activation_on_hopper(function, dtype, power_2_scale, gathers):
    from expertmesh.core.kernels.choice.quantized_activation import TILES
    from expertmesh.core.kernels.cuda import block_scaled_activation as kernels

    tiles = TILES.fit(1024, dtype)
    assert tiles.stages == 3
    activates = activation.Activation(function=function, limit=7.0, up_offset=1.0)
    format = Float8BlockScaling(power_2_scale=power_2_scale).formats().x
    # With any scale and float16, which no model has, the last one spills 8 bytes.
    both = function == "silu" and not (gathers and dtype == "float16")
    for narrow in (False, True) if both else (False,):
        made = dict(tiles=tiles, activation=activates, format=format, gathers=gathers)
        text = kernels.source(E4M3, E4M3, dtype, narrow=narrow, **made)
        ptx, said = _assemble_cuda(text)
        assert "serialized" not in said, "every product waits for itself"
        assert ptx.count("cp.async.cg.shared.global") == 16 * gathers, "of a thread, in a step"
        assert ptx.count("cp.async.bulk.tensor.2d") == (not gathers)
        # Of the gate's columns and of the up half's.
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 8
        assert ptx.count("cp.async.bulk.tensor.3d") == 2


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lhs, dy", [("e4m3fn", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
@pytest.mark.parametrize(
    "blocks, groups", [(True, 32), (True, 2048), (False, 32), (False, 1024)], ids=str
)
def test_quantized_weight_gradients_on_hopper(blocks, lhs, dy, out, groups):
    """With scales of blocks, or of groups."""
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.cuda import quantized_grouped_gemm as kernels

    tiles = (choice.WEIGHTS_BLOCKS if blocks else choice.WEIGHTS_TENSORS).fit(groups, out)
    source_of = kernels.block_weights_source if blocks else kernels.weights_source
    ptx, said = _assemble_cuda(source_of(f"float8_{lhs}", f"float8_{dy}", out, tiles))
    assert "serialized" not in said, "every product waits for itself"
    # In a tile's first step and in the others: products of four, of 128 or of 64 columns of 256.
    instruction = f"m64n{128 if blocks else 64}k32.f32.{lhs[:4]}.{dy[:4]}"
    assert ptx.count(f"wgmma.mma_async.sync.aligned.{instruction}") == (16 if blocks else 32)
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.shared") == (0 if blocks else 8)


@pytest.mark.parametrize(
    "crosswise, out",
    [*itertools.product((False, True), ("bfloat16", "float16")), (False, "float32")],
)
@pytest.mark.parametrize("tokens, other", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
def test_quantized_weight_gradients_of_tokens_on_hopper(tokens, other, crosswise, out):
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.cuda import quantized_grouped_gemm as kernels

    tiles = choice.WEIGHTS_TENSORS.fit(1024, out)
    text = kernels.weights_source(tokens, other, out, tiles, gathers=True, crosswise=crosswise)
    # What the producer, and a consumer between tiles, keep of their loops.
    ptx, said = _assemble_cuda(text, 16)
    assert "serialized" not in said, "every product waits for itself"
    kinds = ".".join(dtype.removeprefix("float8_").removesuffix("fn") for dtype in (tokens, other))
    # In a tile's first step and in the others: four products of four.
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n64k32.f32.{kinds}") == 32
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 8


# Blocks of 32 are widened to bfloat16 before 10.0.
@pytest.mark.parametrize(
    "along, splits, arch",
    [(along, False, arch) for along in (0, 128) for arch in (89, 100, 120)]
    + [(0, True, arch) for arch in (89, 90, 120)]
    + [(32, False, arch) for arch in (100, 120)],
)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("which, rank", [*ROWS, ("weights", 0)])
def test_quantized_grouped_gemm(which, rank, along, splits, out, arch):
    """Blocks of 32 by the instruction that multiplies them by their scales; operands as they lie, e5m2 times e4m3."""
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.triton import quantized_grouped_gemm as kernels

    fit = choice.weight_tiles if which == "weights" else choice.rows_tiles
    to = jnp.float32 if out == "fp32" else jnp.bfloat16
    tiles = fit(128 if splits else along, 4096, to, _device(arch))
    scale = "*u8" if along == 32 else "*fp32"
    constants = {"G": 32, "G_POW2": 32, "ALONG": along, "NUM_PROGRAMS": 148, "SPLITS": splits}
    constants |= {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "LHS_FORMAT": "e5m2"}
    if which == "weights":
        blocks = (tiles.k, tiles.m), (tiles.k, tiles.n)
        kernel, data = kernels._weights_kernel, ["*fp8e5", "*fp8e4nv"]
        constants |= {"K": 7168, "N": 4096, "DY_FORMAT": "e4m3"}
    else:
        transposed = which == "rows_transposed"
        weight = (1, tiles.n, tiles.k) if transposed else (1, tiles.k, tiles.n)
        blocks = (tiles.m, tiles.k), weight
        kernel, (data, more) = kernels._rows_kernel, _term(rank)
        constants |= more
        constants |= {
            "C": 32768,
            "ZEROS_END": 32768,
            "D": 7168,
            "W": 4096,
            "RHS_FORMAT": "e4m3",
            "GROUP_M": 8,
        }
        constants |= {"ACROSS": 128 if along == 128 else 1, "TRANSPOSED": transposed}
        constants |= {"FLATTEN": tiles.flat and along != 128 and not splits and not rank}
    (lhs,), (rhs,) = (
        _tiled(tiles, block, dtype=dtype)
        for dtype, block in zip(("fp8e5", "fp8e4nv"), blocks, strict=True)
    )
    types = [lhs, scale, rhs, scale, "*i32", *data, f"*{out}"]
    warps = kernels.rows_warps(tiles, rank)
    compiled = _assemble(kernel, types, constants, warps, tiles.stages, arch)
    # With a term ptxas of Triton 3.9 leaves 8 bytes in memory.
    _check_resources(compiled, arch, stack=8 if rank and arch == 120 else 0)
    assert MATRIX_INSTRUCTION.get(arch, "mma.sync") in compiled.asm["ptx"]
    if arch == 100:
        kind = "mxf8f6f4.block_scale.block32" if along == 32 else "f8f6f4"
        assert f"kind::{kind}\n" in re.sub(r"(kind::\S+).*", r"\1", compiled.asm["ptx"])
    elif arch != 90:
        kind = "kind::mxf8f6f4.block_scale" if along == 32 else "m16n8k32.row.col.f32.e5m2.e4m3"
        assert kind in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", [100, 120])
def test_blocks_of_32_in_one_step(arch):
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.triton import quantized_grouped_gemm as kernels

    tiles = choice.rows_tiles(32, 4096, "bfloat16", _device(arch))
    sizes = {"C": 4096, "ZEROS_END": 0, "D": 128, "W": 4096, "G": 8, "G_POW2": 8}
    constants = sizes | {"ALONG": 32, "ACROSS": 1, "LHS_FORMAT": "e4m3", "RHS_FORMAT": "e4m3"}
    constants |= {"TRANSPOSED": False, "FLATTEN": tiles.flat, "GROUP_M": 8} | _term(0)[1]
    constants |= {"SPLITS": False}
    lhs, rhs = _tiled(tiles, (tiles.m, tiles.k), (1, tiles.k, tiles.n), dtype="fp8e4nv")
    types = [lhs, "*u8", rhs, "*u8", "*i32", "*bf16"]
    _check(_compile(kernels._rows_kernel, types, tiles, constants, arch), arch)


@pytest.mark.parametrize("arch", [100, 120])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("which, rank", [*ROWS, ("weights", 0)])
@pytest.mark.parametrize("K", [7168, 160])  # of many steps, and of one
def test_packed_grouped_gemm(K, which, rank, out, arch):
    """Of 4 bits, by the instruction that multiplies blocks of 16 by their scales."""
    from expertmesh.core.kernels.choice import quantized_grouped_gemm as choice
    from expertmesh.core.kernels.triton import packed_grouped_gemm as kernels

    C, N, G = 32768, 4096, 32
    result = jnp.dtype("float32" if out == "fp32" else "bfloat16")
    bits = jnp.dtype("float4_e2m1fn")
    sizes = {"C": C, "G": G, "G_POW2": G}
    if which == "weights":
        weights = choice.Weights(C, (K, N), G, result, _device(arch), along=16)
        tiles, kernel = choice.choose_weights(weights).tiles, kernels._weights_kernel
        types, constants = ["*u8", "*u8", "*u8", "*u8"], sizes | {"K": K, "N": N}
        more: list = []
    else:
        rows = choice.Rows(C, K, N, G, bits, result, _device(arch), along=16)
        tiles, kernel = choice.choose_rows(rows).tiles, kernels._rows_kernel
        blocks = (tiles.m, tiles.k // 2), (1, tiles.n, tiles.k // 2)
        lhs, rhs = _tiled(tiles, *blocks, dtype="u8")
        (more, term), types = _term(rank), [lhs, "*u8", rhs, "*u8"]
        constants = sizes | {"ZEROS_END": C, "D": K, "W": N, "ACROSS": 16, **term}
        constants |= {"TRANSPOSED": which == "rows_transposed", "GROUP_M": tiles.group_m}
        constants |= {"FLATTEN": tiles.flat and not rank}
    types = [*types, "*fp32", "*i32", *more, f"*{out}"]
    compiled = _compile(kernel, types, tiles, constants, arch)
    _check_resources(compiled, arch, stack=8 if rank and arch == 120 else 0)
    form = {100: "block_scale.block16", 120: "block_scale.scale_vec::4X"}[arch]
    assert f"kind::mxf4nvf4.{form}" in compiled.asm["ptx"]


def _check(compiled, arch):
    _check_resources(compiled, arch)
    assert MATRIX_INSTRUCTION.get(arch, "mma.sync") in compiled.asm["ptx"]


def _check_resources(compiled, arch, stack=0):
    assert _stack_bytes(compiled.asm["cubin"]) <= stack, "registers spill"
    assert compiled.metadata.shared <= SHARED_LIMIT[arch]


def _launches(monkeypatch, op: Op, *operands, **options) -> list:
    """(kernel, types, constants, warps, options) of each launch that an op makes for operands of these types.

    Its results are of the types of the reference's."""
    from expertmesh.core.kernels import launcher

    launches = []

    def record(
        *operands,
        kernel,
        out_type,
        grid,
        num_warps,
        backend_options=(),
        **constants,
    ):
        del grid
        names = iter(kernel.arg_names)
        given = dict(zip(names, operands, strict=False))
        constants |= {name: None for name, x in given.items() if x is None}
        types = [launcher.type_name(x) for x in given.values() if x is not None]
        types += map(launcher.type_name, jax.tree.leaves(out_type))
        launches.append((kernel, types, constants, num_warps, dict(backend_options)))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    monkeypatch.setattr(launcher, "triton_call", record)
    op, leaves = op.of_leaves(operands, **options), jax.tree.leaves(operands)
    (kernel,) = op.kernels
    assert kernel.unsupported(*map(jax.typeof, leaves), **options) is None
    runs = (functools.partial(run, **options) for run in (kernel.launch, op.reference))
    got, want = (jax.tree.leaves(jax.eval_shape(run, *leaves)) for run in runs)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    return launches


def _check_launches(launches, arch):
    """No spills, 8 bits from float32 alone, and 16 bytes a load but where rows have a number each."""
    for kernel, types, constants, warps, options in launches:
        compiled = _assemble(kernel, types, constants, warps, 3, arch, **options)
        _check_resources(compiled, arch)
        assert not re.search(r"cvt\S*\.e\dm\dx2\.f16x2", compiled.asm["ptx"])
        if kernel.__name__ == "_group_amax_kernel":
            continue
        assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", compiled.asm["ptx"])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("function", activation.IN_KERNELS)
def test_activation(monkeypatch, function, arch):
    h, d = (jax.ShapeDtypeStruct((1, 4096, *rest), jnp.bfloat16) for rest in ((2, 1408), (1408,)))
    options = {"activation": activation.Activation(function=function, limit=7, up_offset=1)}
    launches = _launches(monkeypatch, activation.gated_grad_op, h, d, **options)
    assert len(launches) == 1
    _check_launches(launches, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("function", activation.IN_KERNELS)
def test_activate_rows(monkeypatch, function, arch):
    shapes = (2, 1408), (1408,), ()
    h, d, weights = (jax.ShapeDtypeStruct((1, 4096, *rest), jnp.bfloat16) for rest in shapes)
    monkeypatch.setattr(_jax, "compute_capability", lambda: arch / 10)
    weights, source = weights.update(dtype=jnp.float32), weights.update(dtype=jnp.int32)
    sizes = jax.ShapeDtypeStruct((1, 200), jnp.int32)
    options = {"activation": activation.Activation(function=function, limit=7, up_offset=1)}
    for op, operands in (
        (activate_rows.activate_rows_op, (h, weights, source, sizes)),
        (activate_rows.activate_rows_grad_op, (h, d, weights, source, sizes)),
    ):
        launches = _launches(monkeypatch, op, *operands, **options)
        assert len(launches) == 1
        _check_launches(launches, arch)


@pytest.mark.parametrize("arch", ARCHS_OF_8_BITS)
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("function", ["silu", "gelu", "relu"])
def test_activate_quantize(monkeypatch, function, limit, recipe, arch):
    """The kernel in Triton, which takes what the one for Hopper does not."""
    monkeypatch.setattr(_jax, "compute_capability", lambda: arch / 10)
    h = jax.ShapeDtypeStruct((1, 4096, 2, 1536), jnp.float32 if arch == 90 else jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    format = recipe.formats().x
    along = format.block[1]
    act = activation.Activation(function=function, limit=limit, up_offset=1)
    d = jax.ShapeDtypeStruct((1, 4096, 1536), h.dtype)
    routing = (None, None), tuple(jax.ShapeDtypeStruct((1, 4096), t) for t in ("float32", "int32"))
    kept = quantized_like(h.shape, h.dtype, format, (1, 1, 1, along), sizes.shape)
    kinds = (h, kept) if function == "relu" else (h,)
    for source in (
        *(activate_quantize.Activated(x, *of, act) for x in kinds for of in routing),
        *(activate_quantize.ActivatedGrad(x, *of, act, d) for x in kinds for of in routing),
    ):
        between = (1,) * (len(source.shape) - 3)
        blocks = (1, 1, *between, along), (1, along, *between, 1)
        options = dict(format=format, blocks=blocks, directions=(0, 1))
        launches = _launches(monkeypatch, source.op, source, sizes, None, None, **options)
        assert len(launches) == 1, "the activation, or its gradient, would be written"
        _check_launches(launches, arch)


@pytest.mark.parametrize("arch", ARCHS_OF_8_BITS)
@pytest.mark.parametrize("function", activation.IN_KERNELS)
def test_activate_quantize_with_a_scale_per_group(monkeypatch, function, arch):
    """What makes the rows finds their amax; the second value of a gradient's pass is not written."""
    monkeypatch.setattr(_jax, "compute_capability", lambda: arch / 10)
    types = (2, 1408), (1408,), (), ()
    h, d, weights, source = (jax.ShapeDtypeStruct((1, 4096, *more), jnp.bfloat16) for more in types)
    weights, source = weights.update(dtype=jnp.float32), source.update(dtype=jnp.int32)
    sizes = jax.ShapeDtypeStruct((1, 200), jnp.int32)
    act = activation.Activation(function=function, limit=7, up_offset=1)
    for made in (
        activate_quantize.Activated(h, weights, source, act),
        activate_quantize.ActivatedGrad(h, weights, source, act, d),
    ):
        options = dict(
            format=Float8CurrentScaling().formats().x, blocks=((), ()), directions=(0, 1)
        )
        launches = _launches(monkeypatch, made.op, made, sizes, None, None, **options)
        first, *others = launches
        assert len(others) == 2, "the amax of groups, and both copies"
        assert first[2].get("out", 0) is None or made.op.name == "activate_quantize"
        _check_launches(launches, arch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("function", ["silu", "gelu", "squared_relu"])
def test_activate_quantize_on_hopper(function, limit, recipe, dtype):
    from expertmesh.core.kernels.choice.quantize import Activated, choose_activation
    from expertmesh.core.kernels.cuda import activate_quantize as kernels
    from expertmesh.core.kernels.device import Device

    act, format = activation.Activation(function=function, limit=limit), recipe.formats().x
    if function == "gelu":
        format = dataclasses.replace(format, dtype="float8_e5m2")
    rows = 65536 if function == "silu" else 4096  # which have a queue
    config = choose_activation(Activated(rows, 1536, dtype, format.block[1], Device()))
    assert config.queued == (function == "silu")
    kinds = (None, format) if function == "silu" else (None,)
    for gradient, weighted, kept in itertools.product((False, True), (False, True), kinds):
        if gradient and weighted and limit == 7 and dtype == "float16":
            if function == "gelu" or kept:
                continue  # spills 16 bytes; no model has it
        which = dict(gradient=gradient, weighted=weighted, kept=kept)
        source = kernels.source(dtype, config=config, activation=act, format=format, **which)
        _assemble_cuda(source.text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("num_rows", [4096, 65536])
def test_quantize_both_on_hopper(num_rows, power_2_scale, dtype):
    from expertmesh.core.kernels.choice.quantize import Rows, choose_both
    from expertmesh.core.kernels.cuda import quantize_both as kernels
    from expertmesh.core.kernels.device import Device

    format = Float8BlockScaling(power_2_scale=power_2_scale).formats().x
    config = choose_both(Rows(num_rows, 2048, dtype, 128, Device()))
    assert config.queued == (num_rows == 65536)
    for panel in (0, 1, 4):
        _assemble_cuda(kernels.source(dtype, config=config, format=format, panel=panel).text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("power_2_scale", [True, False])
def test_grouped_requantize_on_hopper(power_2_scale, dtype):
    from expertmesh.core.kernels.choice.quantize import Rows, choose_requantize
    from expertmesh.core.kernels.cuda import grouped_requantize as kernels
    from expertmesh.core.kernels.device import Device

    format = Float8BlockScaling(power_2_scale=power_2_scale).formats().x
    config = choose_requantize(Rows(4096, 1536, dtype, 128, Device()))
    for panel, narrow in itertools.product((0, 1, 4), (True, False)):
        source = kernels.source(dtype, config=config, format=format, panel=panel, narrow=narrow)
        _assemble_cuda(source.text)


RECIPES = [
    Float8CurrentScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(power_2_scale=False),
    MXFP8BlockScaling(),
]


def _rows_for_the_gradient() -> Op:
    """The step of a weight gradient whose kernel does not read tokens, as an op."""
    module = "expertmesh.core.kernels.triton.grouped_quantize"
    kernel = Kernel.triton(module, "along_rows", lambda *operands: None)
    sharding = "p n ..., p g -> p n ..."
    return Op("rows", lambda rows, sizes: rows.rows(), sharding, kernels=(kernel,))


@pytest.mark.parametrize("arch", ARCHS_OF_8_BITS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantize(monkeypatch, recipe, arch):
    """By Triton's kernels, on Hopper, too."""
    from expertmesh.core.kernels import device

    monkeypatch.setattr(device, "nvrtc", lambda: None)
    formats: LayerFormats = recipe.formats()
    x = jax.ShapeDtypeStruct((1, 4096, 1536), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((8, 1536, 2048), jnp.float32)
    sizes = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    blocks = formats.x.block is not None
    both = tuple(quantize.block_shape("test", x.shape, formats.x, axis, None, 1) for axis in (2, 1))
    rows, op = quantize_rows.Rows(x), quantize_rows.quantize_rows_op
    options = dict(format=formats.x, blocks=both)
    for i, axis in enumerate((2, 1)):
        operands = rows, sizes, None, None
        launches = _launches(monkeypatch, op, *operands, directions=(i,), **options)
        _check_launches(launches, arch)
        block = quantize.block_shape("test", weight.shape, formats.weight, axis, 3 - axis, 1)
        of_weight = dict(format=formats.weight, block=block, batch_dims=1)
        operands = weight, None, None
        launches = _launches(monkeypatch, quantize._quantize_weights_op, *operands, **of_weight)
        _check_launches(launches, arch)
    options["directions"] = 0, 1
    tokens = x.update(shape=(1, 512, 1536))
    places = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 512, 8), (1, 4096)))
    moved = quantize_rows.Moved(tokens, RowMap(*places))
    if not blocks:
        many = sizes.update(shape=(1, 256))
        given = jax.ShapeDtypeStruct(many.shape, jnp.float32)
        launches = _launches(monkeypatch, op, rows, many, None, None, **options)
        assert len(launches) == 3, "the amax of rows, of groups, and both copies"
        _check_launches(launches, arch)
        for source in rows, moved:
            launches = _launches(monkeypatch, op, source, many, given, None, **options)
            assert len(launches) == 2, "the amax of rows comes with the copies"
            _check_launches(launches, arch)
        row = moved.row_map.row
        of_tokens = quantize_moved.quantize_tokens_op
        launches = _launches(monkeypatch, of_tokens, tokens, row, many, format=formats.x)
        assert len(launches) == 2, "the amax of tokens, and their data"
        _check_launches(launches, arch)
        q = QuantizedArray(tokens.update(dtype=formats.x.dtype), given, format=formats.x)
        moved = quantize_rows.Moved(q, moved.row_map)
        launches = _launches(monkeypatch, _rows_for_the_gradient(), moved, many)
        assert len(launches) == 1, "rows of tokens as the weight gradient reads them"
        _check_launches(launches, arch)
    else:
        launches = _launches(monkeypatch, op, rows, sizes, None, None, **options)
        assert len(launches) == 1, "both copies"
        _check_launches(launches, arch)
        scale = jnp.float8_e8m0fnu if formats.x.scale == "float8_e8m0fnu" else jnp.float32
        of_x = tuple(-(-n // b) for n, b in zip(x.shape, both[0], strict=True))
        data = x.update(dtype=jnp.float8_e4m3fn), jax.ShapeDtypeStruct(of_x, scale)
        q = QuantizedArray(*data, block=both[0], format=formats.x, dtype="float32")
        source = grouped_requantize.Dequantized(q)
        launches = _launches(monkeypatch, moved.op, moved, sizes, None, None, **options)
        assert len(launches) == 1, "rows would be written in 16 bits"
        _check_launches(launches, arch)
        of_tokens = tuple(-(-n // b) for n, b in zip(tokens.shape, both[0], strict=True))
        parts = dict(data=data[0].update(shape=tokens.shape), scale=data[1].update(shape=of_tokens))
        moved = grouped_requantize.MovedQuantized(dataclasses.replace(q, **parts), moved.row_map)
        options["directions"] = (1,)
        launches = _launches(monkeypatch, moved.op, moved, sizes, None, None, **options)
        assert len(launches) == 1, "the moved rows would be written"
        _check_launches(launches, arch)
        launches = _launches(monkeypatch, source.op, source, sizes, None, None, **options)
        assert len(launches) == 1, "the numbers would be written in 16 bits"
        _check_launches(launches, arch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS_OF_8_BITS if arch != 90])
def test_weights_in_square_blocks(monkeypatch, arch, power_2_scale, dtype):
    """One copy for both GEMMs; Hopper's kernel writes two."""
    from expertmesh.core.kernels import device

    monkeypatch.setattr(device, "current_device", lambda: device.Device(capability=arch))
    weight = jax.ShapeDtypeStruct((8, 1504, 2, 1408), dtype)
    format = Float8BlockScaling(power_2_scale=power_2_scale).formats().weight
    block = quantize.block_shape("test", weight.shape, format, 1, 3, 1)
    options = dict(format=format, block=block, batch_dims=1, dgrad=True)
    launches = _launches(monkeypatch, quantize._quantize_square_op, weight, **options)
    assert len(launches) == 1
    _check_launches(launches, arch)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("which", ["blocks", "blocks, any scale", "matrices"])
def test_weights_on_hopper(which, dtype, both):
    """In square blocks, or with a scale for each matrix."""
    from expertmesh.core.kernels.choice.quantize import Square, choose_square
    from expertmesh.core.kernels.cuda import quantize_square as kernels
    from expertmesh.core.kernels.device import Device

    blocks = which.startswith("blocks")
    recipe = (
        Float8BlockScaling(power_2_scale=which == "blocks") if blocks else Float8CurrentScaling()
    )
    format = recipe.formats().weight
    config = choose_square(Square(8, 1504, 1, 2816, 128 * blocks, Device()))
    ptx, _ = _assemble_cuda(kernels.source(dtype, config=config, format=format, both=both).text)
    # A thread has 64 numbers; each copy has conversions of its own, of two numbers.
    assert len(re.findall(r"cvt\.\S*e4m3x2\.f32", ptx)) == 32 * (1 + both)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == (16 if dtype == "float32" else 8)


@pytest.mark.parametrize("dgrad", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS_OF_8_BITS if arch != 90])
def test_weights_with_a_scale_per_matrix(monkeypatch, arch, dtype, dgrad):
    """One copy for both GEMMs; Hopper's kernel writes two."""
    from expertmesh.core.kernels import device

    monkeypatch.setattr(device, "current_device", lambda: device.Device(capability=arch))
    weight = jax.ShapeDtypeStruct((8, 1504, 2, 1408), dtype)
    options = dict(
        format=Float8CurrentScaling().formats().weight, block=(), batch_dims=1, dgrad=dgrad
    )
    launches = _launches(monkeypatch, quantize._quantize_square_op, weight, **options)
    assert len(launches) == 2, "the amax, and the copy"
    _check_launches(launches, arch)


@pytest.mark.parametrize("arch", ARCHS_OF_8_BITS)
@pytest.mark.parametrize("block", [(1, 1, 32), (1, 32, 1), (1, 1, 128), (1, 128, 128)])
def test_dequantize(monkeypatch, block, arch):
    shape = 8, 1536, 2048
    scale = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    kind = jnp.float8_e8m0fnu if 32 in block else jnp.float32
    data = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(scale, kind)
    q = QuantizedArray(*data, block=block)
    launches = _launches(monkeypatch, quantize._dequantize_op, q, block=block)
    _check_launches(launches, arch)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_group_bias(monkeypatch, arch, weighted):
    dy = jax.ShapeDtypeStruct((1, 4096, 2, 1408), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    options = {"num_experts": 8, "out_dtype": jnp.dtype("float32")}
    weights = jax.ShapeDtypeStruct(dy.shape[:2], jnp.float32) if weighted else None
    operands = dy, sizes, weights
    launches = _launches(monkeypatch, grouped_gemm.group_bias_grad_op, *operands, **options)
    _check_launches(launches, arch)
