"""How long a block's first call takes, forward and backward, in a process with empty caches and in one that finds them.

Tracing, lowering, Triton's and XLA's compilation and one run of few tokens; the start of the process and of the GPU do
not count. JAX's persistent cache and Triton's are in a folder of their own.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax

from benchmarks import _measure
from benchmarks.moe_block import FFN, SMALL, operands, passes
from expertmesh.flax_moe import moe
from expertmesh.flax_moe.native import native_moe


def first_call(recipe: str) -> float:
    """Seconds, in this process; "native" is the block in plain JAX."""
    few = dataclasses.replace(FFN, tokens=(1024,))
    shape = few if jax.default_backend() == "gpu" else SMALL
    config = shape.config(recipe=None if recipe in ("none", "native") else recipe)
    both = passes(native_moe if recipe == "native" else moe, config)["forward and backward"]
    arrays = operands(shape, None)
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(both)(*arrays))
    return time.perf_counter() - start


def in_process(recipe: str, folder: str) -> float:
    """The same in a new process whose caches are in `folder`."""
    caches = {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", "--first-call", recipe]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows():
    with tempfile.TemporaryDirectory() as folder:
        native = in_process("native", folder)
    for recipe in ("none", "fp8_block"):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (in_process(recipe, folder) for _ in range(2))
        for name, seconds in (("first process", first), ("second process", second)):
            yield _measure.row(
                bench="compile_time",
                case=f"first call of the block, recipe {recipe}, {name}",
                metric="time",
                value=seconds,
                unit="s",
                reference=f"native_moe in a first process, {native:.1f} s",
                ratio=native / seconds,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--first-call", metavar="RECIPE", help="measure in this process, print")
    options = parser.parse_args()
    if options.first_call:
        print(first_call(options.first_call))
    else:
        _measure.write(options.json, rows())


if __name__ == "__main__":
    main()
