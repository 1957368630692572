"""What a profiler's trace and the text of a compiled program say of a kernel together."""

import os
import re

from expertmesh.core import hlo

# What an instruction is called, and what follows it.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$", re.M)
BACKWARD = re.compile(r'op_name="[^"]*transpose\(')
GEMM = re.compile(
    r"gemm|nvjet|^gathered_activation|^block_scaled_activation|^_(gathered_)?rows_|weights_"
)
NAMED = "--xla_gpu_enable_command_buffer="


def name_kernels() -> None:
    """Before JAX finds the GPU: kernels of a trace name their instructions."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NAMED}"


def instructions(program: str) -> dict[str, str]:
    """The text of each instruction, by its name."""
    return dict(INSTRUCTION.findall(program))


def is_backward(text: str) -> bool:
    """Whether an instruction is part of a gradient."""
    return bool(BACKWARD.search(text))


def is_gemm(name: str) -> bool:
    """Whether a kernel of this name multiplies matrices; it may activate them, too."""
    return bool(GEMM.search(name))


def shapes(text: str) -> list[tuple[int, ...]]:
    """Of all types in an instruction's text."""
    found = (each.partition("[")[2].rstrip("]") for each in hlo.shapes(text))
    return [tuple(map(int, dims.split(","))) if dims else () for dims in found]


def num_bytes(text: str, text_of: dict[str, str]) -> int:
    """Of an instruction's results and operands; a tuple counts as what it holds."""
    result, _, rest = text.partition("(") if not text.startswith("(") else text.partition(") ")
    operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
    types = [result, *(_type_of(text_of.get(name, "")) for name in operands)]
    return sum(hlo.num_bytes(shape) for each in types for shape in hlo.shapes(each))


def _type_of(text: str) -> str:
    return text.partition(") ")[0] if text.startswith("(") else text.partition(" ")[0]
