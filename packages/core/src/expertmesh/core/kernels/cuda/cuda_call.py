"""Calls a kernel in CUDA C++ from JAX: compiled by NVRTC, which comes with jax[cuda13], launched as Triton's kernels.

For what Triton's language does not have, such as wgmma whose shape is chosen on the device.
"""

import functools
import pathlib
import re

import jax
import numpy as np

from expertmesh.core import _native, disk_cache
from expertmesh.core import nvrtc as compiler
from expertmesh.core.kernels import launcher
from expertmesh.core.support import KernelError

__all__ = [
    "WGMMA_TYPES", "activation_macros", "compile_cuda", "cuda_call", "literal", "nvrtc", "source_text",
    "wgmma",
]  # fmt: skip


def nvrtc() -> str | None:
    """NVRTC's library where kernels in CUDA C++ can be compiled and launched, else None."""
    return None if isinstance(_native.host(), str) else compiler.library()


def cuda_call(
    *operands, source: str, name: str, scalars, out_type, programs: int, warps: int, shared: int,
    out_block: tuple[int, ...] | None = None, queue: bool = False,
):  # fmt: skip
    """Launches `programs` blocks of the kernel `name` on a GPU of compute capability 9.0.

    Args:
      operands: arrays and `launcher.TensorMap`s, in the order of the kernel's parameters.
      source: CUDA C++ without headers. The kernel takes the operands, `scalars` (int32), then a pointer to each result.
      out_type: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      shared: bytes of dynamic shared memory.
      out_block: of the TMA descriptor of its one result, which the kernel takes after the pointer.
      queue: the kernel's last parameter is a pointer to an int32 that is 0 when it begins.

    Returns:
      The result, or a tuple of results.

    Raises:
      KernelError: NVRTC cannot compile it; or as `launcher.launch`.
    """
    types = jax.tree.leaves(out_type)
    results: list = [launcher.Result(i) for i in range(len(types))]
    if out_block:
        results += [launcher.TensorMap.of(out_type, out_block, base=results[0])]
    if queue:
        results += [launcher.Result(len(types), zeroed=True)]
        types += [jax.ShapeDtypeStruct((1,), np.int32)]
    binary = launcher.Binary(name, compile_cuda(source), 32 * warps, shared)
    parameters = *operands, *map(np.int32, scalars), *results
    made = launcher.launch(binary, *parameters, out_type=tuple(types), grid=(programs,))
    return jax.tree.unflatten(jax.tree.structure(out_type), made[:-1] if queue else made)


def source_text(*files: str, defined: dict[str, object], **lines: str) -> str:
    """The text of a kernel in CUDA C++, from files beside this one: `words.cuh`, other headers, then its own.

    Args:
      defined: macros that come before.
      lines: what takes the place of a line that is this name alone.
    """
    folder = pathlib.Path(__file__).parent
    text = "".join((folder / file).read_text() for file in ("words.cuh", *files))
    for name, of_name in lines.items():
        text = re.sub(rf"^ *{name}\n", of_name.replace("\\", r"\\"), text, count=1, flags=re.M)
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + text


def literal(number: float) -> str:
    """A float in CUDA C++."""
    return f"{float(number)!r}f"


def activation_macros(activation) -> dict[str, object]:
    """What `activation.cuh` asks for."""
    bound = {} if activation.limit is None else dict(BOUND=literal(activation.limit))
    return dict(FUNCTION=activation.function, UP_OFFSET=literal(activation.up_offset)) | bound


def wgmma(
    function: str, instruction: str, sums: int, flags: str, *, in_registers: bool = False
) -> str:
    """A function in CUDA C++ that begins d = a b, or d += a b if `accumulate`.

    Args:
      function: its name, with template arguments.
      instruction: as in PTX after "aligned.": the shape, and the types of the sums and of both operands.
      sums: of a thread.
      flags: what follows the predicate.
      in_registers: a is four words of registers, in place of a descriptor of shared memory.
    """
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    words = 4 if in_registers else 1
    a = ", ".join(f"%{sums + i}" for i in range(words))
    type_of_a, a = ("const u32*", f"{{{a}}}") if in_registers else ("u64", a)
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if in_registers else '"l"(a)'
    b = sums + words
    return f"""
{function}(float* d, {type_of_a} a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
               "wgmma.mma_async.sync.aligned.{instruction} {{{registers}}}, {a}, %{b}, p, {flags};\\n}}"
               : {outputs} : {inputs}, "l"(b), "r"(accumulate));
}}
"""


# Types of operands, as `wgmma` writes them.
WGMMA_TYPES = {
    "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip


@functools.cache
def compile_cuda(source: str) -> bytes:
    """Machine code for compute capability 9.0a, kept on disk."""
    options = "-arch=sm_90a", "-std=c++17"
    try:
        key = f"{compiler.version()} {options} {source}"
        return disk_cache.kept(key, lambda: compiler.compile_program(source, *options).code)
    except RuntimeError as error:
        raise KernelError(str(error)) from error
