"""Calls a kernel in CUDA C++ from JAX: compiled by NVRTC, which comes with jax[cuda13], launched as Triton's kernels.

For what Triton's languages do not have, such as products whose shape is chosen on the device.
"""

import hashlib
import pathlib
import re

import jax_triton
from jaxlib import gpu_triton
from triton.runtime.cache import get_cache_manager

from expertmesh.core.kernels.gluon_call import launch_ptx
from expertmesh.core.nvrtc import compile_program
from expertmesh.core.nvrtc import library as nvrtc

__all__ = ["compile_cuda", "cuda_call", "macros", "nvrtc"]


def cuda_call(
    *operands, source: str, name: str, scalars, out_type, programs: int, warps: int, shared: int
):
    """Launches `programs` blocks of the kernel `name` on a GPU of compute capability 9.0.

    Args:
      operands: arrays and `jax_triton.TensorDescriptor`s with 128 bytes of swizzle, in the order of the kernel's
        parameters: of a descriptor its TMA descriptor alone.
      source: CUDA C++ without headers. The kernel takes the operands, `scalars` (int32), then a pointer to each result.
      out_type: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      shared: bytes of dynamic shared memory.

    Returns:
      The result, or a tuple of results. The launch needs no scratch memory, so it can be part of a captured loop.
    """
    parameters = [
        _tma_parameter(x)
        if isinstance(x, jax_triton.TensorDescriptor)
        else gpu_triton.create_array_parameter(0, 16)
        for x in operands
    ]
    parameters += [gpu_triton.create_scalar_parameter(value, "i32") for value in scalars]
    return launch_ptx(
        *operands, parameters=parameters, name=name, ptx=compile_cuda(source), out_type=out_type,
        programs=programs, warps=warps, shared=shared, capability=90,
    )  # fmt: skip


def macros(defined: dict[str, object]) -> str:
    """What comes before a kernel's text."""
    return "".join(f"#define {name} {value}\n" for name, value in defined.items())


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


def _tma_parameter(x):
    return gpu_triton.create_tma_descriptor_parameter(
        elem_type=_TMA_DTYPES[str(x.base.dtype)],
        swizzle=3,  # 128 bytes
        shape=x.shape,
        strides=x.strides,
        block_shape=x.block_shape,
        oob_fill=0,
    )


_TMA_DTYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
