"""GEMMs of rows with a gated activation, or its gradient, behind them, for Hopper in CUDA C++."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.gathered_activation import (
    COLUMNS,
    GRAD_TILES,
    GRAD_TILES_OF_8_BITS,
    LINE,
    TILES,
    Tiles,
)
from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config
from expertmesh.core.kernels.cuda.cluster_order import cluster_order
from expertmesh.core.kernels.cuda.cuda_call import (
    WGMMA_TYPES,
    activation_macros,
    cuda_call,
    source_text,
    wgmma,
)


def launch(
    tokens, index, rhs, weights, group_sizes, *, config: Config, activation, keeps_h: bool
):  # fmt: skip
    """[T, K] at [C] x [G, K, 2, F], times float32[C] -> [C, 2, F] if it is kept, and [C, F]."""
    (T, K), (C,), (G, _, _, F) = tokens.shape, index.shape, rhs.shape
    h, out = (jax.ShapeDtypeStruct((C, *of), tokens.dtype) for of in ((2, F), (F,)))
    places = cluster_order(config.programs, SHARED_BYTES)
    made = dict(activation=activation, keeps_h=keeps_h, places=places)
    return cuda_call(
        launcher.TensorMap.of(rhs.reshape(G, K, 2 * F), (1, 64, 64)), tokens, index, weights,
        group_sizes.astype(jnp.int32),
        source=source((tokens.dtype, rhs.dtype), tokens.dtype, **made), name="gathered_activation",
        scalars=(T, C, K // 64, F, G), out_type=(h, out) if keeps_h else out,
        programs=config.programs, warps=16, shared=SHARED_BYTES,
    )  # fmt: skip


def launch_quantized(
    rows, source_row, rhs, weights, group_sizes, scales, *,
    config: Config, activation, dtype, gathers: bool,
):  # fmt: skip
    """[C, K], or [T, K] if it `gathers`, x [G, 2 F, K] of 8 bits, with scales [G] of both, times float32[C] -> h
    [C, 2, F] and [C, F] of `dtype`.

    And of each tile of columns the largest magnitude in each row of the second, as float32's bits, int32[F / 128, C].
    """
    (N, K), (C,), (G, W, _) = rows.shape, source_row.shape, rhs.shape
    h, out = (jax.ShapeDtypeStruct((C, *of), dtype) for of in ((2, W // 2), (W // 2,)))
    places = cluster_order(config.programs, SHARED_BYTES)
    made = dict(activation=activation, keeps_h=True, gathers=gathers, places=places)
    read = rows if gathers else launcher.TensorMap.of(rows, (128, 128))
    return cuda_call(
        launcher.TensorMap.of(rhs, (1, 128, 128)), read, source_row, weights,
        group_sizes.astype(jnp.int32), *scales,
        source=source((rows.dtype, rhs.dtype), dtype, **made), name="gathered_activation",
        scalars=(N if gathers else ALL, C, K // 128, W // 2, G), out_type=(h, out, _amax_type(W // 2, 128, C)),
        programs=config.programs, warps=16, shared=SHARED_BYTES,
    )  # fmt: skip


def launch_grad(
    dy, source_row, rhs, h, weights, group_sizes, scales=(), *,
    config: Config, activation, gathers: bool,
):  # fmt: skip
    """Rows dy [C, D], or [T, D] if `gathers`, x [G, F, D], h [C, 2, F] and float32[C].

    `scales`: [G] of dy and of rhs, if they have 8 bits.

    Returns d_h [C, 2, F]; the activation [C, F], or with scales of each tile of columns the largest magnitude in each
    row of d_h, as float32's bits, int32[F / 256, C]; and of each tile a part of the gradient of `weights`,
    float32[F / 256, C].
    """
    (G, F, D), C, step = rhs.shape, source_row.shape[0], LINE // dy.dtype.itemsize
    d_h, a = (jax.ShapeDtypeStruct(shape, h.dtype) for shape in (h.shape, (C, F)))
    amax = _amax_type(F, COLUMNS, C)
    places = cluster_order(config.programs, SHARED_BYTES)
    made = dict(activation=activation, gathers=gathers, places=places)
    rows = dy if gathers else launcher.TensorMap.of(dy, (128, step))
    return cuda_call(
        launcher.TensorMap.of(rhs, (1, 128, step)), rows, source_row, weights, h,
        group_sizes.astype(jnp.int32), *scales,
        source=grad_source((dy.dtype, rhs.dtype), h.dtype, **made), name="gathered_activation_grad",
        scalars=(dy.shape[0] if gathers else ALL, C, D // step, F, G),
        out_type=(d_h, amax if scales else a, amax.update(dtype=jnp.float32)),
        programs=config.programs, warps=16, shared=SHARED_BYTES,
    )  # fmt: skip


ALL = 2**31 - 1  # tokens, of which each source is one


def _amax_type(width: int, columns: int, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((width // columns, rows), jnp.int32)


def source(
    dtypes, dtype, *, activation, keeps_h: bool, gathers: bool = True, places: tuple[int, ...] = ()
) -> str:
    """The kernel in CUDA C++ for rows and weights of `dtypes`, and results of `dtype`.

    `places`: as of `grouped_gemm.rows_source`.
    """
    defined = _macros(dtype, activation, TILES, places)
    defined |= dict(KEEPS_H=int(keeps_h), GATHERS=int(gathers))
    # A weight of 16 bits lies along its columns, not along the contraction.
    return _source("gathered_activation.cu", dtypes, defined, "1, 1, 0, 1")


def grad_source(dtypes, dtype, *, activation, gathers: bool, places: tuple[int, ...] = ()) -> str:
    """That of `launch_grad`, as `source`."""
    tiles = GRAD_TILES_OF_8_BITS if jnp.dtype(dtypes[0]).itemsize == 1 else GRAD_TILES
    defined = _macros(dtype, activation, tiles, places) | dict(GATHERS=int(gathers))
    return _source("gathered_activation_grad.cu", dtypes, defined, "1, 1, 0, 0")


def _macros(dtype, activation, tiles: Tiles, places: tuple[int, ...]) -> dict[str, object]:
    producer, consumer, last = tiles.registers
    defined = activation_macros(activation) | dict(
        HALF=int(jnp.dtype(dtype) == jnp.float16), SHARED=SHARED_BYTES, STAGES=tiles.stages, LATER=tiles.later or 0,
        SPLITS=int(tiles.splits),
        REGISTERS_PRODUCER=producer, REGISTERS_CONSUMER=consumer, REGISTERS_STORER=last,
    )  # fmt: skip
    return defined | ({"PLACES": ", ".join(map(str, places))} if places else {})


def _source(file: str, dtypes, defined: dict[str, object], flags: str) -> str:
    """`flags`: of operands of 16 bits; those of 8 lie along the contraction."""
    kinds = ".".join(WGMMA_TYPES[jnp.dtype(dtype).name] for dtype in dtypes)
    eight_bits = jnp.dtype(dtypes[0]).itemsize == 1
    depth, flags = (32, "1, 1") if eight_bits else (16, flags)
    columns = 64 if defined["SPLITS"] else 128
    function = "__device__ __forceinline__ void multiply"
    defined |= dict(EIGHT_BITS=int(eight_bits))
    instruction = wgmma(function, f"m64n{columns}k{depth}.f32.{kinds}", columns // 2, flags)
    files = "hopper.cuh", "gathered_rows.cuh", "activation.cuh", file
    return source_text(*files, defined=defined, INSTRUCTION=instruction)
