"""What the kernels with `quantize.cuh` share: their text and their launch."""

import dataclasses

import jax.numpy as jnp

from expertmesh.core.kernels.choice.quantize import Config, choose_panel
from expertmesh.core.kernels.cuda.cuda_call import cuda_call, literal, source_text
from expertmesh.core.kernels.formats import scaling

COLUMNS = 128  # of a tile


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a tile's numbers lie: macros of `quantize.cuh`, which says what they are."""

    row_bytes: int
    halves: int = 1
    eights: int = 1
    apart: int = 8
    defers: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """The text of a kernel, its bytes of shared memory, and whether its programs have a queue."""

    text: str
    shared: int
    queued: bool


def source(*files: str, dtype, config: Config, format, layout: Layout, **defined) -> Source:
    """The kernel of `files`; `layout` and `defined` are macros of it and of `quantize.cuh`."""
    block, tiles = format.block[1] if format.block else COLUMNS, config.tiles
    # Of what is read, of multipliers, of where a tile is transposed, and of largest numbers by warp.
    read = block * COLUMNS // (8 * layout.eights) * layout.row_bytes
    multipliers = layout.halves * COLUMNS // 32 * (128 + 16 * (layout.eights > 1))
    room, largest = block * COLUMNS * config.transposed, tiles.warps * layout.halves * COLUMNS * 2
    shared = read + multipliers + (room + largest if layout.defers else room or largest)
    shared += 16 * config.queued
    defined |= {name.upper(): int(value) for name, value in dataclasses.asdict(layout).items()}
    defined |= scale_macros(dtype, format) | dict(
        BLOCK=block, WARPS=tiles.warps, PER_SM=tiles.programs, SHARED=shared,
        HALF=int(jnp.dtype(dtype) == jnp.float16), TRANSPOSED=int(config.transposed),
        QUEUED=int(config.queued),
    )  # fmt: skip
    text = source_text("scales.cuh", "quantize.cuh", *files, defined=defined)
    return Source(text, shared, config.queued)


def scale_macros(dtype, format) -> dict[str, object]:
    """What `scales.cuh` asks for, of numbers of `dtype`."""
    known = scaling(jnp.dtype(dtype), format)
    return dict(
        SCALE=f"scale_{format.scale}", LARGEST=known["LARGEST"], FLOOR=known["FLOOR"], LIMIT=literal(known["LIMIT"]),
        FORMAT=of_ptx(format),
    )  # fmt: skip


def of_ptx(format) -> str:
    """A format's name in PTX, as text."""
    return '"e5m2"' if "e5m2" in format.dtype else '"e4m3"'


def panel_of(x, index, columns: int) -> int:
    """PANEL of rows of `x` [1, tokens, ...] at an index, which have so many columns; 0 without an index."""
    if index is None:
        return 0
    return choose_panel(x.shape[1], COLUMNS * x.dtype.itemsize, -(-columns // COLUMNS))


def launch(*operands, source: Source, name: str, config: Config, rows: int, columns: int, out_type):
    """The results of a kernel of such a source; the last operand is int32[G], the sizes of groups."""
    return cuda_call(
        *operands, source=source.text, name=name, scalars=(rows, columns, operands[-1].shape[0]),
        out_type=out_type, programs=config.programs, warps=config.tiles.warps, shared=source.shared,
        queue=source.queued,
    )  # fmt: skip
