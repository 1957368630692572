"""Which kernel multiplies rows of 8 or 4 bits in groups, or contracts them. Dimension key as in
`linear/grouped_gemm.py`.

Hopper's kernels in CUDA C++ are "split", whose products of 128 of the contraction are added in float32, and
"tensor_scaled", of rows with one scale per group, whose products the tensor cores add. "bfloat16" widens blocks of 32,
exactly, for what `choice/grouped_gemm.py` chooses; "triton" is the kernel for all other GPUs, which takes the others'
place where these cannot run; "packed" is Triton's for blocks of 16, of 4 bits.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from expertmesh.core.kernels.choice import grouped_gemm as plain
from expertmesh.core.kernels.choice.grouped_gemm import SHARED_BYTES, Config, Tiles, WeightTiles
from expertmesh.core.kernels.device import Device

BLOCK = 128  # elements of the contraction, and columns of a weight, that share a scale
MX_BLOCK = 32
NV_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Rows(plain.Rows):
    """As of `choice/grouped_gemm.py`.

    Attributes:
      along: the length of blocks along the contraction, 0 without blocks.
      splits: products of 128 of the contraction are added in float32; those of blocks always are.
    """

    along: int
    splits: bool = True


@dataclasses.dataclass(frozen=True)
class Weights(plain.Weights):
    """As of `choice/grouped_gemm.py`.

    Attributes:
      along: the length of blocks along the rows, 0 without blocks.
      splits: as of `Rows`.
    """

    along: int
    splits: ClassVar[bool] = True


def adds_products(gemm: Rows | Weights) -> bool:
    """Whether a kernel in Triton adds a step's products to its sums itself, without scales of blocks.

    Tensor cores that read operands in shared memory and leave sums there, as of B200, add in float32.
    """
    return gemm.splits and not gemm.along and not 100 <= gemm.device.capability < 120


def _along_of_tiles(gemm: Rows | Weights) -> int:
    """Products that a kernel in Triton adds take the registers of those that it scales."""
    return BLOCK if adds_products(gemm) else gemm.along


@dataclasses.dataclass(frozen=True)
class BlockTiles:
    """How the kernel in CUDA C++ for rows of blocks runs.

    Attributes:
      stages: steps of 128 of the contraction under way at most.
      band: tiles of 128 rows that run together.
      registers: of the producer, which stores too, and of consumers.
      rooms: parts of 64 x 128 of a result of 16 bits that a consumer has staged at most; of 32 bits, one.
      scratch: bytes of shared memory for what comes behind the sums.
    """

    stages: int
    band: int
    registers: tuple[int, int]
    rooms: int
    scratch: int = 0

    def rooms_of(self, out_dtype) -> int:
        """The parts of a result of this type that a consumer has staged at most."""
        return self.rooms if jnp.dtype(out_dtype).itemsize == 2 else 1

    def fit(self, G: int, out_dtype) -> "BlockTiles":
        """What results, barriers and the table of groups take of shared memory is not there for steps."""
        staged = 128 * 128 * jnp.dtype(out_dtype).itemsize * self.rooms_of(out_dtype)
        # A step has 512 bytes more where its rows are found by an index.
        stages = (SHARED_BYTES - staged - 320 - self.scratch - 8 * (G + 1)) // (48 * 1024 + 512)
        return dataclasses.replace(self, stages=min(self.stages, stages))


# NVIDIA H200, 2026-11-24: docs/dev/kernels.md says what was measured.
ROWS_BLOCKS = BlockTiles(stages=3, band=16, registers=(40, 232), rooms=2)
# NVIDIA H200, 2026-11-23: likewise.
WEIGHTS_BLOCKS = WeightTiles(
    stages=3, min_stages=2, stage_bytes=50 * 1024, staged=1024, handed=2, band=4, registers=(24, 240),
)  # fmt: skip
# NVIDIA H100, 2026-11-28: likewise.
WEIGHTS_TENSORS = WeightTiles(
    stages=4, min_stages=3, stage_bytes=48 * 1024, staged=1024, handed=1, band=4, registers=(40, 232),
)  # fmt: skip
# Not measured: no such GPU was at hand. Products of 128 are scaled, or added, in registers, which hold less than a tile
# of TILES; of rows, whose scales change along the contraction, half as much again.
TILES = Tiles(m=128, n=256, k=128, warps=8, stages=4)
TILES_OF_128 = dataclasses.replace(TILES, n=128)
ROWS_OF_128 = dataclasses.replace(TILES_OF_128, m=64)
# As `choice/grouped_gemm.py`'s. Rows that are contracted pass through registers, which leave less room for steps.
NARROW = Tiles(m=128, n=128, k=64, warps=8, stages=4, descriptors=False, flat=False)
NARROW_ROWS = dataclasses.replace(NARROW, m=64, k=128, stages=3)
# Tiles twice as wide spill, of rows in few blocks of 128 (Triton 3.8), and of weight gradients (3.9).
NARROW_ROWS_OF_128 = dataclasses.replace(NARROW_ROWS, n=64)
NARROW_WEIGHTS = dataclasses.replace(NARROW_ROWS, n=64, stages=2)
# Of 4 bits, by shared memory and registers; likewise.
PACKED = dataclasses.replace(TILES, k=256, stages=3)
NARROW_PACKED = dataclasses.replace(NARROW, k=128, stages=3)
# Rows that are contracted pass through registers, of which a thread of four warps has enough.
PACKED_WEIGHTS = dataclasses.replace(PACKED, k=128, warps=4)


def choose_rows(gemm: Rows) -> Config:
    """The forward and the input gradient."""
    if gemm.along == NV_BLOCK:
        tiles = PACKED if gemm.device.reads_shared else NARROW_PACKED
        # Float32 results leave no registers for loads of the next tile.
        flat = tiles.flat and jnp.dtype(gemm.out_dtype).itemsize == 2
        tiles = dataclasses.replace(tiles, flat=flat).fit(gemm.width, gemm.out_dtype)
        return _packed(gemm, tiles)
    if gemm.along == MX_BLOCK and gemm.device.capability < 100:
        return Config("bfloat16")
    if not plain.fits_cuda(gemm):
        tiles = rows_tiles(_along_of_tiles(gemm), gemm.width, gemm.out_dtype, gemm.device)
        return Config("triton", tiles, gemm.programs(tiles.mnk))
    if not gemm.along and not gemm.splits:
        return dataclasses.replace(plain.cuda_rows(gemm), kernel="tensor_scaled")
    cuda = ROWS_BLOCKS.fit(gemm.groups, gemm.out_dtype)
    return Config("split", cuda, gemm.programs((128, 256, BLOCK)))


def gathers(gemm: Rows, config: Config) -> bool:
    """Whether the kernel chosen finds rows by an index; results of float32 leave it no registers for that."""
    return config.kernel == "split" and jnp.dtype(gemm.out_dtype).itemsize == 2


# Columns of the other operand up to which a weight gradient loses less, finding its rows, than their copy takes: its
# shared memory has 1.25 times the work. NVIDIA H100, 2026-11-28: both passes of 15 blocks take 0.83 to 0.98 of the time
# with F up to 768, 0.99 to 1.04 with 1024, 1.06 to 1.10 with 2048 and more; the wider gradient has 2 F columns.
WIDTH_OF_OTHER = 1536


def gathers_weights(gemm: Weights, config: Config, *, crosswise: bool) -> bool:
    """Whether the kernel chosen finds rows of lhs, or `crosswise` of dy, by an index, and gains by it."""
    fits = jnp.dtype(gemm.out_dtype).itemsize == 2 or not crosswise
    other = gemm.widths[0 if crosswise else 1]
    return config.kernel == "split" and not gemm.along and fits and other <= WIDTH_OF_OTHER


def choose_weights(gemm: Weights) -> Config:
    """The weight gradient."""
    if gemm.along == NV_BLOCK:
        tiles = PACKED_WEIGHTS if gemm.device.reads_shared else NARROW_PACKED
        return _packed(gemm, tiles.fit(gemm.widths[1], gemm.out_dtype))
    if gemm.along == MX_BLOCK and gemm.device.capability < 100:
        return Config("bfloat16")
    cuda = (WEIGHTS_BLOCKS if gemm.along else WEIGHTS_TENSORS).fit(gemm.groups, gemm.out_dtype)
    if gemm.device.runs_cuda and cuda.stages >= cuda.min_stages:
        return cuda.config(gemm, BLOCK, "split")
    tiles = weight_tiles(_along_of_tiles(gemm), gemm.widths[1], gemm.out_dtype, gemm.device)
    return Config("triton", tiles, gemm.programs(tiles.mnk))


def _packed(gemm: Rows | Weights, tiles: Tiles) -> Config:
    return Config("packed", tiles, gemm.programs(tiles.mnk))


def rows_tiles(along: int, width: int, out_dtype, device: Device) -> Tiles:
    """Those of the kernel in Triton."""
    if not device.reads_shared:
        return (NARROW_ROWS_OF_128 if along == BLOCK else NARROW_ROWS).fit(width, out_dtype)
    tiles = (ROWS_OF_128 if along == BLOCK else TILES).fit(width, out_dtype)
    # Without blocks a warp has registers for twice as many float32 results.
    wide = along == 0 and jnp.dtype(out_dtype).itemsize == 4
    return dataclasses.replace(tiles, warps=4) if wide else tiles


def weight_tiles(along: int, width: int, out_dtype, device: Device) -> Tiles:
    """Those of the kernel in Triton."""
    if not device.reads_shared:
        return (NARROW_WEIGHTS if along else NARROW).fit(width, out_dtype)
    return (TILES_OF_128 if along == BLOCK else TILES).fit(width, out_dtype)
