"""Where the time of both passes of the block goes on one GPU, by kind of kernel, in bfloat16 and in FP8.

Kernels are those of a profiler's trace, command buffers off; a value is the median of some traces. GEMMs and what is
fused into them, the quantization, the moves of rows, and the rest. FP8's GEMMs and rest stand against bfloat16's; the
quantization and the moves, which arithmetic does not bound, against a copy of as many bytes: operands and results, each
counted once, so that what is read from L2 again counts no more.
"""

import collections
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import _measure, _program, block_launches, moe_block, single_gpu_blocks
from benchmarks.single_gpu_blocks import BOTH, RECIPES
from expertmesh.flax_moe import moe

SHAPES = [single_gpu_blocks.SHAPES[i] for i in (0, 4, 7, 8, 13)]
# Seconds of kernels where there are none: without a GPU the rows show that this runs.
NONE = 1e-9
# By the first that is part of the name of a kernel that is no GEMM.
PARTS = {
    "quantization": ("quantize", "_square", "_blocks", "_both", "_scaled", "_amax"),
    "moves of rows": ("_gather_kernel", "_spread_kernel", "_move_kernel"),
}
GEMMS, REST = "GEMMs", "the rest"
KINDS = GEMMS, *PARTS, REST


def kind_of(name: str) -> str:
    if _program.is_gemm(name):
        return GEMMS
    return next((kind for kind, parts in PARTS.items() if any(p in name for p in parts)), REST)


def parts(shape: moe_block.Shape, arrays: tuple, recipe: str | None) -> dict[str, tuple]:
    """kind -> (seconds, bytes) of a step."""
    step = block_launches.step(moe, shape, arrays, recipe, BOTH, "auto")
    text_of = _program.instructions(step.as_text())
    traces = _measure.traces(step, arrays)
    times = [collections.Counter() for _ in traces]
    for found, time in zip(traces, times, strict=True):
        for kernel in found:
            time[kind_of(kernel.name)] += kernel.microseconds * 1e-6
    size = collections.Counter()
    for kernel in traces[0]:
        text = text_of.get(kernel.instruction, "")
        size[kind_of(kernel.name)] += _program.num_bytes(text, text_of)
    return {kind: (statistics.median(time[kind] for time in times), size[kind]) for kind in KINDS}


def copy_rate() -> float:
    """Bytes a second that a copy of 512 MB reads and writes, by such a trace."""
    size = 2**29 if jax.default_backend() == "gpu" else 2**16
    x = jnp.zeros(size // 2, jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    traces = _measure.traces(copy, (x,))
    microseconds = (sum(kernel.microseconds for kernel in found) for found in traces)
    return 2 * size / max(1e-6 * statistics.median(microseconds), NONE)


def rows_of(shape: moe_block.Shape, rate: float) -> Iterator[dict]:
    arrays = moe_block.operands(shape, None)
    found = {recipe: parts(shape, arrays, recipe) for recipe in (None, *RECIPES)}
    on_gpu = jax.default_backend() == "gpu"
    for recipe, kinds in found.items():
        for kind, (seconds, size) in kinds.items():
            case = f"{recipe or 'bfloat16'} {kind}, {BOTH}, {shape}, 1 device"
            reference = f"a copy of {size / 1e6:.0f} MB", size / rate
            if recipe and kind in (GEMMS, REST):
                reference = "bfloat16", found[None][kind][0]
            if (seconds or not on_gpu) and (recipe or kind != REST):
                yield _measure.time_row("step_parts", case, max(seconds, NONE), *reference)


def main():
    options = _measure.parser(__doc__).parse_args()
    _program.name_kernels()
    shapes = SHAPES if jax.default_backend() == "gpu" else [moe_block.SMALL]
    rate = copy_rate()
    _measure.write(options.json, (row for shape in shapes for row in rows_of(shape, rate)))


if __name__ == "__main__":
    main()
