"""The block's forward of few tokens, as a step of generation takes them, against a copy of the chosen weights' bytes.

The weights of the experts that are chosen are read whatever the tokens: the reference moves as many bytes, half of them
read and half written. bfloat16, uniform routing. Weights of few experts may stay in L2 from call to call, in both.
"""

import jax
import numpy as np

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands, passes
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import moe
from expertmesh.flax_moe.native import native_moe

GPU = [Shape((tokens,), 2048, 768, 128, 8) for tokens in (1, 16, 128, 1024)]
LAUNCHES = 60e-6  # seconds of one token's kernels, about, to find how many calls fill a burst
READ = 3.4e12  # bytes a second, about


def num_chosen(params, x, top_k: int) -> int:
    """How many experts some token chooses."""
    logits = np.asarray(x, np.float32) @ np.asarray(params["gate_kernel"], np.float32)
    return len(np.unique(np.argsort(-logits, axis=-1)[..., :top_k]))


def case_of(shape: Shape) -> _measure.Case:
    params, x, dy = operands(shape, None)
    chosen = num_chosen(params, x, shape.top_k)
    num_bytes = chosen * 3 * shape.width * shape.expert_width * 2
    ours, theirs = (passes(block, shape.config())["forward"] for block in (moe, native_moe))

    def check():
        error = relative_error(*(jax.jit(f)(params, x, dy) for f in (ours, theirs)))
        assert error < 3e-2, f"the block is not the native one; relative error {error:.1e}"

    def describe(mine, other, ratio):
        case = f"bfloat16 forward, {shape}, {chosen} of them chosen, 1 device"
        name = "a copy of as many bytes as the chosen weights have"
        return _measure.time_row("few_tokens", case, mine, name, other, ratio=ratio)

    return _measure.Case(
        ours=(ours, (params, x, dy)),
        reference=_measure.copy_of(num_bytes),
        seconds=(LAUNCHES + num_bytes / READ, num_bytes / READ),
        row=describe,
        check=check,
    )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = GPU if _measure.has_gpu() else [SMALL]
    _measure.write(options.json, _measure.measured(map(case_of, shapes)))


if __name__ == "__main__":
    main()
