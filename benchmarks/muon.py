"""Muon's update of a layer's experts in chunks of several of them, against chunks of one, and AdamW's.

Each of five steps multiplies three times. Of narrow experts a GEMM of one is small, and a batch of several fills a GPU.
"""

import jax
import optax

from benchmarks import _measure
from benchmarks.grouped_gemm import on_gpu
from expertmesh.train import offload
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import CHUNK_BYTES, make_optimizer

# experts, D, F
GPU = {"narrow": (64, 2048, 768), "wide": (8, 2048, 8192)}
CPU = {"small": (4, 32, 16)}
CALLS = 4


def experts_of_a_chunk(experts: int, width: int, expert_width: int) -> int:
    """As many as the trainer takes of `wi`."""
    fit = max(1, CHUNK_BYTES // (8 * width * expert_width))
    return max(n for n in range(1, experts + 1) if experts % n == 0 and n <= fit)


def flops(experts: int, width: int, expert_width: int) -> float:
    """Of Newton-Schulz on gates and ups: x x', its square, and a GEMM with x, five times."""
    small, large = sorted((width, expert_width))
    return 5 * 2 * experts * (4 * small**2 * large + 2 * small**3)


def seconds_of(name: str, shape: tuple[int, int, int], together: int) -> float:
    """Of one update of `wi`."""
    experts, width, expert_width = shape
    optimizer = make_optimizer(TrainingOptions(optimizer=name, steps=100))
    keys = jax.random.split(jax.random.key(0))
    sizes = (1, experts, width, 2, expert_width)
    params, grads = ({"wi": jax.random.normal(key, sizes)} for key in keys)
    old = offload.Parameters(params, optimizer.init(params), {"wi": None})
    hosted = jax.tree.map(lambda _: False, old)
    chunks, norm = {"wi": offload.Chunks((1, together))}, optax.tree_utils.tree_norm(grads)

    def update(old, grads, norm):
        return offload.update(optimizer, grads, old, hosted, chunks, grad_norm=norm)

    once = _measure.steps(update, (old, grads, norm), CALLS)
    once()
    return min(once() for _ in range(3))


def rows_of(name: str, shape: tuple[int, int, int]):
    experts, width, expert_width = shape
    together = experts_of_a_chunk(*shape)
    alone = seconds_of("muon", shape, 1)
    case = f"float32 {name} {experts} experts {width}x2x{expert_width}"
    for kind, count in (("muon", together), ("adamw", together)):
        took = seconds_of(kind, shape, count)
        rate = f", {flops(*shape) / took / 1e12:.1f} TFLOP/s" if kind == "muon" else ""
        yield _measure.row(
            bench="muon",
            case=f"{case}, {kind}, {count} at once{rate}",
            metric="time",
            value=1e3 * took,
            unit="ms",
            reference=f"muon, 1 at once, {1e3 * alone:.4g} ms",
            ratio=alone / took,
        )


def main():
    options = _measure.parser(__doc__).parse_args()
    shapes = GPU if on_gpu() else CPU
    rows = (row for name, shape in shapes.items() for row in rows_of(name, shape))
    _measure.write(options.json, rows)


if __name__ == "__main__":
    main()
