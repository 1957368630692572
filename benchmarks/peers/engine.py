"""Transformer Engine's block with expert parallelism, beside ours in the same run, on the GPUs of one host.

    pip install "transformer_engine[core_cu13,jax]==2.20.2" "nvidia-nccl-cu13>=2.32.3" "nvidia-cublas>=13.4"
    python -m benchmarks.peers.engine --mesh 2x2 --json engine.json

Each GPU has a process of its own. Both blocks take the same numbers in bfloat16 and drop nothing: Transformer Engine
gets room for all rows that may come. A small shape's results are compared first. Then both passes of each shape of
`benchmarks.moe_block` are timed as there, the two blocks by turns. Transformer Engine compiles kernels with nvcc: the
first shape takes half a minute.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import _measure
from benchmarks.moe_block import (
    BLOCKS,
    LANES,
    ROUNDS,
    Shape,
    medians,
    passes,
    require_close,
    row_of,
)
from expertmesh.flax_moe import moe

AXES = ("fsdp", "ep")
(CHECKED, *_), TOLERANCE = LANES["check"], 2e-2
STEPS, HELD = 20, 150  # steps of a scan; seconds for a shape, nvcc's too
SPECS = (
    {"gate_kernel": PartitionSpec(), "wi": PartitionSpec("ep"), "wo": PartitionSpec("ep")},
    PartitionSpec(AXES),
    PartitionSpec(AXES),
)


class Meshes(NamedTuple):
    """The same GPUs in the same order, as each block wants its axes."""

    theirs: Mesh
    ours: Mesh


def meshes(fsdp: int, ep: int) -> Meshes:
    grid = np.array(sorted(jax.devices(), key=lambda d: d.process_index)).reshape(fsdp, ep)
    return Meshes(
        *(Mesh(grid, AXES, axis_types=(kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit))
    )


def operands(shape: Shape, mesh: Mesh) -> tuple:
    """Parameters, tokens and the cotangent of the result, as Transformer Engine takes them."""
    width, inner, experts = shape.width, shape.expert_width, shape.experts

    def drawn():
        keys = iter(jax.random.split(jax.random.key(0), 5))

        def normal(*size: int, fan_in: int = 1):
            return jax.random.normal(next(keys), size, jnp.bfloat16) / math.sqrt(fan_in)

        params = {
            "gate_kernel": normal(width, experts, fan_in=width),
            "wi": normal(experts, width, 2 * inner, fan_in=width),
            "wo": normal(experts, inner, width, fan_in=inner),
        }
        return params, normal(*shape.tokens, width), normal(*shape.tokens, width)

    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    return jax.jit(drawn, out_shardings=placed)()


def as_ours(given: tuple, mesh: Mesh) -> tuple:
    """The same buffers on our mesh; gate and up projection apart in `wi`."""

    def moved(array: jax.Array, spec: PartitionSpec, *last: int) -> jax.Array:
        def shaped(size):
            return (*size[:-1], *(last or size[-1:]))

        parts = [shard.data.reshape(shaped(shard.data.shape)) for shard in array.addressable_shards]
        place = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(shaped(array.shape), place, parts)

    (params, *tokens), (specs, *of_tokens) = given, SPECS
    last = {"wi": (2, params["wi"].shape[-1] // 2)}
    params = {
        name: moved(value, specs[name], *last.get(name, ())) for name, value in params.items()
    }
    return params, *map(moved, tokens, of_tokens)


@contextlib.contextmanager
def on_their_mesh(mesh: Mesh) -> Iterator[None]:
    """Where Transformer Engine's block is traced and run."""
    from flax.linen import partitioning
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    split = mesh.shape["fsdp"] > 1
    rules = (("exp", "ep"), ("embed", None), ("mlp", None), ("batch", AXES if split else "ep"))
    resource = MeshResource(ep_resource="ep", fsdp_resource="fsdp" if split else None)
    with mesh, global_shard_guard(resource), partitioning.axis_rules(rules):
        yield


def prepared(shape: Shape, mesh: Mesh, before: dict | None) -> dict:
    """Sizes the exchange for a shape, after `before`, that of the last one; what it is sized for."""
    from transformer_engine.jax import ep, moe

    most = math.prod(shape.tokens) // mesh.size
    ranks = mesh.shape["ep"]
    capacity = moe.get_moe_recv_capacity_per_rank(
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        max_tokens_per_rank=most,
        ep_size=ranks,
        recv_capacity_factor=None,
    )
    sizes = {"num_experts": shape.experts, "max_tokens_per_rank": most, "hidden_dim": shape.width}
    sizes["recv_capacity_per_rank"] = capacity
    if sizes != before:
        with on_their_mesh(mesh):
            if before:
                ep.ep_finalize()
            ep.ep_bootstrap(
                world_size=mesh.size,
                rank=jax.process_index(),
                max_token_dtype=jnp.bfloat16,
                **sizes,
            )
        moe.record_ep_bootstrap_signature_for_moe(ep_size=ranks, **sizes)
    return sizes


def their_passes(shape: Shape, mesh: Mesh, capacity: int) -> Callable:
    """Both passes of Transformer Engine's block."""
    from transformer_engine.jax import moe as theirs

    def block(params, x):
        return theirs.moe(
            x,
            *(params[name] for name in ("gate_kernel", "wi", "wo")),
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            ep_axis="ep",
            data_parallelism_axes=("fsdp",) if mesh.shape["fsdp"] > 1 else (),
            input_axes=("batch", None, None),
            dtype=jnp.bfloat16,
            recv_capacity_per_rank=capacity,
        )[0]

    def both(params, x, dy):
        y, pull = jax.vjp(block, params, x)
        return y, pull(dy)

    return both


def of_results(mesh: Mesh) -> Any:
    """Where Transformer Engine's results and gradients lie; their types do not say it."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), (SPECS[1], SPECS[:2]))


def error(mine: jax.Array, theirs: jax.Array) -> float:
    """Of the median row that this process has: where a token's scores tie, blocks may choose different experts."""
    found = []
    for a, b in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
        wide = [np.asarray(shard.data, np.float32).reshape(-1, mine.shape[-1]) for shard in (a, b)]
        length = np.maximum(np.linalg.norm(wide[1], axis=-1), np.finfo(np.float32).tiny)
        found += list(np.linalg.norm(wide[0] - wide[1], axis=-1) / length)
    return float(np.median(found))


def ours_of(shape: Shape) -> Callable:
    return passes(moe, shape.config())["forward and backward"]


def check(on: Meshes) -> dict:
    """Raises a RuntimeError where the blocks differ; what the exchange is sized for."""
    given = operands(CHECKED, on.theirs)
    sizes = prepared(CHECKED, on.theirs, None)
    function = their_passes(CHECKED, on.theirs, sizes["recv_capacity_per_rank"])
    with on_their_mesh(on.theirs):
        theirs = jax.jit(function, out_shardings=of_results(on.theirs))(*given)
    mine = jax.jit(ours_of(CHECKED))(*as_ours(given, on.ours))
    errors = [error(*pair) for pair in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True)]
    require_close(errors, given[0], TOLERANCE, "the blocks differ")
    return sizes


def rows_of(shapes: list[Shape], on: Meshes) -> Iterator[dict]:
    from transformer_engine import __version__

    signal.alarm(HELD)
    sizes = check(on)
    for shape in shapes:
        signal.alarm(HELD)
        given = operands(shape, on.theirs)
        sizes = prepared(shape, on.theirs, sizes)
        function = their_passes(shape, on.theirs, sizes["recv_capacity_per_rank"])
        with on_their_mesh(on.theirs):
            theirs = _measure.steps(function, given, STEPS, placed=of_results(on.theirs))
        ours = _measure.steps(ours_of(shape), as_ours(given, on.ours), STEPS)
        mine, other = medians((ours, ROUNDS), (theirs, ROUNDS))
        name = f"Transformer Engine {__version__}"
        yield row_of(shape, on.ours, "auto", "uniform, a process for each GPU", mine, name, other)


def launch(count: int) -> int:
    """A process for each GPU; the exit status: that of the first one that fails, which ends the others."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = listed.split(",") if listed else [str(gpu) for gpu in range(count)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.peers.engine", *sys.argv[1:], f"--port={port}"]
    with contextlib.ExitStack() as ending:
        running: list[subprocess.Popen[Any]] = []
        for rank in range(count):
            env = os.environ | {
                "CUDA_VISIBLE_DEVICES": gpus[rank],
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }
            running.append(subprocess.Popen([*command, f"--rank={rank}"], env=env))
            ending.callback(running[-1].kill)
        while True:
            codes = [process.poll() for process in running]
            if any(codes) or None not in codes:
                return next(filter(None, codes), 0)
            time.sleep(0.2)


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--mesh", metavar="FSDPxEP", default="2x2")
    parser.add_argument(
        "--shapes", metavar="N,...", help="of the table of benchmarks.moe_block; default: all"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    fsdp, ep = map(int, options.mesh.split("x"))
    if options.rank is None:
        sys.exit(launch(fsdp * ep))
    jax.distributed.initialize(f"127.0.0.1:{options.port}", fsdp * ep, options.rank)
    numbers = map(int, options.shapes.split(",")) if options.shapes else range(1, len(BLOCKS) + 1)
    rows = rows_of([BLOCKS[number - 1] for number in numbers], meshes(fsdp, ep))
    if options.rank == 0:
        _measure.write(options.json, rows)
    else:
        for _ in rows:
            pass


if __name__ == "__main__":
    main()
