"""What the kernels with `quantize.cuh` share: their text and their launch."""

import dataclasses

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.cuda.cuda_call import cuda_call, literal, source_text
from expertmesh.core.kernels.formats import scaling

COLUMNS = 128  # of a tile


@dataclasses.dataclass(frozen=True)
class Source:
    """The text of a kernel, and its bytes of shared memory."""

    text: str
    shared: int


def source(
    *files: str, dtype, config: Config, format, halves: int, row_bytes: int, **defined
) -> Source:
    """The kernel of `files`; `halves`, `row_bytes` and `defined` are macros of it and of `quantize.cuh`."""
    block, tiles = format.block[1], config.tiles
    known = scaling(jnp.dtype(dtype), format)
    # Of what is read, of multipliers, and where a tile is transposed.
    read = block // (2 * tiles.warps) * tiles.warps * 32 * row_bytes
    rest = 4 * halves + (block if config.transposed else tiles.warps * halves * 2)
    shared = read + rest * COLUMNS
    defined |= dict(
        BLOCK=block, WARPS=tiles.warps, PER_SM=tiles.programs, HALVES=halves, ROW_BYTES=row_bytes, SHARED=shared,
        HALF=int(jnp.dtype(dtype) == jnp.float16), SCALE=f"scale_{format.scale}", LARGEST=known["LARGEST"],
        FLOOR=known["FLOOR"], LIMIT=literal(known["LIMIT"]),
        FORMAT='"e5m2"' if "e5m2" in format.dtype else '"e4m3"', TRANSPOSED=int(config.transposed),
    )  # fmt: skip
    return Source(source_text("quantize.cuh", *files, defined=defined), shared)


def launch(*operands, source: Source, name: str, config: Config, rows: int, columns: int, out_type):
    """The results of a kernel of such a source; the last operand is int32[G], the sizes of groups."""
    return cuda_call(
        *operands, source=source.text, name=name, scalars=(rows, columns, operands[-1].shape[0]),
        out_type=out_type, programs=config.programs, warps=config.tiles.warps, shared=source.shared,
    )  # fmt: skip
