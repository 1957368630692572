"""Grouped GEMMs of GPUs without TMA, on one that has it: against one dense GEMM, and against `lax.ragged_dot`.

The kernels read operands by pointers. Each is run as compiled for this GPU, with as many steps under way as its shared
memory holds, and as PTX of compute capability 8.0 with the tiles that such GPUs get: the driver compiles it, so what
runs is `mma.sync` and `cp.async`. Wanted of the dense rate: 0.80 and 0.45; of `ragged_dot`'s: 3.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks.grouped_gemm import CPU, GPU, check, on_gpu, operands
from benchmarks.grouped_gemm import passes as passes_of_ops
from expertmesh.core import _jax
from expertmesh.core.kernels.choice.grouped_gemm import (
    NARROW,
    WEIGHTS_BY_POINTERS,
    Config,
    Tiles,
)
from expertmesh.core.kernels.device import current_device

OLDEST = 80


def as_ptx(compile_triton, *arguments):
    """What `compile_triton` gives for the oldest GPUs, as PTX."""
    *kernel, _ = arguments
    return compile_triton(*kernel, OLDEST, "ptx")


def rows_by_pointers(contraction: int, transposed: bool) -> Tiles:
    """Tiles of rows, as compiled for this GPU. NVIDIA H100, 2026-11-27, of the dense rate.

    An input gradient of 1536: flat 0.80, else 0.78; a forward of 1024: flat 0.76, else 0.87.
    """
    flat = transposed and contraction < 2048
    return dataclasses.replace(NARROW, k=64, stages=4, flat=flat)


# Tiles of rows and of weight gradients, and what gives a kernel's code in place of `compile_triton`.
FORMS = {
    "as compiled for it": ((rows_by_pointers, WEIGHTS_BY_POINTERS), _jax.compile_triton),
    f"as PTX of {OLDEST / 10}": (
        (lambda *_: NARROW, NARROW),
        functools.partial(as_ptx, _jax.compile_triton),
    ),
}


def passes(arrays, tiles: tuple[Callable[[int, bool], Tiles], Tiles]):
    """pass -> function of what the op's takes."""
    from expertmesh.core.kernels.triton import grouped_gemm as kernels

    rows_tiles, weight_tiles = tiles
    to = {"out_dtype": arrays[0].dtype}

    def config(of: Tiles) -> Config:
        return Config("triton", of, current_device().programs())

    def rows(transposed):
        def run(a, b, s):
            options = to | {"config": config(rows_tiles(a.shape[-1], transposed))}
            options |= {"transposed": transposed, "clear_padding": True}
            return kernels.launch_rows(a[0], b, s[0], **options)[None]

        return run

    def weights(a, b, s):
        return kernels.launch_weights(a[0], b[0], s[0], config=config(weight_tiles), **to)

    return {"fprop": rows(False), "dgrad": rows(True), "wgrad": weights}


def cases_of(name: str, shape, form: str, tiles) -> Iterator[_measure.Case]:
    rows, k, n, groups = shape
    flops, arrays = 2 * rows * k * n, operands(shape, jnp.bfloat16 if on_gpu() else jnp.float32)
    ours = passes(arrays, tiles) if on_gpu() else {}
    for which, (grouped, dense) in passes_of_ops(*arrays).items():
        function, given = ours.get(which, grouped[0]), grouped[1]
        case = f"bfloat16 {which} {form}, {name} {rows}x{k}x{n}, {groups} groups"
        checked = functools.partial(check, which, function, *given)
        rates = 400e12, 600e12
        yield _measure.gemm_case(
            "pointer_gemm", case, flops, (function, given), dense, "dense XLA GEMM", rates, checked
        )
    lhs, _, rhs, sizes = arrays
    ours_of = ours.get("fprop", passes_of_ops(*arrays)["fprop"][0][0]), (lhs, rhs, sizes)
    ragged = jax.lax.ragged_dot, (lhs[0], rhs, sizes[0])
    case = f"bfloat16 fprop {form}, {name} {rows}x{k}x{n} against ragged_dot"
    yield _measure.gemm_case(
        "pointer_gemm", case, flops, ours_of, ragged, "lax.ragged_dot", (400e12, 60e12)
    )


def rows_of(form: str) -> Iterator[dict]:
    shapes, (tiles, compiled) = GPU if on_gpu() else CPU, FORMS[form]
    with mock.patch.object(_jax, "compile_triton", compiled):
        cases = [case for each in shapes.items() for case in cases_of(*each, form, tiles)]
        yield from _measure.measured(cases, pairs=7)


def _pass(row: dict) -> str | None:
    dense = row["reference"].startswith("dense")
    return row["case"].partition(",")[0] if dense else None


def main():
    parser = _measure.parser(__doc__)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    options = parser.parse_args()
    rows = (row for form in options.forms for row in rows_of(form))
    _measure.write(options.json, _measure.with_means(rows, _pass))


if __name__ == "__main__":
    main()
