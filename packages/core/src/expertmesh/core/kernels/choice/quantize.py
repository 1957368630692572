"""Which kernel quantizes rows along their columns and along the rows, with something before it or nothing.

Triton's kernels run on all GPUs. Those in CUDA C++ are Hopper's, of numbers of 16 bits, eight at a time.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from expertmesh.core.kernels.choice import quantized_grouped_gemm as gemm
from expertmesh.core.kernels.device import Device, num_steps
from expertmesh.core.quantization.quantized import blocked_weight_unsupported, widths_unsupported


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is quantized: [rows, columns] of `dtype`, in blocks of `block` numbers, 0 for a scale per group."""

    rows: int
    columns: int
    dtype: Any
    block: int
    device: Device

    @property
    def transposed(self) -> bool:
        """Whether the copy in blocks along the rows is [columns, rows], as Hopper's tensor cores read 8 bits.

        The transpose after the kernel and the one before the weight gradient's are then none.
        """
        return self.block in (0, 128) and self.device.capability == 90

    @property
    def fits_cuda(self) -> bool:
        """Whether kernels in CUDA C++ take such numbers."""
        return (
            self.device.runs_cuda
            and jnp.dtype(self.dtype).itemsize == 2
            and self.block in (32, 128)
            and self.columns % 8 == 0
            and (self.rows % 16 == 0 or not self.transposed)
        )


@dataclasses.dataclass(frozen=True)
class Activated(Rows):
    """The activation of [rows, 2, columns], or its gradient if the activation's is of `grad_dtype`, not None."""

    grad_dtype: Any = None


@dataclasses.dataclass(frozen=True)
class Square:
    """Weights [experts, contraction, parts, width] in blocks of `block` x `block` along contraction and width.

    Where `block` is 0, each expert's matrix is one.
    """

    experts: int
    contraction: int
    parts: int
    width: int
    block: int
    device: Device

    @property
    def transposed(self) -> bool:
        """Whether the forward's copy is [experts, parts, width, contraction]: its GEMM is a kernel of Hopper's."""
        K, N = self.contraction, self.parts * self.width
        if self.block not in (0, gemm.BLOCK) or widths_unsupported(K, N):
            return False
        if self.block and blocked_weight_unsupported(self.parts, self.width):
            return False
        forward = gemm.Rows(
            1, K, N, self.experts, jnp.float8_e4m3fn, jnp.bfloat16, self.device, self.block
        )
        return gemm.choose_rows(forward).kernel in ("split", "tensor_scaled")


@dataclasses.dataclass(frozen=True)
class Config:
    """A launch.

    Attributes:
      kernel: "triton" or "cuda".
      tiles: the kernel's.
      transposed: the copy along the rows is [columns, rows]; of weights, see `Square`.
      programs: of a kernel in CUDA C++; 0: one for each tile.
      queued: programs take their tiles from one queue.
      registers: of a thread of a kernel in Triton, at most; None: as the compiler decides.
    """

    kernel: str
    tiles: Any
    transposed: bool
    programs: int = 0
    registers: int | None = None
    queued: bool = False


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Elements and, at most, columns of a tile, and its warps; whether rows at an index may be read panel by panel."""

    elements: int
    columns: int
    warps: int
    panels: bool = True


@dataclasses.dataclass(frozen=True)
class ActivationTiles:
    """Columns of a tile, in how many parts its rows are read, its warps, and at most how many registers of a thread.

    None: as the compiler decides.
    """

    columns: int
    parts: int
    warps: int
    registers: int | None


@dataclasses.dataclass(frozen=True)
class RequantizeTiles:
    """Columns of a tile, whose rows are a block's, and its warps."""

    columns: int
    warps: int


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """Of kernels with `quantize.cuh`: the warps that share a block's rows, and programs of a multiprocessor."""

    warps: int
    programs: int


# NVIDIA H200, 2026-11-21 and 22: docs/dev/kernels.md says what was measured.
BOTH = Tiles(elements=16384, columns=128, warps=8)
# In panels of two tiles an H100 gave wrong bits, 2026-11-25; why is not known.
BOTH_SMALL = Tiles(elements=16384, columns=512, warps=8, panels=False)
SCALED = Tiles(elements=8192, columns=1024, warps=8)
# As many programs as possible share a multiprocessor: two and three. GRADIENT with weights spills 64 bytes then.
ACTIVATION = ActivationTiles(columns=128, parts=2, warps=8, registers=128)
ACTIVATION_SMALL = ActivationTiles(columns=256, parts=1, warps=8, registers=80)
GRADIENT = ActivationTiles(columns=128, parts=4, warps=8, registers=None)
GRADIENT_SMALL = ActivationTiles(columns=128, parts=2, warps=8, registers=80)
ACTIVATION_HOPPER = HopperTiles(warps=16, programs=1)
ACTIVATION_HOPPER_SMALL = HopperTiles(warps=4, programs=4)
REQUANTIZE = RequantizeTiles(columns=128, warps=4)
REQUANTIZE_SMALL = RequantizeTiles(columns=128, warps=2)
REQUANTIZE_HOPPER = HopperTiles(warps=8, programs=2)
BOTH_HOPPER = HopperTiles(warps=8, programs=3)
SQUARE_HOPPER = HopperTiles(warps=8, programs=2)
# Tiles of a program, from which on a queue saves more than it costs to clear its number. NVIDIA H200, 2026-11-29.
LONG_QUEUE = 16
# NVIDIA H100, 2026-11-25: of tokens that several rows are, what stays in each half of L2 beside what is written.
KEPT_BYTES = 12 * 2**20


def choose_panel(tokens: int, row_bytes: int, across: int) -> int:
    """How many of `across` tiles beside each other are quantized before all others, of rows where their tokens are.

    Then a token, of which a tile has so many bytes, comes from memory once, not for each of its rows. All panels are
    equal.
    """
    panels = (n for n in range(1, across + 1) if across % n == 0)
    return max((n for n in panels if n * tokens * row_bytes <= KEPT_BYTES), default=1)


def choose_scaled(rows: Rows, *, twice: bool) -> Config:
    """With a scale per tensor or group; the copy along the rows too if `twice`."""
    transposed = twice and rows.transposed
    return Config("triton", BOTH if transposed else SCALED, transposed)


def choose_both(rows: Rows) -> Config:
    """In blocks, in both directions."""
    if rows.fits_cuda and rows.block > 32:
        return _cuda(rows, BOTH_HOPPER, may_queue=True)
    return Config("triton", BOTH if rows.block > 32 else BOTH_SMALL, rows.transposed)


def choose_moved(rows: Rows) -> Config:
    """Rows of 8 bits at an index, as the weight gradient reads them."""
    return Config("triton", BOTH if rows.transposed else SCALED, rows.transposed)


def choose_square(weights: Square) -> Config:
    """In square blocks, or with a scale for each matrix, as the forward and the input gradient read them."""
    if weights.transposed:
        return Config("cuda", SQUARE_HOPPER, transposed=True)
    return Config("triton", None, transposed=False)


def choose_activation(rows: Activated) -> Config:
    """An activation, or its gradient, in both directions."""
    gradient, small = rows.grad_dtype is not None, rows.block <= 32
    if rows.fits_cuda and rows.grad_dtype in (None, rows.dtype):
        hopper = ACTIVATION_HOPPER_SMALL if small else ACTIVATION_HOPPER
        return _cuda(rows, hopper, may_queue=True)
    large, less = (GRADIENT, GRADIENT_SMALL) if gradient else (ACTIVATION, ACTIVATION_SMALL)
    tiles = less if small else large
    # Elsewhere, and of float32, the compiler decides.
    measured = rows.device.capability == 90 and jnp.dtype(rows.dtype).itemsize == 2
    registers = tiles.registers if measured else None
    return Config("triton", tiles, rows.transposed, registers=registers)


def choose_requantize(rows: Rows) -> Config:
    """Rows, quantized along their columns or not yet, along the rows; `dtype` is that before this quantization."""
    if reads_along_rows(rows):
        return _cuda(rows, REQUANTIZE_HOPPER)
    return Config("triton", REQUANTIZE if rows.block > 32 else REQUANTIZE_SMALL, rows.transposed)


def reads_along_rows(rows: Rows) -> bool:
    """Whether a kernel in CUDA C++ quantizes rows along the rows alone."""
    # Where nothing is transposed Triton's is as fast.
    return rows.transposed and rows.fits_cuda and rows.columns % 16 == 0


def _cuda(rows: Rows, tiles: HopperTiles, *, may_queue: bool = False) -> Config:
    num_tiles = -(-rows.rows // rows.block) * -(-rows.columns // 128)
    # With a queue a program that begins late leaves others more; else 128 x 128 take as long as four steps of a GEMM.
    queued = may_queue and num_tiles >= LONG_QUEUE * rows.device.multiprocessors * tiles.programs
    steps = 0 if queued else num_steps((128, 128, 1), rows.rows, rows.columns, 4)
    programs = rows.device.programs(steps) * tiles.programs
    return Config("cuda", tiles, rows.transposed, programs, queued=queued)
