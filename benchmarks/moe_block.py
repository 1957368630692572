"""The MoE block, forward and with its backward, against the same block in plain JAX (`native_moe`).

bfloat16 throughout, gradients of the tokens and of all parameters; tokens are spread over (fsdp, ep), experts over ep,
and weights replicated over fsdp. On one GPU the FFN alone is timed too, as others publish it: a rate counts the three
products of each routed row, and twice as many for the backward.
"""

import argparse
import dataclasses
import pathlib

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

    def config(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            expert_dim=self.expert_width,
            dtype="bfloat16",
            param_dtype="bfloat16",
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
    arrays = operands(shape, mesh)
    check(shape, arrays)
    for (which, ours), native in zip(
        passes(moe, shape.config()).items(),
        passes(native_moe, shape.config()).values(),
        strict=True,
    ):
        mine, other, ratio = _measure.alternate((ours, arrays), (native, arrays), pairs)
        flops = shape.flops() * (1 if which == "forward" else 3)
        alone = mesh is None
        yield _measure.row(
            bench="moe_block",
            case=f"bfloat16 {which}, {shape}, {'1 device' if alone else dict(mesh.shape)}",
            metric="rate" if alone else "time",
            value=flops / mine / 1e12 if alone else 1e3 * mine,
            unit="TFLOP/s" if alone else "ms",
            reference=f"native_moe, {flops / other / 1e12:.3g} TFLOP/s"
            if alone
            else f"native_moe, {1e3 * other:.3g} ms",
            ratio=ratio,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    mesh = make_mesh()
    shapes = [SMALL] if jax.default_backend() != "gpu" else [FFN] if mesh is None else BLOCKS
    _measure.write(
        options.json, (row for shape in shapes for row in rows_of(shape, mesh, options.pairs))
    )


if __name__ == "__main__":
    main()
