"""A native Flax MoE block replaced by ours inside a model; docs/tutorial.md goes through it.

    python examples/tutorial.py              on all GPUs, or on 4 virtual devices of the CPU (JAX_NUM_CPU_DEVICES)
    srun python examples/tutorial.py         on those of a Slurm job, a process for each (examples/slurm.sbatch)

Prints how far the blocks differ, what a step of each takes, and what crosses the devices.
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import collections
import dataclasses
import functools
import importlib.metadata
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.core import hlo
from expertmesh.core.testing import compile_partitioned
from expertmesh.ep import bootstrap, recv_capacity
from expertmesh.ep import is_supported as ep_is_supported
from expertmesh.flax_moe import MoEConfig, NativeMoEBlock, is_supported
from expertmesh.flax_moe.linen import MoEBlock

AXES = ("fsdp", "ep")  # the one order of them: the mesh's, and that in which tokens are split
TOKENS = PartitionSpec(AXES)
RULES = (("exp", "ep"), ("embed", "fsdp"), ("mlp", None))


class Layer(nn.Module):
    """The second half of a transformer's layer, around whatever block it is given."""

    block: nn.Module

    @nn.compact
    def __call__(self, x):
        out = self.block(nn.RMSNorm(dtype=x.dtype)(x))
        return x + out.y, out.aux_loss


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens [batch, sequence], model width D, expert width F, E experts, K of them for a token."""

    batch: int
    sequence: int
    D: int
    F: int
    E: int = 8
    K: int = 2

    def on(self, mesh) -> "Shape":
        """As large at least, where the mesh divides the batch, and fsdp D into the 128-wide blocks of `fp8_block`."""
        batch, block = mesh.size, 128 * mesh.shape["fsdp"]
        return dataclasses.replace(
            self, batch=-(-self.batch // batch) * batch, D=-(-self.D // block) * block
        )

    def config(self, **options) -> MoEConfig:
        sizes = dict(num_experts=self.E, top_k=self.K, expert_dim=self.F)
        return MoEConfig(**sizes, aux_loss_coeff=1e-2, param_dtype=jnp.bfloat16, **options)


ON_GPU = Shape(batch=8, sequence=2048, D=1024, F=4096)
ON_CPU = Shape(batch=8, sequence=4, D=256, F=128, E=4)


def make_mesh(devices):
    """(fsdp, ep): 2 x 2 of four devices; pairs of neighbours share out the experts, on one host."""
    ep = 2 if len(devices) % 2 == 0 else 1
    sizes = (len(devices) // ep, ep)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * 2, devices=devices)


def make_operands(shape: Shape, mesh):
    """Variables, drawn once and laid out as their logical axes say, and tokens."""
    model = Layer(MoEBlock(shape.config()))

    def init(key):
        x = jax.random.normal(key, (shape.batch, shape.sequence, shape.D), jnp.bfloat16)
        return model.init(key, x), x

    named = jax.eval_shape(init, jax.random.key(0))[0]
    specs = nn.logical_to_mesh(nn.get_partition_spec(named), RULES)
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, TOKENS))
    return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=layout)(jax.random.key(0))


def make_step(block):
    """(variables, x) -> y and the gradients of a loss, of a model around the block."""
    model = Layer(block)

    def loss(variables, x):
        y, aux_loss = model.apply(variables, x)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - 1)) + aux_loss, y

    def step(variables, x):
        (d_variables, d_x), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return {"y": y, "d_x": d_x, "d": d_variables["params"]}

    return step


def make_forward(block):
    """The same without gradients."""
    return lambda variables, x: {"y": Layer(block).apply(variables, x)[0]}


def compile_program(function, operands):
    """The compiled program and its text; of XLA:CPU, which widens narrow numbers, as the partitioner left it."""
    lowered = jax.jit(function).lower(*operands)
    if jax.default_backend() == "cpu" and operands[1].sharding.num_devices > 1:
        return compile_partitioned(lowered)
    compiled = lowered.compile()
    return compiled, compiled.as_text()


def compare(got, want) -> dict[str, float]:
    """||got - want|| / ||want|| of each array of `got`, by its name."""

    def error(got, want):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(got - want)) / jnp.sum(jnp.square(want)))

    want = {name: want[name] for name in got}
    errors = jax.tree.leaves_with_path(jax.jit(lambda *t: jax.tree.map(error, *t))(got, want))
    name_of = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name_of(path): float(value) for path, value in errors}


def milliseconds(step, operands, repeats: int = 20) -> float:
    """The median of several runs after one that does not count; each ends when all arrays of its result are there."""
    jax.block_until_ready(step(*operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(*operands))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def crossing(text: str, mesh) -> dict[str, int]:
    """What crosses the devices in a program, and how often: kind, axes of the mesh, shapes on each device."""
    lines: collections.Counter[str] = collections.Counter()
    for found in hlo.collectives(text):
        if found.group_size == 1:
            continue
        axes = hlo.axes_of(found.groups, dict(mesh.shape)) or ("?",)
        lines[f"{found.kind} over {', '.join(axes)}: {' '.join(found.shapes)}"] += 1
    return lines


def choose_transport() -> str:
    """By stores into the peers' memory where GPUs reach it; else what moves the fewest bytes."""
    supported, why = ep_is_supported("nvlink")
    if not supported:
        print(f"transport 'auto': nvlink is not there ({why})")
    return "nvlink" if supported else "auto"


def describe(shape: Shape, mesh) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))
    rows = recv_capacity(
        num_experts=shape.E,
        top_k=shape.K,
        tokens_per_rank=shape.batch * shape.sequence // mesh.size,
        ep_size=mesh.shape["ep"],
    )
    print(f"{mesh.size} x {mesh.devices.flat[0].device_kind} as {dict(mesh.shape)}; {versions}")
    print(f"{shape}; a device receives at most {rows} rows")


def check(shape: Shape, mesh) -> None:
    """Finds a process that is late, or was started otherwise, before any device waits for it."""
    if jax.process_count() > 1:
        tokens = (shape.batch, shape.sequence, shape.D)
        x = jax.ShapeDtypeStruct(tokens, jnp.bfloat16, sharding=NamedSharding(mesh, TOKENS))
        bootstrap(shape.config().exchange(axis=("ep",)), x, top_k=shape.K)


def main(devices=None) -> dict[str, dict[str, float]]:
    """Runs the tutorial on these devices, or all; returns what was compared, by the block's name."""
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()
    on_gpu = jax.default_backend() == "gpu"
    mesh = make_mesh(devices or jax.devices())
    shape = (ON_GPU if on_gpu else ON_CPU).on(mesh)
    describe(shape, mesh)
    check(shape, mesh)
    operands = make_operands(shape, mesh)

    native, _ = compile_program(make_step(NativeMoEBlock(shape.config())), operands)
    reference = milliseconds(native, operands)
    print(f"native: {reference:.2f} ms" + "; on a CPU no time says anything of GPUs" * (not on_gpu))
    supported, why = is_supported("moe")
    if not supported:
        print(f"ours: skipped, {why}")
        return {}

    transport, want, errors = choose_transport(), native(*operands), {}
    for recipe in (None, "fp8_block"):
        block = MoEBlock(shape.config(transport=transport, recipe=recipe))
        fast, why = is_supported(recipe) if recipe else (True, "")
        name = recipe or "bfloat16"
        if fast:
            ours, text = compile_program(make_step(block), operands)
            took = milliseconds(ours, operands)
            print(f"{name}: {took:.2f} ms, {reference / took:.2f} times as fast as native")
        else:
            ours, text = compile_program(make_forward(block), operands)
            print(f"{name}: the forward only, not timed, since {why}")
        errors[name] = compare(ours(*operands), want)
        for path, error in errors[name].items():
            print(f"    differs by {error:.1e} of the norm: {path}")
        for line, times in crossing(text, mesh).items():
            print(f"    {times} x {line}")
    return errors


if __name__ == "__main__":
    main()
