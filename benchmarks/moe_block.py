"""The MoE block, forward and with its backward, against the same block in plain JAX (`native_moe`) in the same run.

bfloat16 throughout, gradients of the tokens and of all parameters; tokens are spread over (fsdp, ep), experts over ep,
and weights replicated over fsdp. A time is the device time of a step in a scan of 20, each after the one before.
Routing is uniform, or zipf: expert e is chosen about 1 / (e + 1) as often as the first. On one GPU one large block is
timed, as others publish it, against dense GEMMs of as many rows, since `ragged_dot` would take minutes; a rate counts
the three GEMMs of each routed row, and twice as many for the backward.

Devices add the weights' gradients in bfloat16 unless a row says float32: so does the native block, whose gradients
leave `ragged_dot` in the parameters' dtype and are reduce-scattered in it. Its exchange is `ragged_all_to_all`.

Nothing is dropped, so half of a receive buffer holds nothing on two GPUs, and more on more. One GPU has such rows where
half of the tokens are masked, which is compared with a block of the other half alone.

On several GPUs each lane (`--lanes`) is a process: they compile side by side and measure in turn, from when the file
`--after` is there. A lane that dies, or that is not done in `--seconds` from then on, is reported, and the exit status
is 1; the others' rows are written.

`--phases` says where the time of a step goes, by the kernels of a profiler's trace.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import _measure, _program
from expertmesh.core.mesh import MeshResource
from expertmesh.core.testing import relative_error
from expertmesh.ep import _native
from expertmesh.flax_moe import (
    MoEConfig,
    init_params,
    moe,
    param_specs,
    permute_experts,
    place_experts,
)
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
            **{"reduce_dtype": "bfloat16", **options},
        )

    def flops(self) -> int:
        """Of the forward's GEMMs, gate and up and down."""
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
# What each of two GPUs that share the last one's experts may receive, and its experts.
RANK = Shape((16384,), 2048, 8192, 4, 2)
# Milliseconds of the native block, forward and backward, on four H200s, mesh 2 x 2, 2026-11-20: a run in which it takes
# a tenth more is void.
NATIVE = dict(zip(BLOCKS, (11.9, 24.0, 48.1, 47.9, 28.6, 58.2, 114.0), strict=True))
# Milliseconds of Transformer Engine's block on four GB200s, mesh 2 x 2, as its tutorial gives them.
PUBLISHED = dict(zip(BLOCKS, (2.075, 3.217, 5.349, 5.355, 4.110, 6.254, 10.542), strict=True))
SMALL = Shape((8, 32), 64, 128, 8, 2)  # for CPU


def make_mesh(axes: tuple[int, int] | None = None):
    """(fsdp, ep), the square one of four devices; None for one device."""
    devices = jax.device_count()
    if axes is None and devices == 1:
        return None
    fsdp = 2 if devices % 4 == 0 else 1
    axes = axes or (fsdp, devices // fsdp)
    return jax.make_mesh(axes, ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)


def operands(shape: Shape, mesh, routing: str = "uniform", *, specs=None):
    """Parameters, tokens and the cotangent of the result; `specs`: of the parameters, if not over ep alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = init_params(keys[0], shape.width, shape.config())
    x, dy = (jax.random.normal(k, (*shape.tokens, shape.width), jnp.bfloat16) for k in keys[1:])
    if routing == "zipf":
        x, params = _skewed(x, params)
    if mesh is None:
        return params, x, dy
    specs = specs or param_specs(shape.config(), MeshResource(ep_resource="ep"))
    placed = {
        name: jax.device_put(value, NamedSharding(mesh, specs[name]))
        for name, value in params.items()
    }
    tokens = NamedSharding(mesh, PartitionSpec(("fsdp", "ep")))
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


def require_close(errors: Sequence[float], params, limit: float, otherwise: str):
    """A RuntimeError, which begins with `otherwise`, unless all are below the limit: those of what `passes` returns."""
    names = ("y", *(f"gradient of {name}" for name in sorted(params)), "gradient of x")
    if not max(errors) < limit:  # nor NaN
        found = ", ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True))
        raise RuntimeError(f"{otherwise}; relative errors: {found}")


def rows_of_check(shape: Shape, mesh, transport: str, turns: _measure.Turns | None = None):
    """No row: a RuntimeError where the blocks differ."""
    arrays, config = operands(shape, mesh), shape.config(transport=transport)
    programs = [_both(block, config, arrays) for block in (moe, native_moe)]
    with turns.mine() if turns else contextlib.nullcontext():
        mine, theirs = (jax.tree.leaves(program(*arrays)) for program in programs)
        errors = [float(relative_error(*pair)) for pair in zip(mine, theirs, strict=True)]
    require_close(errors, arrays[0], 3e-2, f"the block by {transport!r} is not the native one")
    yield from ()


ROUNDS = 10  # scans of ours, whose median counts
FEW_ROUNDS = 4  # where there are many rows
NATIVE_ROUNDS = 1  # of the native block, which takes seconds, after one that does not count


def rows_of(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Both passes of the block on a mesh, against the native one, which is timed even where ours cannot run."""
    arrays, config = operands(shape, mesh), shape.config(transport=transport)
    ours, native = (_compiled(block, config, arrays) for block in (moe, native_moe))
    with turns.mine():
        mine, theirs = medians((ours, ROUNDS), (native, NATIVE_ROUNDS))
    name = f"native_moe{_void(shape, mesh, theirs)}"
    row = row_of(shape, mesh, transport, "uniform", mine, name, theirs)
    yield row | ({"gb200": PUBLISHED[shape]} if shape in PUBLISHED else {})


def rows_of_settings(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Both passes of the block where something is other than in the table, against ours as it is there."""
    arrays, skewed = (operands(shape, mesh, routing) for routing in ("uniform", "zipf"))
    config = shape.config(transport=transport)
    wide = dataclasses.replace(config, reduce_dtype="float32")
    ours, in_float32 = (_compiled(moe, each, arrays) for each in (config, wide))
    counted = jax.jit(lambda params, x, dy: moe(params, x, config).tokens_per_expert)
    counted = counted.lower(*skewed).compile()
    with turns.mine():
        # Nothing with collectives runs outside of a turn: GPUs that change between processes wait for each other.
        placement = place_experts(counted(*skewed), mesh.shape["ep"])
        placed = permute_experts(skewed[0], placement), *skewed[1:]
        calls = ours, in_float32, lambda: ours(*skewed), lambda: ours(*placed)
        usual, *times = medians(*((call, FEW_ROUNDS) for call in calls))
    which = "uniform, sums in float32", "zipf", "zipf, experts placed by load"
    for name, seconds in zip(which, times, strict=True):
        reference = "ours, uniform, sums in bfloat16"
        yield row_of(shape, mesh, transport, name, seconds, reference, usual)


def rows_alone(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Both passes of our block; the reference is a GEMM at the rate of the card's data sheet, 989 TFLOP/s."""
    arrays = operands(shape, mesh)
    ours = _compiled(moe, shape.config(transport=transport), arrays)
    with turns.mine():
        (mine,) = medians((ours, ROUNDS))
    bound = 3 * shape.flops() / mesh.size / 989e12
    rate = f"{3 * shape.flops() / mesh.size / mine / 1e12:.0f} TFLOP/s a GPU; at 989"
    yield row_of(shape, mesh, transport, "uniform", mine, rate, bound)


def rows_of_recipe(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Both passes with GEMMs of 8 bits, against bfloat16."""
    arrays = operands(shape, mesh)
    wide, ours = (
        _compiled(moe, shape.config(transport=transport, recipe=recipe), arrays)
        for recipe in (None, "fp8_block")
    )
    with turns.mine():
        mine, theirs = medians((ours, ROUNDS), (wide, ROUNDS))
    yield row_of(shape, mesh, transport, "uniform, fp8_block", mine, "ours in bfloat16", theirs)


def rows_of_fsdp(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Both passes with weights that fsdp splits by experts, against along D; gathered and scattered in each step."""
    resource = MeshResource(ep_resource="ep", fsdp_resource="fsdp")
    calls = []
    for by_expert in (True, False):
        config = shape.config(transport=transport, ep_axis="ep", shard_exp_on_fsdp=by_expert)
        arrays = operands(shape, mesh, specs=param_specs(config, resource))
        calls.append((_compiled(moe, config, arrays), ROUNDS))
    with turns.mine():
        by_expert, along_width = medians(*calls)
    which, reference = "uniform, fsdp splits experts", "ours, fsdp splits D"
    yield row_of(shape, mesh, transport, which, by_expert, reference, along_width)


def rows_of_memory(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """Bytes of a device: saved by the forward for the backward, and temporary in a program of both.

    Temporary is also the window that "nvlink" keeps for the exchange.
    """
    arrays, config = operands(shape, mesh), shape.config(transport=transport)
    ours, native = (
        (saved_bytes(block, config, arrays), _both(block, config, arrays))
        for block in (moe, native_moe)
    )
    with turns.mine():
        jax.block_until_ready(ours[1](*arrays))
    window = _native.window_bytes() // mesh.size if transport == "nvlink" else 0
    mine, theirs = (
        (saved, program.memory_analysis().temp_size_in_bytes + kept)
        for (saved, program), kept in ((ours, window), (native, 0))
    )
    parts = "{:.2f} GB saved and {:.2f} GB temporary"
    mine_parts, parts = (parts.format(a / 1e9, b / 1e9) for a, b in (mine, theirs))
    yield _measure.row(
        bench="moe_block",
        case=f"bfloat16 bytes of a GPU, both passes, {shape}, {dict(mesh.shape)}: {mine_parts}",
        metric="memory",
        value=sum(mine) / 1e9,
        unit="GB",
        reference=f"the native block, {parts}",
        ratio=sum(theirs) / sum(mine),
    )


def saved_bytes(block, config, arrays) -> int:
    """Bytes of one device that the forward saves besides its operands."""

    def saved(params, x):
        return jax.tree.leaves(jax.vjp(lambda params, x: block(params, x, config).y, params, x)[1])

    jaxpr = jax.make_jaxpr(saved)(*arrays[:2]).jaxpr
    made = (var.aval for var in set(jaxpr.outvars) - set(jaxpr.invars))
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in made)


def _both(block, config, arrays):
    """Both passes, compiled."""
    return jax.jit(passes(block, config)["forward and backward"]).lower(*arrays).compile()


def rows_of_growth(shape: Shape, mesh, transport: str, turns: _measure.Turns):
    """How the time of both passes grows with one size, against an affine fit; with the experts, against the fewest."""
    shapes = {
        (vary, value): vary(shape, value, mesh.size) for vary in GROWTH for value in GROWTH[vary]
    }
    calls = {
        point: _compiled(moe, one.config(transport=transport), operands(one, mesh))
        for point, one in shapes.items()
    }
    with turns.mine():
        times = medians(*((call, FEW_ROUNDS) for call in calls.values()))
    found = dict(zip(shapes, times, strict=True))
    for vary in GROWTH:
        mine = {value: (shapes[vary, value], found[vary, value]) for value in GROWTH[vary]}
        yield from _grown(vary, mine, mesh, transport)


def _grown(vary, points, mesh, transport):
    """The rows of one size: value -> (shape, seconds)."""
    times = [seconds for _, seconds in points.values()]
    if vary is num_experts:
        fit, name = [times[0]] * len(times), "the fewest experts"
    else:
        slope, start = statistics.linear_regression(list(points), times)
        fit, name = [slope * value + start for value in points], "affine fit"
    for (value, (one, seconds)), fitted in zip(points.items(), fit, strict=True):
        which = f"growth with {vary.__name__}"
        row = row_of(one, mesh, transport, which, seconds, name, fitted)
        yield row | {"growth": vary.__name__, "size": value}  # for the plot


def num_tokens(shape: Shape, value: int, devices: int) -> Shape:
    return dataclasses.replace(shape, tokens=(value * devices,), experts=8, top_k=2)


def num_choices(shape: Shape, value: int, devices: int) -> Shape:
    del devices
    return dataclasses.replace(shape, top_k=value)


def num_experts(shape: Shape, value: int, devices: int) -> Shape:
    """With as many tokens a GPU as the lane "fine": the weights' gradients are sums over fsdp, however few the rows."""
    return dataclasses.replace(shape, tokens=(32768 * devices,), experts=value)


GROWTH = {
    num_tokens: (8192, 24576, 49152, 81920),
    num_choices: (1, 2, 4, 8),
    num_experts: (8, 32, 128),
}


def _compiled(block, config, arrays):
    """What measures both passes; a function that returns NaN where the block cannot run, after the reason."""
    try:
        return _measure.steps(passes(block, config)["forward and backward"], arrays)
    except Exception as error:
        print(f"{block.__name__} cannot run: {error}", file=sys.stderr)
        return lambda *given: math.nan


def medians(*calls) -> list[float]:
    """Of each (call, times), after a warm-up; those of several are spread over one another."""
    for call, _ in calls:
        call()
    timed = [[] for _ in calls]
    most = max(times for _, times in calls)
    for i in range(most):
        time.sleep(0.03)  # the card is at its power limit
        for (call, times), seconds in zip(calls, timed, strict=True):
            if (i + 1) * times // most > i * times // most:
                seconds.append(call())
    return [statistics.median(seconds) for seconds in timed]


def _void(shape, mesh, native) -> str:
    expected = NATIVE.get(shape, math.nan) if dict(mesh.shape) == {"fsdp": 2, "ep": 2} else math.nan
    return " (void: it has been faster)" if 1e3 * native > 1.1 * expected else ""


def row_of(shape, mesh, transport, which, ours, name, reference):
    case = f"bfloat16 forward and backward, {shape}, {which}, {dict(mesh.shape)}, {transport}"
    return _measure.time_row("moe_block", case, ours, name, reference, unit="ms")


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
    yield from rows_of_check(few, None, "auto")
    arrays, others = operands(shape, None), dense(shape)
    times = {
        which: _measure.alternate((ours, arrays), others[which], pairs, _measure.steps)[:2]
        for which, ours in passes(moe, shape.config()).items()
    }
    forward, both = times["forward"], times["forward and backward"]
    times["backward"] = both[0] - forward[0], both[1] - forward[1]
    for which, (mine, theirs) in times.items():
        flops = shape.flops() * {"forward": 1, "backward": 2}.get(which, 3)
        case = f"bfloat16 {which}, {shape}, 1 device"
        yield _measure.rate_row("moe_block", case, flops, mine, "dense XLA GEMMs", theirs)


def rows_of_rest(shape: Shape, pairs: int, recipe: str | None):
    """Both passes where half of the tokens are masked, against the block of the others alone."""
    arrays, config = operands(shape, None), shape.config(recipe=recipe)
    mask = jnp.arange(shape.tokens[0]) % 2 == 0

    def masked(params, x, config):
        return moe(params, x, config, token_mask=mask)

    few = arrays[0], *(x[mask] for x in arrays[1:])
    sides = (passes(masked, config), arrays), (passes(moe, config), few)
    ours, alone = ((functions["forward and backward"], given) for functions, given in sides)
    mine, theirs = _measure.alternate(ours, alone, pairs, _measure.steps)[:2]
    case = (
        f"{recipe or 'bfloat16'} forward and backward, {shape}, half of the tokens masked, 1 device"
    )
    reference = "a block of the other half"
    yield _measure.time_row("moe_block", case, mine, reference, theirs, unit="ms")


# What a kernel's name says of its phase in the forward, by the first that fits; the gradient of each exchange is the
# other one.
PHASES = {
    "activation": r"^_activate_rows|^_gated_grad|^_kernel$|^activate_quantize",
    "quantize": r"quantize|^_blocks_|^_both_|^_square_|^_scaled_|_amax_",
    "dispatch": r"Dispatch|^_spread",
    "combine": r"Combine|^_gather_kernel|^_unpermute_grad",
    "sums over devices": r"nccl.*(AllReduce|ReduceScatter)|^psum",  # XLA names its own kernel for few numbers so
    "route": r"^_(choose|probs|z|grad|count|scan|place|plan)_|nccl",
}
REVERSED = {"dispatch": "combine", "combine": "dispatch"}


def phase_of(
    kernel: _measure.Kernel, text: str, shape: Shape, experts: int, *, begun: bool = False
) -> tuple[str, str]:
    """(pass, phase) of a kernel, of which its instruction's text is known; of so many experts on a GPU.

    Of a sum over devices a trace may not say the instruction, so the text is "": it is the backward's if that has
    `begun`. A GEMM has the time of an activation behind or before it, too; its weight, or that's gradient, is as large
    as that of the up projection or of the down projection. What has no name of its own is "other": XLA's fusions, the
    router's GEMMs.
    """
    which = "backward" if _program.is_backward(text) or (begun and not text) else "forward"
    if _program.is_gemm(kernel.name):
        down = experts * shape.expert_width * shape.width
        sizes = {math.prod(s) for s in _program.shapes(text) if len(s) > 2 and s[0] == experts}
        return which, "GEMM 1" if 2 * down in sizes else "GEMM 2" if down in sizes else "other"
    found = (phase for phase, names in PHASES.items() if re.search(names, kernel.name))
    phase = next(found, "other")
    return which, REVERSED.get(phase, phase) if which == "backward" else phase


def phases_of(
    kernels: list[_measure.Kernel], text_of: dict[str, str], shape: Shape, experts: int
) -> collections.Counter:
    """(pass, phase) -> microseconds of a step."""
    found: collections.Counter = collections.Counter()
    begun = False
    for kernel in kernels:
        text = text_of.get(kernel.instruction, "")
        begun = begun or _program.is_backward(text)
        found[phase_of(kernel, text, shape, experts, begun=begun)] += kernel.microseconds
    return found


def rows_of_phases(
    shape: Shape,
    mesh,
    transport: str,
    turns: _measure.Turns | None = None,
    recipe: str | None = None,
):
    """Each phase of the forward and of the backward in a step, the median of some, and its share of them all."""
    arrays = operands(shape, mesh)
    config = shape.config(transport=transport, recipe=recipe)
    call = jax.jit(passes(moe, config)["forward and backward"]).lower(*arrays).compile()
    text_of = _program.instructions(call.as_text())
    experts = shape.experts // (mesh.shape["ep"] if mesh else 1)
    with turns.mine() if turns else contextlib.nullcontext():
        found = _measure.traces(call, arrays)
    traces = [phases_of(kernels, text_of, shape, experts) for kernels in found]
    names = dict.fromkeys(name for trace in traces for name in trace)
    phases = {name: statistics.median(trace[name] for trace in traces) for name in names}
    total = sum(phases.values())
    for (which, phase), microseconds in phases.items():
        yield _measure.row(
            bench="moe_block",
            case=f"{recipe or 'bfloat16'} {phase}, {which}, {shape}, "
            f"{dict(mesh.shape) if mesh else '1 device'}",
            metric="time",
            value=microseconds,
            unit="us",
            reference=f"all kernels of both passes, {total:.0f} us",
            ratio=microseconds / total,
        )


# What is measured side by side: a name, the shape, its mesh (None: of all devices), and what measures it; the most
# important first. The last shape of BLOCKS on four GPUs has as many tokens a GPU as those of the weak scaling.
LANES = {
    "check": (Shape((8, 64), 1024, 4096, 8, 2), None, rows_of_check),
    **{str(n): (shape, None, rows_of) for n, shape in enumerate(BLOCKS, 1)},
    "weak1": (Shape((4, 2048), 2048, 8192, 8, 2), (1, 1), rows_alone),
    "weak2": (Shape((8, 2048), 2048, 8192, 8, 2), (1, 2), rows_alone),
    "fine": (Shape((4 * 32768,), 2048, 768, 128, 8), None, rows_alone),
    "settings": (BLOCKS[-1], None, rows_of_settings),
    "fp8": (BLOCKS[-1], None, rows_of_recipe),
    "fsdp": (BLOCKS[-1], None, rows_of_fsdp),
    "memory": (BLOCKS[-1], None, rows_of_memory),
    "phases": (BLOCKS[-1], None, rows_of_phases),
    "growth": (Shape((4 * 8192,), 2048, 768, 128, 4), None, rows_of_growth),
}
WEAK = "weak1", "weak2", "7"
COMPILING = 0.4  # of the seconds, before the first turn
HELD = 100  # seconds, far more than a turn takes


def rows_of_lane(name: str, transport: str, turns: _measure.Turns, axes):
    """The rows of one lane; on CPU a small shape's."""
    shape, own, measure = LANES[name]
    mesh = make_mesh(own or axes)
    return measure(shape if jax.default_backend() == "gpu" else SMALL, mesh, transport, turns=turns)


def side_by_side(names: Sequence[str], options):
    """(lane, row), each lane in a process of its own, as lanes end; at last (lane, None) for those that died.

    A lane that waits for its peers for good, after one of them has run out of memory, ends when its turn has lasted
    HELD seconds, so that the others get theirs.
    """
    with tempfile.TemporaryDirectory() as path, contextlib.ExitStack() as ending:
        folder, begin = pathlib.Path(path), time.monotonic()
        until = begin + COMPILING * options.seconds
        turns = [
            _measure.Turns(folder, number, len(names), until, options.after)
            for number in range(len(names))
        ]

        def start(name, turn):
            part = folder / f"{name}.json"
            given = [f"--lane={name}", f"--turn={turn.number},{turn.count},{turn.until}"]
            given += [f"--folder={folder}", f"--json={part}"]
            for option in ("transport", "mesh", "after"):
                value = getattr(options, option)
                given += [f"--{option}={value}"] if value else []
            command = [sys.executable, "-m", "benchmarks.moe_block", *given]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            ending.callback(process.kill)
            return name, turn, process, part

        running, died = [start(*pair) for pair in zip(names, turns, strict=True)], []
        while running:
            time.sleep(0.1)
            begin = begin if turns[0].may_begin() else time.monotonic()
            late = time.monotonic() - begin > options.seconds
            for lane in [
                lane
                for lane in running
                if late or lane[1].seconds_held() > HELD or lane[2].poll() is not None
            ]:
                running.remove(lane)
                name, turn, process, part = lane
                process.kill()
                for what in ("ready", "done"):
                    turn.mark(what)
                rows = json.loads(part.read_text()) if part.exists() else []
                status, took = process.wait(), time.monotonic() - begin
                print(f"lane {name}: status {status}, {took:.0f} s", file=sys.stderr, flush=True)
                yield from ((name, row) for row in rows)
                died += [name] * (status != 0)
        yield from ((name, None) for name in died)


def with_weak_scaling(found):
    """The rows of lanes, and those of one GPU's time over that of more; SystemExit for lanes that died."""
    times, died, most = {}, [], 0
    for name, row in found:
        if row is None:
            died.append(name)
            continue
        times.setdefault(name, row["value"] / 1e3)
        most = max(most, row["gpus"])
        yield row
    if times.keys() >= set(WEAK):
        for name, gpus in (("weak2", 2), ("7", 4))[: most // 2]:
            case = f"bfloat16 forward and backward, weak scaling, {gpus} GPUs, {LANES[name][0]}"
            one = times["weak1"]
            yield _measure.time_row("moe_block", case, times[name], "one GPU", one, unit="ms")
    if died:
        raise SystemExit(f"lanes without an end: {', '.join(died)}")


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=_measure.PAIRS, help="on one device")
    parser.add_argument("--phases", metavar="N", help="where the time of a step of shape N goes")
    parser.add_argument("--recipe", help="of --phases")
    parser.add_argument("--mesh", metavar="FSDPxEP", help="default: 2x2 of four devices, else 1xN")
    parser.add_argument("--lanes", metavar="NAME,...", help=f"of {', '.join(LANES)}; default: all")
    parser.add_argument(
        "--at-once", type=int, help="lanes that share the GPUs' memory; default: all"
    )
    parser.add_argument("--seconds", type=float, default=200, help="for all lanes at once")
    parser.add_argument("--transport", help='default: "nvlink" between GPUs, else "auto"')
    parser.add_argument("--after", metavar="FILE", type=pathlib.Path, help="measure when it exists")
    for internal in ("--lane", "--turn", "--folder"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Ended from outside, it ends its lanes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before all lanes were done"))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPUs
    if options.phases or options.lane == "phases":
        _program.name_kernels()
    _measure.write(options.json, _rows(options))


def _rows(options):
    on_gpu, alone = jax.default_backend() == "gpu", jax.device_count() == 1
    transport = options.transport or ("nvlink" if on_gpu and not alone else "auto")
    axes = options.mesh and tuple(map(int, options.mesh.split("x")))
    if options.phases:
        shape = SMALL if not on_gpu else FFN if alone else BLOCKS[int(options.phases) - 1]
        return rows_of_phases(shape, make_mesh(axes), transport, recipe=options.recipe)
    if alone:
        shape, rank = (FFN, RANK) if on_gpu else (SMALL, dataclasses.replace(SMALL, tokens=(256,)))
        return itertools.chain(
            rows_of_one(shape, options.pairs),
            *(
                rows_of_rest(rank, options.pairs, recipe)
                for recipe in (None, "fp8_block", "fp8_current")
            ),
        )
    if options.lane:
        number, count, until = options.turn.split(",")
        folder = pathlib.Path(options.folder)
        turns = _measure.Turns(folder, int(number), int(count), float(until), options.after)
        return rows_of_lane(options.lane, transport, turns, axes)
    names = options.lanes.split(",") if options.lanes else list(LANES) if on_gpu else ["check", "1"]
    waves = itertools.batched(names, options.at_once or len(names))
    return with_weak_scaling(row for wave in waves for row in side_by_side(wave, options))


if __name__ == "__main__":
    main()
