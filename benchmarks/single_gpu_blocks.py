"""The block on one GPU, beside what others published or ran: SonicMoE's twelve shapes, and Transformer Engine's four.

Rows are of bench `moe_block`. Each program is a scan without pauses, as a training step is, and all programs of a shape
are timed in turns. A rate is that of the experts' GEMMs: 6 T K D F operations forward, 12 T K D F backward. What is
compared with SonicMoE is timed in bursts too, as its own benchmark times it (`benchmarks/moe-cute.py` there): the mean
of half a second of calls, after half a second's pause. That one clears L2 before each call as well, outside the time.

"In microbatches": the calls of a program are the microbatches of a step, for which weights are quantized once.

Each shape is a process of its own: they compile side by side, and measure one after the other when all have compiled.

SonicMoE: TFLOP/s forward and backward on an H100, bars of figure 14 of arXiv 2512.14080 (+-5); compare on an H100.
Transformer Engine 2.20.2: milliseconds of both passes on an H200, 2026-11-22, its block on its own primitives, hot.
"""

import concurrent.futures
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator

import jax

from benchmarks import _measure
from benchmarks.moe_block import SMALL, Shape, operands, passes
from expertmesh.flax_moe import moe, quantize_weights

SONIC = {
    Shape((40960,), 768, 256, 128, 8): (335, 363),
    Shape((40960,), 768, 512, 64, 4): (395, 395),
    Shape((40960,), 768, 1024, 32, 2): (404, 434),
    Shape((24576,), 1536, 256, 128, 8): (363, 404),
    Shape((24576,), 1536, 512, 64, 4): (432, 438),
    Shape((24576,), 1536, 1024, 32, 2): (464, 466),
    Shape((32768,), 4096, 256, 256, 16): (427, 459),
    Shape((32768,), 4096, 512, 128, 8): (502, 511),
    Shape((32768,), 4096, 1024, 64, 4): (551, 553),
    Shape((32768,), 4096, 512, 256, 16): (517, 526),
    Shape((32768,), 4096, 1024, 128, 8): (558, 566),
    Shape((32768,), 4096, 2048, 64, 4): (594, 585),
}
TRANSFORMER_ENGINE = {
    Shape((8192,), 1024, 4096, 8, 2): 2.47,
    Shape((16384,), 2048, 8192, 8, 2): 16.57,
    Shape((32768,), 2048, 768, 128, 8): 14.48,
    Shape((32768,), 4096, 512, 128, 8): 20.45,
}
SHAPES = list({**SONIC, **TRANSFORMER_ENGINE})
RECIPES = "fp8_block", "fp8_current"
TURNS, BURST_TURNS, CALLS = 5, 2, 6
MICROBATCHES = {f"{recipe} in {CALLS} microbatches": recipe for recipe in RECIPES}
EIGHT_BITS = *RECIPES, *MICROBATCHES
BOTH, BURSTS = "forward and backward", " in bursts"
BURST = PAUSE = 0.5  # seconds
RATE = 450e12  # about that of a block, to find how many calls fill a burst


def programs(shape: Shape) -> dict[str, Callable]:
    """bfloat16's "forward", and both passes of bfloat16, of each recipe by its name, and of it in microbatches."""
    functions = {"forward": passes(moe, shape.config())["forward"]}
    for recipe in (None, *RECIPES):
        functions[recipe or "bfloat16"] = passes(moe, shape.config(recipe=recipe))[BOTH]
    return functions | {name: microbatch(shape, MICROBATCHES[name]) for name in MICROBATCHES}


def microbatch(shape: Shape, recipe: str) -> Callable:
    """Both passes under a recipe, with weights that are quantized."""
    config = shape.config(recipe=recipe)

    def both(params, x, dy, weights):
        def block(params, x, config):
            return moe(params, x, config, weights_quantized=weights)

        return passes(block, config)[BOTH](params, x, dy)

    return both


def quantized(shape: Shape, recipe: str) -> Callable:
    """What `microbatch` is given after the operands."""
    return lambda params, *_: (quantize_weights(params, shape.config(recipe=recipe)),)


def bursts_of(shape: Shape, functions: dict[str, Callable], types: tuple) -> dict[str, Callable]:
    """bfloat16's programs, which measure a call after a pause."""
    return {
        name: _measure.hot(functions[name], types, passes_of * shape.flops() / RATE, BURST, PAUSE)
        for name, passes_of in (("forward", 1), ("bfloat16", 3))
    }


def beside_sonic(shape: Shape, median: dict[str, float], protocol: str = "") -> Iterator[dict]:
    """Its rates against SonicMoE's, if they are published."""
    parts = {"forward": median["forward"], "backward": median["bfloat16"] - median["forward"]}
    for (which, mine), published in zip(parts.items(), SONIC.get(shape, ()), strict=False):
        flops = shape.flops() * {"forward": 1, "backward": 2}[which]
        reference = "SonicMoE on H100, published", flops / (published * 1e12)
        case = _case("bfloat16", which + protocol, shape)
        yield _measure.rate_row("moe_block", case, flops, mine, *reference)


def times_of(shape: Shape, lock: pathlib.Path | None) -> tuple[dict, dict]:
    """Seconds of each turn: of programs without pauses, and in bursts, of SonicMoE's shapes."""
    with _measure.held(lock, shared=True):
        functions, types = programs(shape), jax.eval_shape(lambda: operands(shape, None))
        prepared = {name: quantized(shape, recipe) for name, recipe in MICROBATCHES.items()}
        hot = _measure.all_steps(functions, types, CALLS, prepared=prepared)
        bursts = bursts_of(shape, functions, types) if shape in SONIC else {}
    with _measure.held(lock):
        arrays = operands(shape, None)
        times = _measure.turns_of(hot, arrays, TURNS)
        return times, {n: [once(*arrays) for _ in range(BURST_TURNS)] for n, once in bursts.items()}


def rows_of(shape: Shape, lock: pathlib.Path | None = None) -> Iterator[dict]:
    """Its rates against SonicMoE's and its times against Transformer Engine's, where there are some; its recipes."""
    times, bursts = times_of(shape, lock)
    median = {name: statistics.median(found) for name, found in times.items()}
    yield from beside_sonic(shape, median)
    if bursts:
        medians = {name: statistics.median(found) for name, found in bursts.items()}
        yield from beside_sonic(shape, medians, BURSTS)
    for name in ("bfloat16", *EIGHT_BITS):
        case = _case(name, BOTH, shape)
        if shape in TRANSFORMER_ENGINE and name not in MICROBATCHES:
            reference = "Transformer Engine 2.20.2 on H200", TRANSFORMER_ENGINE[shape] / 1e3
            yield _measure.time_row("moe_block", case, median[name], *reference, unit="ms")
        if name != "bfloat16":
            pairs = zip(times["bfloat16"], times[name], strict=True)
            ratio = statistics.median(wide / own for wide, own in pairs)
            reference = "our bfloat16 block", median["bfloat16"]
            yield _measure.time_row(
                "moe_block", case, median[name], *reference, unit="ms", ratio=ratio
            )


def _case(name: str, which: str, shape: Shape) -> str:
    return f"{name} {which}, {shape}, 1 device"


def _family(row: dict) -> str | None:
    """Those whose mean is wanted: a pass against SonicMoE, and a recipe against bfloat16."""
    name = row["case"].partition(",")[0]
    of = row["reference"].partition(",")[0]
    return None if of.startswith("Transformer") else f"{name}, against {of}"


def child(number: int, folder: str) -> list[dict]:
    """The rows of a shape, of a process of its own."""
    lock = str(pathlib.Path(folder) / "lock")
    # Processes that compile have no memory that others measure in.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    arguments = "--one", str(number), "--lock", lock
    status, rows = _measure.process("single_gpu_blocks", *arguments, env=env)
    if status:
        print(f"{SHAPES[number]}: ended with {status}", file=sys.stderr)
    return rows or []


def side_by_side() -> Iterator[dict]:
    """The rows of all shapes; one that failed runs once more by itself. A RuntimeError at last where there are none."""
    numbers = range(len(SHAPES))
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool,
    ):
        found = list(pool.map(lambda number: child(number, folder), numbers))
        # Another process may have had the memory that this one wanted.
        found = [rows or child(number, folder) for number, rows in enumerate(found)]
    yield from (row for rows in found for row in rows)
    if failed := [str(SHAPES[number]) for number in numbers if not found[number]]:
        raise RuntimeError(f"single_gpu_blocks: nothing of {'; '.join(failed)}")


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--one", type=int, help="the shape of one process")
    parser.add_argument("--lock", type=pathlib.Path, help="of --one")
    options = parser.parse_args()
    if options.one is not None:
        return _measure.write(options.json, rows_of(SHAPES[options.one], options.lock))
    rows = side_by_side() if _measure.has_gpu() else rows_of(SMALL)
    _measure.write(options.json, _measure.with_means(rows, _family))


if __name__ == "__main__":
    main()
