"""How many kernels and copies one GPU runs for a step of the MoE block.

In bfloat16 the reference is the same block in plain JAX; under a recipe, our block in bfloat16. `--kernels` prints each
kernel of a step in order: its microseconds, the bytes of its operands and results, and "XLA" where XLA made it. Command
buffers are off then, as their kernels have no names of instructions.
"""

from collections.abc import Iterator

import jax

from benchmarks import _measure, _program, moe_block
from benchmarks.single_gpu_blocks import RECIPES
from expertmesh.flax_moe import moe
from expertmesh.flax_moe.native import native_moe

OURS = "custom-call("


def step(block, shape: moe_block.Shape, arrays, recipe: str | None, which: str, transport: str):
    """A compiled pass of a block."""
    config = shape.config(transport=transport, recipe=recipe)
    return jax.jit(moe_block.passes(block, config)[which]).lower(*arrays).compile()


def rows_of(shape: moe_block.Shape, mesh, transport: str, show: bool) -> Iterator[dict]:
    """Of the forward, and of both passes."""
    arrays = moe_block.operands(shape, mesh)
    for which in moe_block.passes(moe, shape.config()):
        native = step(native_moe, shape, arrays, None, which, transport)
        name, launches = "native_moe", len(_measure.kernels(native, arrays))
        for recipe in (None, *RECIPES):
            compiled = step(moe, shape, arrays, recipe, which, transport)
            case = f"{recipe or 'bfloat16'} {which}, {shape}"
            found = _measure.kernels(compiled, arrays)
            if show:
                print(f"{case}\n{listing(found, compiled.as_text())}", flush=True)
            yield _measure.row(
                bench="block_launches",
                case=f"{case}, {dict(mesh.shape) if mesh else '1 device'}, {transport}",
                metric="launches",
                value=len(found),
                unit="launches",
                reference=f"{name}, {launches} launches",
                ratio=launches / max(len(found), 1),  # no GPU, no launches
            )
            if recipe is None:
                name, launches = "our bfloat16 block", len(found)


def listing(found: list[_measure.Kernel], program: str) -> str:
    """A line for each kernel that ran, and one for those of XLA together."""
    text_of = _program.instructions(program)
    lines, alone = [], 0.0
    for kernel in found:
        text = text_of.get(kernel.instruction, "")
        by_xla = bool(text) and OURS not in text
        alone += kernel.microseconds * by_xla
        size = f"{_program.num_bytes(text, text_of) / 1e6:9.1f} MB" if text else " " * 12
        name = f"{kernel.name} ({kernel.instruction or 'unknown'})"
        lines.append(f"{kernel.microseconds:9.1f} us {size} {'XLA' if by_xla else '   '} {name}")
    total = sum(kernel.microseconds for kernel in found)
    return "\n".join([*lines, f"{total:9.1f} us in all, {alone:.1f} of XLA's"])


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--kernels", action="store_true", help="print each kernel of a step")
    options = parser.parse_args()
    if options.kernels:
        _program.name_kernels()
    on_gpu, alone = jax.default_backend() == "gpu", jax.device_count() == 1
    shape = moe_block.BLOCKS[0] if on_gpu else moe_block.SMALL
    transport = "auto" if alone or not on_gpu else "nvlink"
    _measure.write(options.json, rows_of(shape, moe_block.make_mesh(), transport, options.kernels))


if __name__ == "__main__":
    main()
