"""Ops on CPU run their Triton kernels, by Triton's interpreter (`TRITON_INTERPRET=1`), in NumPy.

What it shows is what a kernel computes and which elements it reads and writes, not that it compiles, nor a race. It
cannot run CUDA C++.
"""

import dataclasses
import gc
import inspect
import math
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np


class Name(str):
    """Of an array's type, with its size."""

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self).itemsize


class Memory:
    """What the interpreter wants of an array: PyTorch's names."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, Name(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Memory(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def copy_(self, other):
        assert other.array is self.array

    def storage_offset(self) -> int:
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(n // self.array.itemsize for n in self.array.strides)


OF_LAUNCH = ("num_warps", "num_stages", "backend_options")
# XLA calls back from several threads, and the interpreter changes `triton.language` while a kernel runs.
ONE_AT_A_TIME = threading.Lock()


def triton_call(*operands, kernel, out_type, grid, **constants):
    """The launcher's, through a callback."""
    constants = {name: value for name, value in constants.items() if name not in OF_LAUNCH}
    names = [name for name in kernel.arg_names if name not in constants]
    blocks = [getattr(x, "box", None) for x in operands]  # of TMA descriptors

    def run(*arrays):
        given = [_operand(x, b) for x, b in zip(arrays, blocks, strict=True)]
        results = [_poisoned(t) for t in jax.tree.leaves(out_type)]
        arguments = dict(zip(names, (*given, *map(Memory, results)), strict=False))
        with ONE_AT_A_TIME:
            kernel[grid](**arguments, **constants)
        return jax.tree.unflatten(jax.tree.structure(out_type), results)

    def expertmesh_core_launch_by_interpreter(*arrays):  # a name that programs show
        return jax.pure_callback(run, out_type, *arrays)

    return jax.jit(expertmesh_core_launch_by_interpreter)(
        *(getattr(x, "base", x) for x in operands)
    )


def _operand(x, block: tuple[int, ...] | None):
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x is None:
        return None
    memory = Memory(np.ascontiguousarray(x))
    if block is None:
        return memory
    return TensorDescriptor(memory, list(memory.size()), list(memory.stride()), list(block))


def _poisoned(t) -> np.ndarray:
    """A result before the kernel: NaN, or large integers."""
    count = math.prod(t.shape) * t.dtype.itemsize
    byte = 0xFF if jnp.issubdtype(t.dtype, jnp.floating) else 0x7F
    return np.full(count, byte, np.uint8).view(t.dtype).reshape(t.shape)


def _elementwise(function):
    """Of CUDA's library, which is machine code, what kernels take from it."""

    def apply(x):
        import triton.language as tl
        from triton.runtime.interpreter import interpreter_builder

        return tl.tensor(interpreter_builder.unary_op(x.handle, function), x.type)

    return apply


def _masks_of_bools(builder) -> None:
    """Triton 3.9's interpreter refuses a mask that is the `&` of two: it keeps it in bytes, and then wants bools."""
    for name in ("create_masked_load", "create_masked_store"):
        access = getattr(builder, name)
        names = list(inspect.signature(access).parameters)

        def of_bools(*given, access=access, names=names, **more):
            operands = dict(zip(names, given, strict=False)) | more
            mask = operands["mask"]
            if not isinstance(mask, np.ndarray):  # as 3.8 hands over
                mask.data = mask.data.astype(bool)
            return access(**operands)

        setattr(builder, name, of_bools)


def _numbers_of_bfloat16(builder) -> None:
    """Triton's interpreter keeps bfloat16 in 16-bit integers, and `tl.dot` multiplies these."""
    import triton.language as tl

    dot = builder.create_dot

    def of_numbers(a, b, *more):
        return dot(*(_widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *more)

    builder.create_dot = of_numbers


def _widened(x):
    """Such numbers in float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(x.data.view(jnp.bfloat16).astype(np.float32), tl.float32)


def _rounds_to_nearest(interpreter) -> None:
    """Triton's interpreter truncates numbers where a GPU rounds them, half to even."""
    import triton.language as tl

    convert = interpreter._convert_float
    types = {
        tl.float32: jnp.float32,
        tl.float16: jnp.float16,
        tl.bfloat16: jnp.bfloat16,
        tl.float8e4nv: jnp.float8_e4m3fn,
        tl.float8e5: jnp.float8_e5m2,
    }

    def rounded(x, given, wanted, mode):
        if given not in types or wanted not in types:
            return convert(x, given, wanted, mode)
        made = np.ascontiguousarray(x).view(types[given]).astype(types[wanted])
        return made.view(f"uint{wanted.primitive_bitwidth}")

    interpreter._convert_float = rounded


def _numbers_of_loops(interpreter) -> None:
    """A loop's number is a tensor, as where a kernel is compiled, and no `int`."""
    import triton.language as tl

    patch = interpreter._patch_lang

    def patched(kernel):
        scope = patch(kernel)
        numbers = tl.range

        def of_tensors(*given, **options):
            return map(interpreter.interpreter_semantic.to_tensor, numbers(*given, **options))

        scope.set_attr(tl, "range", of_tensors)
        return scope

    interpreter._patch_lang = patched


def _scales_of_e4m3(interpreter) -> None:
    """Triton's interpreter takes all scales of `tl.dot_scaled` for powers of two."""
    import triton.language as tl

    newer = getattr(interpreter, "_dot_scaled_scale_to_f32", None)  # from 3.9 on
    prepare = interpreter._prepare_dot_scaled_operand

    def numbers_of(scale, *more):
        of_e4m3 = scale.dtype == tl.float8e4nv
        return _numbers_of_e4m3(scale.data) if of_e4m3 else newer(scale, *more)

    def prepared(value, scale, *more, **options):
        if scale is None or scale.dtype != tl.float8e4nv:
            return prepare(value, scale, *more, **options)
        with mock.patch.object(interpreter, "_e8m0_to_f32", _numbers_of_e4m3):
            return prepare(value, scale, *more, **options)

    if newer:
        interpreter._dot_scaled_scale_to_f32 = numbers_of
    else:
        interpreter._prepare_dot_scaled_operand = prepared


def _numbers_of_e4m3(codes: np.ndarray) -> np.ndarray:
    return codes.view(jnp.float8_e4m3fn).astype(np.float32)


def install() -> None:
    """From now on, in this process."""
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from triton.runtime.interpreter import interpreter_builder

    from expertmesh.core.kernels import launcher
    from expertmesh.core.op import Kernel

    launcher.triton_call = triton_call
    _masks_of_bools(interpreter_builder)
    _numbers_of_bfloat16(interpreter_builder)
    _rounds_to_nearest(interpreter)
    _numbers_of_loops(interpreter)
    _scales_of_e4m3(interpreter)
    libdevice.exp = _elementwise(np.exp)
    libdevice.erfc = _elementwise(np.vectorize(math.erfc, otypes=[np.float32]))
    made = Kernel.triton.__func__

    def triton(cls, *given):
        return dataclasses.replace(made(cls, *given), platform="cpu")

    Kernel.triton = classmethod(triton)
    for kernel in gc.get_objects():
        if isinstance(kernel, Kernel) and kernel.name == "triton":
            object.__setattr__(kernel, "platform", "cpu")
