"""Launches kernels from JAX: machine code in a custom call of our own, whatever language it was compiled from.

The call carries all that a launch needs, so a program that is compiled ahead of time, kept on disk or loaded by another
process is complete. A launch allocates no memory and can be part of a captured loop.
"""

import base64
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core import _jax, _native
from expertmesh.core.support import KernelError, warn_once

__all__ = [
    "Binary", "Result", "TensorMap", "capability", "divisor", "launch", "triton_call",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel's machine code and what each launch of it has in common.

    Attributes:
      name: of the kernel in the code.
      code: a CUBIN of one architecture, or PTX with a zero at its end, which the driver compiles when it loads it.
      threads: of a block.
      shared: bytes of dynamic shared memory of a block.
      cluster: blocks of a cluster, if the code does not say so.
    """

    name: str
    code: bytes = dataclasses.field(repr=False)
    threads: int
    shared: int
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def digest(self) -> str:
        """Of all that loading depends on."""
        return _digest(self)

    @property
    def image(self) -> str:
        """The code as text; `_native/unpack.h` has the way back."""
        return _image(self.code)


@functools.cache
def _digest(binary: Binary) -> str:
    return hashlib.sha256(f"{binary.name} {binary.shared} ".encode() + binary.code).hexdigest()


@functools.cache
def _image(code: bytes) -> str:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return base64.b64encode(packer.compress(code) + packer.flush()).decode()


class Result(NamedTuple):
    """The buffer of a result, as a parameter of the kernel.

    Attributes:
      number: among the results.
      zeroed: it is zeros when the kernel begins.
    """

    number: int
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """TMA's descriptor of a buffer, as a parameter of the kernel; what lies out of bounds is read as zeros.

    Attributes:
      base: an array or a `Result`.
      dtype: of its elements.
      shape: sizes of up to five dimensions.
      strides: in elements; dimensions may overlap. The last one is 1.
      box: what one access moves.
      swizzle: bytes that are swizzled: 128, 64, 32, or 0; by default 128 where the box is that wide.
    """

    base: Any
    dtype: jnp.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int | None = None

    @classmethod
    def of(cls, x, box: tuple[int, ...], base: Any = None) -> "TensorMap":
        """Of an array, or of a result that has the type `x`."""
        return cls(x if base is None else base, x.dtype, x.shape, row_major(x.shape), tuple(box))

    @property
    def swizzled(self) -> int:
        if self.swizzle is not None:
            return self.swizzle
        return 128 if self.box[-1] * self.dtype.itemsize == 128 else 0


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def launch(binary: Binary, *parameters, out_type, grid: tuple[int, ...]):
    """Launches a kernel.

    Args:
      binary: the kernel.
      parameters: the kernel's, in order: arrays and `Result`s, of which it gets pointers; `TensorMap`s; NumPy's scalars
        (int32, int64, float32); None, a null pointer.
      out_type: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      grid: blocks, in up to three dimensions.

    Returns:
      The result, or a tuple of results. What the kernel leaves unwritten is undefined.

    Raises:
      KernelError: the extension is missing; or the machine code cannot be loaded on this process' first GPU.
    """
    host = _native.host()
    if isinstance(host, str):
        raise KernelError(host)
    _check_loads(binary)
    buffers = [base for p in parameters if (base := _base(p)) is not None]
    arrays = [base for base in buffers if not isinstance(base, Result)]
    operands = itertools.count()
    # Results come after all operands.
    numbers = (
        len(arrays) + base.number if isinstance(base, Result) else next(operands)
        for base in buffers
    )
    coded = [word for p in parameters for word in _coded(p, numbers)]
    call = jax.ffi.ffi_call(_native.LAUNCH, out_type)
    return call(
        *arrays, name=binary.name, image=binary.image, digest=binary.digest,
        shape=np.array([*(*grid, 1, 1)[:3], *binary.cluster, binary.threads, binary.shared], np.int64),
        parameters=np.array(coded, np.int64),
    )  # fmt: skip


# As launch.cc reads them.
_NULL, _POINTER, _WORD, _WIDE_WORD, _MAP, _ZEROED = range(6)
# CUtensorMapDataType; of 8 bits, bytes.
_MAP_TYPES = {
    "float8_e4m3fn": 0, "float8_e5m2": 0, "int8": 0, "uint8": 0, "int32": 4, "float16": 6, "float32": 7, "bfloat16": 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def _base(parameter):
    """The array or `Result` that a parameter is of, or None."""
    if isinstance(parameter, TensorMap):
        return parameter.base
    return None if isinstance(parameter, np.generic) else parameter


def _coded(parameter, numbers: Iterator[int]) -> list[int]:
    """The words that stand for a parameter; `numbers`: of the buffers, in the parameters' order."""
    if parameter is None:
        return [_NULL]
    if isinstance(parameter, np.generic):
        wide = parameter.dtype.itemsize == 8
        bits = parameter if parameter.dtype.kind == "i" else parameter.view(np.int32)
        return [_WIDE_WORD if wide else _WORD, int(bits)]
    if isinstance(parameter, TensorMap):
        dtype, rank = parameter.dtype, len(parameter.shape)
        return [
            _MAP, next(numbers), _MAP_TYPES[dtype.name], _SWIZZLES[parameter.swizzled], rank,
            *parameter.shape, *(stride * dtype.itemsize for stride in parameter.strides[:-1]), *parameter.box,
        ]  # fmt: skip
    zeroed = isinstance(parameter, Result) and parameter.zeroed
    return [_ZEROED if zeroed else _POINTER, next(numbers)]


@functools.cache
def _check_loads(binary: Binary) -> None:
    """Loads the code on this process' first GPU, if it has one, as the first launch would."""
    gpu, host = _jax.local_gpu(), _native.host()
    if gpu is None or isinstance(host, str):
        return
    ordinal = gpu.local_hardware_id
    problem = host.load(ordinal, binary.name, binary.digest, binary.shared, binary.code)
    if problem:
        raise KernelError(f"{gpu.device_kind} does not load the kernel {binary.name}: {problem}")


def triton_call(
    *operands, kernel, out_type, grid: tuple[int, ...], num_warps: int = 4, num_stages: int = 3,
    backend_options=None, **constants,
):  # fmt: skip
    """Launches a kernel in Triton.

    Args:
      operands: arrays, `TensorMap`s (of arrays) and None, in the order of the kernel's parameters, before those of the
        results.
      kernel: a function under `triton.jit`.
      out_type, grid: as of `launch`.
      num_warps, num_stages: Triton's.
      backend_options: more of Triton's options.
      constants: constexpr parameters by name.

    Returns:
      The result, or a tuple of results.

    Raises:
      KernelError: Triton cannot compile it; or as `launch`.
    """
    if isinstance(host := _native.host(), str):
        warn_once(
            f"{host}; until then jax-triton launches kernels, and those in CUDA C++ are not used"
        )
        return _jax.jax_triton_call(
            *operands, kernel=kernel, out_type=out_type, grid=grid, num_warps=num_warps, num_stages=num_stages,
            backend_options=dict(backend_options or {}), compute_capability=capability(), **constants,
        )  # fmt: skip
    results = jax.tree.leaves(out_type)
    names = [name for name in kernel.arg_names if name not in constants]
    arrays = dict(zip(names, (*operands, *results), strict=False))
    constants |= {name: None for name, x in arrays.items() if x is None}
    types = tuple((name, type_name(x)) for name, x in arrays.items() if x is not None)
    options = {"num_warps": num_warps, "num_stages": num_stages, **(backend_options or {})}
    options |= {"enable_fp_fusion": True}  # what is left unsaid changes with Triton 3.10
    fixed = tuple(constants.items()), tuple(options.items())
    try:
        binary, maps = _jax.compile_triton(kernel, types, *fixed, capability())
    except Exception as error:
        raise KernelError(_not_compiled(kernel, error)) from error
    remaining = iter(maps)
    parameters: list = []
    for x in operands:
        if isinstance(x, TensorMap):
            parameters += _triton_map(x, next(remaining))
        elif x is not None:
            parameters.append(x)
    # Behind them Triton has pointers to memory that these kernels do not ask for.
    tail = (*map(Result, range(len(results))), None, None)
    return launch(Binary(*binary), *parameters, *tail, out_type=out_type, grid=grid)


def _not_compiled(kernel, error: Exception) -> str:
    version = importlib.metadata.version("triton")
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    what = "; ".join(dict.fromkeys(line.strip() for line in (lines[0], lines[-1])))
    return f"triton {version} does not compile {kernel.__name__} for compute capability {capability() / 10} ({what})"


def _triton_map(x: TensorMap, chosen) -> list:
    """A descriptor as Triton's kernels take it: the map with the chosen box and swizzle, then its sizes."""
    box, swizzle = chosen
    mapped = dataclasses.replace(x, box=box, swizzle=swizzle)
    return [mapped, *map(np.int32, x.shape), *map(np.int64, x.strides)]


# Triton's names.
_TYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
}  # fmt: skip


def type_name(x) -> str:
    """Triton's name of a parameter's type: that of a pointer, or of a descriptor."""
    element = _TYPES[jnp.dtype(x.dtype).name]
    if isinstance(x, TensorMap):
        return f"tensordesc<{element}[{','.join(map(str, x.box))}]>"
    return f"*{element}"


def capability() -> int:
    """The compute capability that kernels are compiled for, times ten."""
    return round(_jax.target_capability() * 10)


def divisor(size: int, most: int, least: int = 128) -> int:
    """The columns of a tile: the largest power of two that divides `size`, between `least` and `most`."""
    return max(least, min(most, size & -size))
