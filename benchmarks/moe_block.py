"""The MoE block, forward and with its backward, against the same block in plain JAX (`native_moe`) in the same run.

bfloat16 throughout, gradients of the tokens and of all parameters; tokens are spread over (fsdp, ep), experts over ep,
and weights replicated over fsdp. A time is the device time of a step in a scan of 20, each after the one before.
Routing is uniform, or zipf: expert e is chosen about 1 / (e + 1) as often as the first. On one GPU one large block is
timed, as others publish it, against dense GEMMs of as many rows, since `ragged_dot` would take minutes; a rate counts
the three products of each routed row, and twice as many for the backward.

`--phases` says where the time of a step goes, by the kernels of a profiler's trace.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import _measure
from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import MoEConfig, init_params, moe
from expertmesh.flax_moe.native import native_moe


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: tuple[int, ...]
    width: int
    expert_width: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        tokens = "x".join(map(str, self.tokens))
        return f"{tokens} x {self.width}, F {self.expert_width}, {self.experts} experts, top {self.top_k}"

    def config(self, **options) -> MoEConfig:
        return MoEConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            expert_dim=self.expert_width,
            dtype="bfloat16",
            param_dtype="bfloat16",
            **options,
        )

    def flops(self) -> int:
        """Of the forward's products, gate and up and down."""
        return 6 * self.top_k * math.prod(self.tokens) * self.width * self.expert_width


FFN = Shape((32768,), 4096, 512, 128, 8)
BLOCKS = [
    Shape((batch, seq), hidden, inner, 8, 2)
    for batch, seq, hidden, inner in (
        (8, 1024, 1024, 4096),
        (8, 2048, 1024, 4096),
        (8, 4096, 1024, 4096),
        (16, 2048, 1024, 4096),
        (8, 1024, 2048, 8192),
        (8, 2048, 2048, 8192),
        (16, 2048, 2048, 8192),
    )
]
# Milliseconds of the native block, forward and backward, on four H200s, mesh 2 x 2, 2026-11-20: a run in which it takes
# a tenth more is void.
NATIVE = dict(zip(BLOCKS, (11.9, 24.0, 48.1, 47.9, 28.6, 58.2, 114.0), strict=True))
SMALL = Shape((8, 32), 64, 128, 8, 2)  # for CPU


def make_mesh(axes: tuple[int, int] | None = None):
    """(fsdp, ep), the square one of four devices; None for one device."""
    devices = jax.device_count()
    if axes is None and devices == 1:
        return None
    fsdp = 2 if devices % 4 == 0 else 1
    axes = axes or (fsdp, devices // fsdp)
    return jax.make_mesh(axes, ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)


def operands(shape: Shape, mesh, routing: str = "uniform"):
    """Parameters, tokens and the cotangent of the result."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = init_params(keys[0], shape.width, shape.config())
    x, dy = (jax.random.normal(k, (*shape.tokens, shape.width), jnp.bfloat16) for k in keys[1:])
    if routing == "zipf":
        x, params = _skewed(x, params)
    if mesh is None:
        return params, x, dy
    replicated, experts, tokens = (
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("ep",), (("fsdp", "ep"),))
    )
    placed = {
        name: jax.device_put(value, replicated if name == "gate_kernel" else experts)
        for name, value in params.items()
    }
    return placed, jax.device_put(x, tokens), jax.device_put(dy, tokens)


def _skewed(x, params):
    """A feature that all tokens share, by which the logits are the logarithms of 1 / (e + 1), and noise."""
    kernel = params["gate_kernel"]
    width, experts = kernel.shape
    # About the spread of the noise with which the largest of noisy logarithms is a draw from what they are of.
    noise = jax.random.normal(jax.random.key(1), kernel.shape) * (1.28 / math.sqrt(width))
    kernel = noise.at[0].set(-jnp.log(jnp.arange(1, experts + 1))).astype(kernel.dtype)
    return x.at[..., 0].set(1), params | {"gate_kernel": kernel}


def passes(block, config):
    """pass -> function of (params, x, dy)."""

    def forward(params, x, dy):
        del dy
        return block(params, x, config).y

    def both(params, x, dy):
        y, pull = jax.vjp(lambda params, x: block(params, x, config).y, params, x)
        return y, pull(dy.astype(y.dtype))

    return {"forward": forward, "forward and backward": both}


def check(shape: Shape, arrays, transport: str) -> None:
    """Blocks that differ are not timed."""
    ours, native = (
        jax.tree.leaves(
            jax.jit(passes(block, shape.config(transport=transport))["forward and backward"])(
                *arrays
            )
        )
        for block in (moe, native_moe)
    )
    names = ("y", *(f"gradient of {name}" for name in sorted(arrays[0])), "gradient of x")
    errors = [float(relative_error(*pair)) for pair in zip(ours, native, strict=True)]
    if not max(errors) < 3e-2:  # nor NaN
        found = ", ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True))
        raise RuntimeError(
            f"the block by {transport!r} is not the native one; relative errors: {found}"
        )


def rows_of(shape: Shape, mesh, transport: str, pairs: int, turns: _measure.Turns):
    """Both passes of the block on a mesh, against the native one, which is timed even where ours cannot run."""
    config = shape.config(transport=transport)
    arrays, skewed = (operands(shape, mesh, routing) for routing in ("uniform", "zipf"))
    ours, native = (_compiled(block, config, arrays) for block in (moe, native_moe))
    turns.wait()
    with turns.mine():
        mine, theirs = _medians(pairs, ours, native)
        yield _row(
            shape,
            mesh,
            transport,
            "uniform",
            mine,
            f"native_moe{_void(shape, mesh, theirs)}",
            theirs,
        )
        (under,) = _medians(pairs, lambda: ours(*skewed))
        yield _row(shape, mesh, transport, "zipf", under, "ours with uniform routing", mine)


def rows_alone(shape: Shape, mesh, transport: str, pairs: int, turns: _measure.Turns):
    """Both passes of our block; the reference is a GEMM at the rate of the card's data sheet, 989 TFLOP/s."""
    arrays = operands(shape, mesh)
    ours = _compiled(moe, shape.config(transport=transport), arrays)
    turns.wait()
    with turns.mine():
        (mine,) = _medians(pairs, ours)
    bound = 3 * shape.flops() / mesh.size / 989e12
    rate = f"{3 * shape.flops() / mesh.size / mine / 1e12:.0f} TFLOP/s a GPU; at 989"
    yield _row(shape, mesh, transport, "uniform", mine, rate, bound)


def rows_of_recipe(shape: Shape, mesh, transport: str, pairs: int, turns: _measure.Turns):
    """Both passes with products of 8 bits, against bfloat16."""
    arrays = operands(shape, mesh)
    ours, wide = (
        _compiled(moe, shape.config(transport=transport, recipe=recipe), arrays)
        for recipe in ("fp8_block", None)
    )
    turns.wait()
    with turns.mine():
        mine, theirs = _medians(pairs, ours, wide)
    yield _row(shape, mesh, transport, "uniform, fp8_block", mine, "ours in bfloat16", theirs)


def _compiled(block, config, arrays):
    """What measures both passes; a function that returns NaN where the block cannot run, after the reason."""
    try:
        return _measure.steps(passes(block, config)["forward and backward"], arrays)
    except Exception as error:
        print(f"{block.__name__} cannot run: {error}", file=sys.stderr)
        return lambda *given: math.nan


def _medians(pairs: int, *calls) -> list[float]:
    """Of calls one after the other, `pairs` times after a warm-up."""
    timed = [[once() for once in calls] for _ in range(pairs + 1)][1:]
    return [statistics.median(times) for times in zip(*timed, strict=True)]


def _void(shape, mesh, native) -> str:
    expected = NATIVE.get(shape, math.nan) if dict(mesh.shape) == {"fsdp": 2, "ep": 2} else math.nan
    return " (void: it has been faster)" if 1e3 * native > 1.1 * expected else ""


def _row(shape, mesh, transport, which, ours, name, reference):
    return _measure.row(
        bench="moe_block",
        case=f"bfloat16 forward and backward, {shape}, {which}, {dict(mesh.shape)}, {transport}",
        metric="time",
        value=1e3 * ours,
        unit="ms",
        reference=f"{name}, {1e3 * reference:.3g} ms",
        ratio=reference / ours,
    )


def dense(shape: Shape):
    """pass -> (function, operands): GEMMs of as many rows, each expert's width and no groups."""
    keys = jax.random.split(jax.random.key(0), 4)
    rows = shape.top_k * math.prod(shape.tokens)
    sizes = (
        (rows, shape.width),
        (shape.width, 2 * shape.expert_width),
        (rows, shape.expert_width),
        (shape.expert_width, shape.width),
    )
    arrays = tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, sizes, strict=True))

    def forward(x, wi, a, wo):
        return x @ wi, a @ wo

    def both(*arrays):
        out, pull = jax.vjp(forward, *arrays)
        return out, pull(out)

    return {"forward": (forward, arrays), "forward and backward": (both, arrays)}


def rows_of_one(shape: Shape, pairs: int):
    """The block on one device, against dense GEMMs; what is checked has few tokens and experts."""
    few = dataclasses.replace(shape, tokens=(256,), experts=8, top_k=2)
    check(few, operands(few, None), "auto")
    arrays, others = operands(shape, None), dense(shape)
    for which, ours in passes(moe, shape.config()).items():
        flops = shape.flops() * (1 if which == "forward" else 3)
        case = f"bfloat16 {which}, {shape}, 1 device"
        yield _measure.against_gemm(
            "moe_block",
            case,
            flops,
            (ours, arrays),
            others[which],
            "dense XLA GEMMs",
            pairs,
            _measure.steps,
        )


# What a kernel's name says of its phase; of several with one name the n-th of a pass is of the n-th phase.
PHASES = (
    (r"^_rows_kernel", ("GEMM 1", "GEMM 2", "GEMM 2", "GEMM 1")),
    (r"^_weights", ("GEMM 2", "GEMM 1")),
    (r"^_activate_rows", ("activation",)),
    (r"Dispatch|^_spread", ("dispatch", "combine")),
    (r"Combine|^_gather", ("combine", "dispatch")),
    (r"nccl.*(AllReduce|ReduceScatter)", ("sums over devices",)),
    (r"^_choose|^_weigh|^_count|^_scan|^_place|nccl", ("route",)),
)


def by_phase(kernels) -> collections.Counter:
    """Microseconds of each phase; what has no name of its own is "other": XLA's fusions, the router's products."""
    seen, total = collections.Counter(), collections.Counter()
    for name, microseconds in kernels:
        pattern, names = next(((p, n) for p, n in PHASES if re.search(p, name)), ("", ("other",)))
        total[names[min(seen[pattern], len(names) - 1)]] += microseconds
        seen[pattern] += 1
    return total


def rows_of_phases(shape: Shape, mesh, transport: str):
    """Each phase of the forward and of the backward, and its share of all kernels' time."""
    arrays = operands(shape, mesh)
    forward, both = (
        by_phase(_measure.kernels(function, arrays))
        for function in passes(moe, shape.config(transport=transport)).values()
    )
    total = both.total()
    for which, phases in (("forward", forward), ("backward", both - forward)):
        for phase, microseconds in phases.items():
            yield _measure.row(
                bench="moe_block",
                case=f"bfloat16 {phase}, {which}, {shape}, {dict(mesh.shape) if mesh else '1 device'}",
                metric="time",
                value=microseconds,
                unit="us",
                reference=f"all kernels of both passes, {total:.0f} us",
                ratio=microseconds / total,
            )


# What is measured side by side: a name, the shape, its mesh (None: of all devices), and what measures it; the most
# important first. The last shape of BLOCKS on four GPUs has as many tokens a GPU as those of the weak scaling.
LANES = {
    **{str(n): (shape, None, rows_of) for n, shape in enumerate(BLOCKS, 1)},
    "weak1": (Shape((4, 2048), 2048, 8192, 8, 2), (1, 1), rows_alone),
    "weak2": (Shape((8, 2048), 2048, 8192, 8, 2), (1, 2), rows_alone),
    "fine": (Shape((4 * 32768,), 2048, 768, 128, 8), None, rows_alone),
    "fp8": (BLOCKS[-1], None, rows_of_recipe),
}


def rows_of_lane(name: str, transport: str, pairs: int, turns: _measure.Turns, axes):
    """The rows of one lane; on CPU a small shape's."""
    shape, own, measure = LANES[name]
    mesh = make_mesh(own or axes)
    shape = shape if jax.default_backend() == "gpu" else SMALL
    if name == "1":  # the others differ in sizes only
        few = dataclasses.replace(shape, tokens=(8, 64))
        check(few, operands(few, mesh), transport)
    return measure(shape, mesh, transport, pairs, turns)


def side_by_side(names: list[str], transport: str, mesh: str | None, pairs: int):
    """The rows of lanes, each of them compiled in a process of its own, as they come."""
    with tempfile.TemporaryDirectory() as folder:

        def start(name):
            part = pathlib.Path(folder, f"{name}.json")
            given = [f"--lane={name}", f"--turns={folder}:{len(names)}", f"--json={part}"]
            given += [f"--transport={transport}", f"--pairs={pairs}"]
            given += [f"--mesh={mesh}"] if mesh else []
            command = [sys.executable, "-m", "benchmarks.moe_block", *given]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL), part

        running = [start(name) for name in names]
        while running:
            time.sleep(0.1)
            for process, part in [lane for lane in running if lane[0].poll() is not None]:
                running.remove((process, part))
                _measure.Turns(pathlib.Path(folder), len(names)).skip(process.pid)
                yield from json.loads(part.read_text()) if part.exists() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--phases", metavar="N", help="where the time of a step of shape N goes")
    parser.add_argument("--mesh", metavar="FSDPxEP", help="default: 2x2 of four devices, else 1xN")
    parser.add_argument("--lanes", metavar="NAME,...", help=f"of {', '.join(LANES)}; default: all")
    parser.add_argument("--transport", help='default: "nvlink" between GPUs, else "auto"')
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    parser.add_argument("--turns", metavar="FOLDER:COUNT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPUs
    _measure.write(options.json, _rows(options))


def _rows(options):
    on_gpu, alone = jax.default_backend() == "gpu", jax.device_count() == 1
    transport = options.transport or ("nvlink" if on_gpu and not alone else "auto")
    axes = options.mesh and tuple(map(int, options.mesh.split("x")))
    if options.phases:
        shape = SMALL if not on_gpu else FFN if alone else BLOCKS[int(options.phases) - 1]
        return rows_of_phases(shape, make_mesh(axes), transport)
    if alone:
        return rows_of_one(FFN if on_gpu else SMALL, options.pairs)
    if options.lane:
        folder, _, count = options.turns.rpartition(":")
        turns = _measure.Turns(pathlib.Path(folder), int(count))
        return rows_of_lane(options.lane, transport, options.pairs, turns, axes)
    names = options.lanes.split(",") if options.lanes else list(LANES) if on_gpu else ["1"]
    # The kernels of 8 bits take long to compile: nothing waits for them.
    waves = [name for name in names if name != "fp8"], [name for name in names if name == "fp8"]
    return (
        row for wave in waves for row in side_by_side(wave, transport, options.mesh, options.pairs)
    )


if __name__ == "__main__":
    main()
