"""Calls a kernel in Gluon, Triton's language of explicit layouts, barriers and warp roles, from JAX.

jax-triton 0.4.1 takes such kernels, but compiles them by the passes of Triton's other language, which make every
asynchronous product wait for itself, and launches the warps of the first role only. Its descriptors, its registration
and the launcher in jaxlib are used here as they are.
"""

import zlib

import jax
import jax_triton
import triton
from jax_triton.triton_lib import CUSTOM_CALL_TARGET_NAME, get_type_id
from jaxlib import gpu_triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon._runtime import GluonASTSource

__all__ = ["compile_gluon", "gluon_call", "launch_ptx"]


def gluon_call(*operands, kernel, out_type, programs: int, capability: int, **constants):
    """Launches `programs` programs of a Gluon kernel whose first role has four warps.

    Args:
      operands: arrays and `jax_triton.TensorDescriptor`s with a layout, in the order of the kernel's parameters.
      kernel: takes the operands, then a pointer to the result, then `constants` by name.
      out_type: `jax.ShapeDtypeStruct` of the result.
      capability: compute capability to compile for, times ten.

    Returns:
      The result. The launch needs no scratch memory, so it can be part of a captured loop.
    """
    types = [get_type_id(x if _is_descriptor(x) else jax.typeof(x)) for x in operands]
    types.append(get_type_id(jax.core.ShapedArray(out_type.shape, out_type.dtype)))
    compiled = compile_gluon(kernel, types, constants, capability)
    metadata = compiled.metadata
    descriptors = iter(metadata.tensordesc_meta or ())
    parameters = []
    for x in operands:
        if _is_descriptor(x):
            parameters += _descriptor_parameters(x, next(descriptors))
        else:
            parameters.append(gpu_triton.create_array_parameter(0, 16))
    return launch_ptx(
        *operands, parameters=parameters, name=metadata.name, ptx=compiled.asm["ptx"], out_type=out_type,
        programs=programs, warps=metadata.num_warps, shared=metadata.shared, capability=capability,
    )  # fmt: skip


def launch_ptx(
    *operands, parameters, name: str, ptx: str, out_type, programs: int, warps: int, shared: int, capability: int,
    results=None,
):  # fmt: skip
    """Launches a kernel from PTX with `parameters` and then a pointer to each result.

    Args:
      out_type: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      operands: arrays and `jax_triton.TensorDescriptor`s; each has one parameter that is its buffer, in their order.
      warps: of a program, all roles together.
      results: parameters of the results, if they are no pointers.
    """
    launched = gpu_triton.TritonKernel(name, warps, 1, shared, ptx, "", capability)
    pointers = [gpu_triton.create_array_parameter(0, 16) for _ in jax.tree.leaves(out_type)]
    parameters = [*parameters, *(results or pointers)]
    call = gpu_triton.TritonKernelCall(launched, programs, 1, 1, parameters)
    opaque = zlib.compress(call.to_proto(name, b""))
    arrays = [x.base if _is_descriptor(x) else x for x in operands]
    return jax.ffi.ffi_call(CUSTOM_CALL_TARGET_NAME, out_type)(*arrays, opaque=opaque)


def compile_gluon(kernel, types: list[str], constants: dict, capability: int):
    """Triton's compiled kernel, from its cache on disk if it is there; pointers in `types` are aligned to 16 bytes."""
    signature = dict(zip(kernel.arg_names, types, strict=False))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*"}
    source = GluonASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned
    )
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 4})


def _is_descriptor(x) -> bool:
    return isinstance(x, jax_triton.TensorDescriptor)


def _descriptor_parameters(x, meta) -> list:
    """The TMA descriptor, and its shape and strides, which a kernel may read too."""
    descriptor = gpu_triton.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        swizzle=meta["swizzle"],
        shape=x.shape,
        strides=x.strides,
        block_shape=meta["block_size"],
        oob_fill=0,
    )
    scalars = [(size, "i32") for size in x.shape] + [(stride, "i64") for stride in x.strides]
    return [
        descriptor,
        *(gpu_triton.create_scalar_parameter(int(v), kind) for v, kind in scalars),
    ]
