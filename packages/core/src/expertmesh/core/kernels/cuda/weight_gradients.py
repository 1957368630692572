"""What the weight gradients in CUDA C++ (`weight_gradients.cuh`) share: their text and their launch."""

import jax
import jax.numpy as jnp

from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config, WeightTiles
from expertmesh.core.kernels.cuda.cuda_call import cuda_call, source_text


def source(file: str, out_dtype, tiles: WeightTiles, more=(), **lines: str) -> str:
    """The kernel in `file`, in CUDA C++, for results of this type; `more` macros, `lines` as in `source_text`."""
    out_dtype = jnp.dtype(out_dtype)
    defined: dict[str, object] = dict(
        dict(INTERLEAVED=0, CROSSWISE=0) | dict(more),
        WIDE=int(out_dtype.itemsize == 4), HALF=int(out_dtype == jnp.float16), STAGES=tiles.stages,
        STAGE_BYTES=tiles.stage_bytes, STAGES_AT=tiles.stages_at(out_dtype), STAGED=tiles.staged,
        HANDED=tiles.handed_of(out_dtype), OWN=tiles.strips, BAND=tiles.band,
        PASSING=int(tiles.passing), KEEPING=int(tiles.keeping), WAVES=tiles.waves, SHARED=SHARED_BYTES,
        REGISTERS_PRODUCER=tiles.registers[0], REGISTERS_CONSUMER=tiles.registers[1],
    )  # fmt: skip
    return source_text("hopper.cuh", "weight_gradients.cuh", file, defined=defined, **lines)


def launch(
    *operands, source: str, name: str, config: Config, widths: tuple[int, int], out_dtype,
    crosswise: bool = False,
):  # fmt: skip
    """[G, *widths] by a kernel of weight gradients, whose result has them the other way round if it works `crosswise`.

    The last of its `operands` are the groups' sizes.
    """
    *others, group_sizes = operands
    G, out_dtype = group_sizes.shape[0], jnp.dtype(out_dtype)
    made = widths[::-1] if crosswise else widths
    return cuda_call(
        *others, group_sizes.astype(jnp.int32),
        source=source, name=name, scalars=(*widths, G),
        out_type=jax.ShapeDtypeStruct((G, *made), out_dtype),
        out_block=(1, config.tiles.box, 128 // out_dtype.itemsize),
        programs=config.programs, warps=12, shared=SHARED_BYTES, queue=bool(config.tiles.waves),
    )  # fmt: skip
