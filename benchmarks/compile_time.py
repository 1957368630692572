"""How long a block's first call takes, forward and backward, in a process with empty caches and in one that finds them.

Tracing, lowering, Triton's and XLA's compilation and one run of few tokens; the start of the process and of the GPU do
not count. JAX's persistent cache and Triton's are in a folder of their own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time

import jax

from benchmarks import _measure
from benchmarks.moe_block import FFN, SMALL, make_mesh, operands, passes
from expertmesh.flax_moe import moe

# Seconds in a first process and in a second one, which finds the caches of the first.
WANTED = {"first": 60, "second": 10}


def first_call(recipe: str) -> float:
    """Seconds, in this process."""
    few = dataclasses.replace(FFN, tokens=(1024,))
    shape = few if jax.default_backend() == "gpu" else SMALL
    config = shape.config(recipe=None if recipe == "none" else recipe)
    both = passes(moe, config)["forward and backward"]
    # Over Explicit axes: what has no mesh is a custom partitioning, which JAX's cache does not take.
    arrays = operands(shape, make_mesh((1, 1)))
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(both)(*arrays))
    return time.perf_counter() - start


def in_process(recipe: str, folder: str) -> float:
    """The same in a new process whose caches are in `folder`."""
    caches = {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "XDG_CACHE_HOME": folder,
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", "--first-call", recipe]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows():
    for recipe in ("none", "fp8_block"):
        with tempfile.TemporaryDirectory() as folder:
            for which, wanted in WANTED.items():
                seconds = in_process(recipe, folder)
                yield _measure.row(
                    bench="compile_time",
                    case=f"first call of the block, recipe {recipe}, {which} process",
                    metric="time",
                    value=seconds,
                    unit="s",
                    reference=f"what is wanted, {wanted} s",
                    ratio=wanted / seconds,
                )


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--first-call", metavar="RECIPE", help="measure in this process, print")
    options = parser.parse_args()
    # The processes share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.first_call:
        print(first_call(options.first_call))
    else:
        _measure.write(options.json, rows())


if __name__ == "__main__":
    main()
