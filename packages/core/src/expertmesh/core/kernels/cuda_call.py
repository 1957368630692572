"""Calls a kernel in CUDA C++ from JAX: compiled by NVRTC, which comes with jax[cuda13], launched as Triton's kernels.

For what Triton's languages do not have, such as products whose shape is chosen on the device.
"""

import hashlib
import pathlib
import re
from math import prod

import jax_triton
from jaxlib import gpu_triton
from triton.runtime.cache import get_cache_manager

from expertmesh.core.kernels.gluon_call import launch_ptx
from expertmesh.core.nvrtc import compile_program
from expertmesh.core.nvrtc import library as nvrtc

__all__ = ["WGMMA_TYPES", "compile_cuda", "cuda_call", "nvrtc", "source_text", "wgmma"]


def cuda_call(
    *operands, source: str, name: str, scalars, out_type, programs: int, warps: int, shared: int,
    out_block: tuple[int, ...] | None = None,
):  # fmt: skip
    """Launches `programs` blocks of the kernel `name` on a GPU of compute capability 9.0.

    Args:
      operands: arrays and `jax_triton.TensorDescriptor`s, in the order of the kernel's parameters: of the latter TMA's
        descriptor alone, with 128 bytes of swizzle if its boxes are that wide, else without.
      source: CUDA C++ without headers. The kernel takes the operands, `scalars` (int32), then a pointer to each result.
      out_type: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      shared: bytes of dynamic shared memory.
      out_block: of the TMA descriptor that the kernel takes in place of the pointer to its one result.

    Returns:
      The result, or a tuple of results. The launch needs no scratch memory, so it can be part of a captured loop.
    """
    parameters = [
        _tma_parameter(x.base.dtype, x.shape, x.strides, x.block_shape)
        if isinstance(x, jax_triton.TensorDescriptor)
        else gpu_triton.create_array_parameter(0, 16)
        for x in operands
    ]
    parameters += [gpu_triton.create_scalar_parameter(value, "i32") for value in scalars]
    results = None
    if out_block:
        strides = [prod(out_type.shape[dim + 1 :]) for dim in range(len(out_type.shape))]
        results = [_tma_parameter(out_type.dtype, out_type.shape, strides, out_block)]
    return launch_ptx(
        *operands, parameters=parameters, name=name, ptx=compile_cuda(source), out_type=out_type,
        programs=programs, warps=warps, shared=shared, capability=90,
        results=results,
    )  # fmt: skip


def source_text(*files: str, defined: dict[str, object], **lines: str) -> str:
    """The text of a kernel in CUDA C++, from files beside this one: `words.cuh`, other headers, then its own.

    Args:
      defined: macros that come before.
      lines: what takes the place of a line that is this name alone.
    """
    folder = pathlib.Path(__file__).parent
    text = "".join((folder / file).read_text() for file in ("words.cuh", *files))
    for name, of_name in lines.items():
        text = text.replace(f"{name}\n", of_name, 1)
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + text


def wgmma(function: str, instruction: str, sums: int, flags: str, words: int = 0) -> str:
    """A function in CUDA C++ that begins d = a b, or d += a b if `accumulate`.

    Args:
      function: its name, with template arguments.
      instruction: as in PTX after "aligned.": the shape, and the types of the sums and of both operands.
      sums: of a thread.
      flags: what follows the predicate.
      words: of a thread, if a is in registers; else a descriptor says where it is.
    """
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    b, last = sums + (words or 1), sums + (words or 1) + 1
    a = "{" + ", ".join(f"%{i}" for i in range(sums, b)) + "}" if words else f"%{sums}"
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(words)) or '"l"(a)'
    kind = "const u32*" if words else "u64"
    return f"""
{function}(float* d, {kind} a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{last}, 0;\\n"
               "wgmma.mma_async.sync.aligned.{instruction} {{{registers}}}, {a}, %{b}, p, {flags};\\n}}"
               : {outputs} : {inputs}, "l"(b), "r"(accumulate));
}}
"""


# Of operands, in the name of `wgmma`'s instruction.
WGMMA_TYPES = {
    "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip


def compile_cuda(source: str) -> str:
    """PTX for compute capability 9.0a, from Triton's cache on disk if it is there."""
    cache = get_cache_manager(hashlib.sha256(source.encode()).hexdigest())
    if path := cache.get_file("kernel.ptx"):
        return pathlib.Path(path).read_text()
    # An assembler of another release than NVRTC's may be older; what is written here needs no more than 8.0.
    made = compile_program(source, "-arch=sm_90a", "-std=c++17").code.rstrip(b"\0").decode()
    ptx = re.sub(r"(?m)^\.version .*$", ".version 8.0", made)
    cache.put(ptx, "kernel.ptx", binary=False)
    return ptx


def _tma_parameter(dtype, shape, strides, block):
    return gpu_triton.create_tma_descriptor_parameter(
        elem_type=_TMA_DTYPES[str(dtype)],
        swizzle=3 if block[-1] * dtype.itemsize == 128 else 0,  # of 128 bytes
        shape=list(shape),
        strides=list(strides),
        block_shape=list(block),
        oob_fill=0,
    )


# CUtensorMapDataType; of 8 bits, bytes
_TMA_DTYPES = {
    "float8_e4m3fn": 0, "float8_e5m2": 0, "float16": 6, "float32": 7, "bfloat16": 9,
}  # fmt: skip
