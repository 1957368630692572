"""How many kernels and copies one GPU runs for a step of the MoE block, against the same block in plain JAX."""

import argparse
import pathlib

import jax

from benchmarks import _measure, moe_block
from expertmesh.flax_moe import moe
from expertmesh.flax_moe.native import native_moe


def rows_of(shape: moe_block.Shape, mesh, transport: str):
    """Of the forward, and of both passes."""
    config, arrays = shape.config(transport=transport), moe_block.operands(shape, mesh)
    of_native = moe_block.passes(native_moe, config)
    for which, function in moe_block.passes(moe, config).items():
        calls = (jax.jit(f).lower(*arrays).compile() for f in (function, of_native[which]))
        ours, native = (len(_measure.kernels(call, arrays)) for call in calls)
        yield _measure.row(
            bench="block_launches",
            case=f"bfloat16 {which}, {shape}, {dict(mesh.shape) if mesh else '1 device'}, {transport}",
            metric="launches",
            value=ours,
            unit="launches",
            reference=f"native_moe, {native} launches",
            ratio=native / max(ours, 1),  # no GPU, no launches
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    on_gpu, alone = jax.default_backend() == "gpu", jax.device_count() == 1
    shape = moe_block.BLOCKS[0] if on_gpu else moe_block.SMALL
    rows = rows_of(shape, moe_block.make_mesh(), "auto" if alone or not on_gpu else "nvlink")
    _measure.write(options.json, rows)


if __name__ == "__main__":
    main()
