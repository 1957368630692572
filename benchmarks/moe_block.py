"""The MoE block, forward and with its backward, against the same block in plain JAX (`native_moe`).

bfloat16 throughout, gradients of the tokens and of all parameters; tokens are spread over (fsdp, ep), experts over ep,
and weights replicated over fsdp. On one GPU one large block is timed, as others publish it, against dense GEMMs of as
many rows, since `ragged_dot` would take minutes; a rate counts the three products of each routed row, and twice as
many for the backward. `--phases` times the steps of that block one by one, each with its gradients, against the whole.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import _measure
from expertmesh.core.ops.activation import activate
from expertmesh.core.ops.gemm import gemm
from expertmesh.core.ops.grouped_gemm import grouped_gemm
from expertmesh.core.ops.router import route
from expertmesh.core.testing import relative_error
from expertmesh.ep import combine, dispatch, dispatch_weights, prepare
from expertmesh.flax_moe import MoEConfig, init_params, moe
from expertmesh.flax_moe.native import native_moe
from expertmesh.flax_moe.weight_rows import weight_rows


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
            # The weights are applied where the rows are narrower.
            apply_topk_weights_early=self.expert_width < self.width,
            **options,
        )

    def flops(self) -> int:
        """Of the forward's products, gate and up and down."""
        rows = self.top_k
        for size in self.tokens:
            rows *= size
        return 6 * rows * self.width * self.expert_width


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
SMALL = Shape((8, 32), 64, 128, 8, 2)  # for CPU


def make_mesh():
    """(fsdp, ep), the square one of four devices; None for one device."""
    devices = jax.device_count()
    if devices == 1:
        return None
    fsdp = 2 if devices % 4 == 0 else 1
    axes = (fsdp, devices // fsdp)
    return jax.make_mesh(axes, ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)


def operands(shape: Shape, mesh):
    """Parameters, tokens and the cotangent of the result."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = init_params(keys[0], shape.width, shape.config())
    x, dy = (jax.random.normal(k, (*shape.tokens, shape.width), jnp.bfloat16) for k in keys[1:])
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


def passes(block, config):
    """pass -> function of (params, x, dy)."""

    def forward(params, x, dy):
        del dy
        return block(params, x, config).y

    def both(params, x, dy):
        y, pull = jax.vjp(lambda params, x: block(params, x, config).y, params, x)
        return y, pull(dy.astype(y.dtype))

    return {"forward": forward, "forward and backward": both}


def check(shape: Shape, arrays) -> None:
    """Blocks that differ are not timed."""
    ours, native = (
        jax.tree.leaves(jax.jit(passes(block, shape.config())["forward and backward"])(*arrays))
        for block in (moe, native_moe)
    )
    for mine, other in zip(ours, native, strict=True):
        assert relative_error(mine, other) < 3e-2


def rows_of(shape: Shape, mesh, pairs: int):
    """The block on a mesh, against the native one."""
    arrays = operands(shape, mesh)
    check(shape, arrays)
    for (which, ours), native in zip(
        passes(moe, shape.config()).items(),
        passes(native_moe, shape.config()).values(),
        strict=True,
    ):
        mine, other, ratio = _measure.alternate((ours, arrays), (native, arrays), pairs)
        yield _measure.row(
            bench="moe_block",
            case=f"bfloat16 {which}, {shape}, {dict(mesh.shape)}",
            metric="time",
            value=1e3 * mine,
            unit="ms",
            reference=f"native_moe, {1e3 * other:.3g} ms",
            ratio=ratio,
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
    check(few, operands(few, None))
    arrays, others = operands(shape, None), dense(shape)
    for which, ours in passes(moe, shape.config()).items():
        flops = shape.flops() * (1 if which == "forward" else 3)
        case = f"bfloat16 {which}, {shape}, 1 device"
        yield _measure.against_gemm(
            "moe_block", case, flops, (ours, arrays), others[which], "dense XLA GEMMs", pairs
        )


def phases(shape: Shape):
    """(step, function, operands) in the order of the block, each fed with what the one before it made."""
    config = shape.config()
    params, x, _ = operands(shape, None)

    def logits(x, kernel):
        return gemm(x.astype(jnp.float32), kernel.astype(jnp.float32))

    def choose(logits):
        return route(logits, config.router)

    def plan(topk_idx):
        return prepare(topk_idx, config.exchange(axis=()))

    def weigh(y, weights, handle):
        return weight_rows(y, weights, handle.group_sizes, handle.tokens_per_expert)

    def product(rows, kernel, handle):
        return grouped_gemm(rows, kernel, handle.group_sizes)

    def run(name, function, *operands):
        steps.append((name, function, operands))
        return jax.jit(function)(*operands)

    steps: list[tuple] = []
    idx, weights = run("choose", choose, run("logits", logits, x, params["gate_kernel"]))
    handle = run("plan", plan, idx)
    weights = run("dispatch weights", lambda w, h: dispatch_weights(h, w), weights, handle)
    rows = run("dispatch", lambda x, h: dispatch(h, x), x, handle)
    hidden = run("product with wi", product, rows, params["wi"], handle)
    active = run("activate", lambda h: activate(h, config.activation), hidden)
    early = config.apply_topk_weights_early
    if early:
        active = run("weigh", weigh, active, weights, handle)
    out = run("product with wo", product, active, params["wo"], handle)
    if not early:
        out = run("weigh", weigh, out, weights, handle)
    run("combine", lambda y, h: combine(h, y), out, handle)
    return steps


def with_gradients(step, function, operands):
    """(step, function, operands) of a step, and of its gradients alone, by what is an array of floats."""
    yield step, function, operands
    held = [i for i, x in enumerate(operands) if isinstance(x, jax.Array) and _is_float(x)]
    if not held:
        return

    @jax.jit
    def linearized(*operands):
        def of_held(*some):
            given = dict(zip(held, some, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(operands)))

        return jax.vjp(of_held, *(operands[i] for i in held))

    out, pull = linearized(*operands)
    cotangent = jax.tree.map(
        lambda x: x if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0), out
    )
    yield f"{step}, gradients", lambda pull, d: pull(d), (pull, cotangent)


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def rows_of_phases(shape: Shape, pairs: int):
    """The time of each step, and its share of the block with its backward, whose forward comes first."""

    def measure(function, given, seconds):
        once = _measure.program(function, given, seconds)
        return statistics.median(once() for _ in range(pairs))

    def row(step, seconds):
        return _measure.row(
            bench="moe_block",
            case=f"bfloat16 {step}, {shape}, 1 device",
            metric="time",
            value=1e6 * seconds,
            unit="us",
            reference=f"forward and backward, {1e6 * total:.0f} us",
            ratio=seconds / total,
        )

    forward, both = passes(moe, shape.config()).values()
    arrays = operands(shape, None)
    total = measure(both, arrays, 0.02)
    yield row("forward", measure(forward, arrays, 0.02))
    for phase in phases(shape):
        for step, function, given in with_gradients(*phase):
            yield row(step, measure(function, given, 0.01))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--phases", action="store_true", help="the steps of the block on one GPU")
    options = parser.parse_args()
    mesh = make_mesh()
    on_gpu = jax.default_backend() == "gpu"
    if mesh is None:
        of_one = rows_of_phases if options.phases else rows_of_one
        rows = of_one(FFN if on_gpu else SMALL, options.pairs)
    else:
        shapes = BLOCKS if on_gpu else [SMALL]
        rows = (row for shape in shapes for row in rows_of(shape, mesh, options.pairs))
    _measure.write(options.json, rows)


if __name__ == "__main__":
    main()
