"""The up projection of rows read where their tokens are, and their gated activation, for Hopper in CUDA C++."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.gathered_activation import TILES, Tiles
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
    made = dict(activation=activation, keeps_h=keeps_h, tiles=config.tiles, places=places)
    return cuda_call(
        launcher.TensorMap.of(rhs.reshape(G, K, 2 * F), (1, 64, 64)), tokens, index, weights,
        group_sizes.astype(jnp.int32),
        source=source(tokens.dtype, **made), name="gathered_activation",
        scalars=(T, K // 64, F, G), out_type=(h, out) if keeps_h else out,
        programs=config.programs, warps=16, shared=SHARED_BYTES,
    )  # fmt: skip


def source(
    dtype, *, activation, keeps_h: bool, tiles: Tiles = TILES, places: tuple[int, ...] = ()
) -> str:
    """The kernel in CUDA C++ for operands of `dtype`; `places`: as of `grouped_gemm.rows_source`."""
    kind = WGMMA_TYPES[jnp.dtype(dtype).name]
    producer, consumer, storer = tiles.registers
    defined = activation_macros(activation) | dict(
        HALF=int(jnp.dtype(dtype) == jnp.float16), KEEPS_H=int(keeps_h), SHARED=SHARED_BYTES,
        STAGES=tiles.stages, REGISTERS_PRODUCER=producer, REGISTERS_CONSUMER=consumer,
        REGISTERS_STORER=storer,
    )  # fmt: skip
    if places:
        defined["PLACES"] = ", ".join(map(str, places))
    # The weight lies along its columns, not along the contraction.
    function, shape = "__device__ __forceinline__ void multiply", f"m64n128k16.f32.{kind}.{kind}"
    instruction = wgmma(function, shape, 64, "1, 1, 0, 1")
    files = "hopper.cuh", "activation.cuh", "gathered_activation.cu"
    return source_text(*files, defined=defined, INSTRUCTION=instruction)
