"""Which kernel multiplies rows in groups, or contracts them. Dimension key as in `linear/grouped_gemm.py`.

Triton's kernels run on all GPUs from compute capability 8.0; those in CUDA C++, of which Hopper has its own, are the
faster ones but for long contractions.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from expertmesh.core.kernels.device import Device, num_steps

SHARED_BYTES = 227 * 1024  # of one program
STEP = 64  # rows of a weight gradient's step


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows in groups times each group's weight: [rows, contraction] x [groups, contraction, width].

    `dtype` is that of the rows.
    """

    rows: int
    contraction: int
    width: int
    groups: int
    dtype: Any
    out_dtype: Any
    device: Device

    def programs(self, tiles: tuple[int, int, int]) -> int:
        """Of a kernel with these tiles."""
        return self.device.programs(num_steps(tiles, self.rows, self.width, self.contraction))


@dataclasses.dataclass(frozen=True)
class Weights:
    """A weight gradient: [rows, K] x [rows, N] -> [groups, K, N] with `widths` (K, N)."""

    rows: int
    widths: tuple[int, int]
    groups: int
    out_dtype: Any
    device: Device

    def programs(self, tiles: tuple[int, int, int]) -> int:
        """Of a kernel with these tiles."""
        return self.device.programs(num_steps(tiles, *self.widths, self.rows))


@dataclasses.dataclass(frozen=True)
class Config:
    """A launch.

    Attributes:
      kernel: "triton", "cuda", or what a function that chooses says beside.
      tiles: the kernel's.
      programs: of the launch.
    """

    kernel: str
    tiles: Any = None
    programs: int = 0


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile, and how it is run.

    Attributes:
      descriptors: TMA loads it.
      flat: the next tile's loads run while it is stored; not those of weight gradients that TMA loads.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    descriptors: bool = True
    flat: bool = True

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def fit(self, width: int, out_dtype) -> "Tiles":
        """Narrow outputs take narrow tiles; float32 outputs leave less shared memory for stages."""
        tiles = dataclasses.replace(self, n=min(self.n, 128)) if width <= 128 else self
        if jnp.dtype(out_dtype).itemsize == 4 and tiles.n == 256:
            tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3), n=128)
        return tiles


@dataclasses.dataclass(frozen=True)
class ClusterTiles:
    """What kernels in CUDA C++ have in common that run in clusters of two.

    Attributes:
      waves: of clusters that take their tiles from one queue, so that what they share is in L2 when all read it, and
        one that begins late, as a collective holds its multiprocessors, leaves the others more. 0: each cluster has
        tiles of its own.
    """

    waves: int = dataclasses.field(default=0, kw_only=True)


@dataclasses.dataclass(frozen=True)
class RowTiles(ClusterTiles):
    """How the kernel of rows in CUDA C++ runs.

    Attributes:
      boxes: of 64 columns, that a consumer multiplies by at most 256 / boxes rows.
      rows: at least and at most so many in a tile of a large group, in steps of `grain`.
      cost: of a tile's step, beside that of its rows, in rows.
      band: tiles of rows that run together.
      box: rows of one TMA load.
      registers: of the producer, and of consumers.
      parts: of a tile of the last round. Two at most where there are two boxes: each part has one.
    """

    boxes: int
    rows: tuple[int, int]
    grain: int
    cost: int
    band: int
    box: int
    registers: tuple[int, int]
    parts: int = 2

    @property
    def columns(self) -> int:
        """Of a cluster's tile: each of two blocks has two consumers."""
        return 4 * 64 * self.boxes


@dataclasses.dataclass(frozen=True)
class WeightTiles(ClusterTiles):
    """How a kernel of weight gradients in CUDA C++ runs.

    Attributes:
      stages: steps of the contraction under way at most.
      min_stages: and at least.
      stage_bytes: of shared memory, of each.
      staged: where results begin in shared memory.
      handed: parts of 64 x 128 of a result of 16 bits that a consumer stages at once; of 32 bits, one.
      band: tiles, of 256 columns of lhs, that run together.
      registers: of the producer, and of consumers.
      passing: results leave L2 first, which operands then keep.
      strips: of 64 lines of 128 bytes of a result that a consumer has under way, if each of its warps sends its own
        lines (of 16 bits alone), in place of parts.
      keeping: operands that two blocks share leave L2 last.
    """

    stages: int
    min_stages: int
    stage_bytes: int
    staged: int
    handed: int
    band: int
    registers: tuple[int, int]
    passing: bool = False
    strips: int = 0
    keeping: bool = True

    def handed_of(self, out_dtype) -> int:
        """The parts of a result of this type that a consumer stages at once."""
        return self.handed if jnp.dtype(out_dtype).itemsize == 2 else 1

    def stages_at(self, out_dtype) -> int:
        """Where the first step is in shared memory."""
        part = 64 * 128 * jnp.dtype(out_dtype).itemsize
        return self.staged + 2 * (self.strips * STRIP or self.handed_of(out_dtype) * part)

    @property
    def box(self) -> int:
        """The lines of a result that leave at once."""
        return 16 if self.strips else 32

    def fit(self, G: int, out_dtype) -> "WeightTiles":
        """What results and the table of groups take of shared memory is not there for steps."""
        stages = (SHARED_BYTES - 1024 - self.stages_at(out_dtype) - 16 * G) // self.stage_bytes
        return dataclasses.replace(self, stages=min(self.stages, stages))

    def config(self, gemm: Weights, step: int, kernel: str = "cuda") -> Config:
        """The launch of a kernel of `step` rows a step, in clusters of two."""
        at_once = gemm.device.multiprocessors // 2 * 2
        programs = self.waves * at_once or gemm.programs((128, 256, step)) // 2 * 2
        return Config(kernel, self, programs)


STRIP = 64 * 128  # bytes that a consumer stages, of a result
# NVIDIA H200, 2026-11-22: docs/dev/kernels.md says what was measured.
ROWS_HOPPER = RowTiles(
    boxes=1, rows=(128, 256), grain=8, cost=120, band=8, box=32, registers=(40, 232)
)
SMALL_GROUPS_HOPPER = dataclasses.replace(ROWS_HOPPER, boxes=2, rows=(128, 128), grain=32, waves=1)
# NVIDIA H200, 2026-11-21 and 22: docs/dev/kernels.md says what was measured.
ROWS = Tiles(m=128, n=256, k=64, warps=8, stages=3, group_m=8)
GATHERED = ROWS
WEIGHTS = Tiles(m=128, n=256, k=64, warps=8, stages=3)
# Of GPUs whose tensor cores read registers, and of 99 KB of shared memory: a warp multiplies 64 x 64, whose sums take
# half of its registers. Chosen among those without spills, as PTX of compute capability 8.0 on an H100, 2026-11-25:
# docs/dev/kernels.md. No such GPU was at hand.
NARROW = Tiles(m=128, n=256, k=32, warps=8, stages=4, descriptors=False, flat=False)
# Where kernels in CUDA C++ cannot run on Hopper. NVIDIA H100, 2026-11-26: likewise; not by turns with TMA's.
WEIGHTS_BY_POINTERS = dataclasses.replace(NARROW, k=64, stages=3, flat=True)
WEIGHTS_HOPPER = WeightTiles(
    stages=4, min_stages=3, stage_bytes=48 * 1024, staged=1024, handed=1, band=4, registers=(40, 232),
    passing=True,
)  # fmt: skip
# Float32 results wait in no registers: each warp sends its own.
WEIGHTS_HOPPER_WIDE = dataclasses.replace(WEIGHTS_HOPPER, strips=4)
# Where groups are small, memory is what takes time. NVIDIA H200, 2026-11-29: likewise.
WEIGHTS_HOPPER_SMALL = dataclasses.replace(
    WEIGHTS_HOPPER, strips=1, passing=False, keeping=False, waves=1
)
# The table of many groups leaves a strip, or three stages: gathered rows then take 1.04 to 1.09 of the time. NVIDIA
# H100, 2026-11-27. With a queue its products would wait for each other, for want of registers.
WEIGHTS_HOPPER_MANY = dataclasses.replace(WEIGHTS_HOPPER, strips=1)
SMALL_GROUP = 192  # rows in the mean, at most
MAX_GROUPS = 1024  # whose places fit into shared memory
MAX_RESULT = 2**35  # elements of rows: the kernel finds them by 32 bits of 8 elements
MAX_GROUP = 2**29  # rows that a weight gradient's kernel counts
# From these contractions on the end of a tile costs little, and Triton's tiles, which are all alike, keep step and
# share more in L2: from the first if there are less than so many tiles for each cluster, from the second anyway.
LONG_CONTRACTION, LONGEST_CONTRACTION, FEW_TILES = 8192, 20480, 4


def choose_rows(gemm: Rows) -> Config:
    """The forward and the input gradient."""
    clusters = gemm.device.multiprocessors // 2
    tiles = gemm.rows * gemm.width / ROWS_HOPPER.rows[1] ** 2 / clusters
    longest = LONG_CONTRACTION if tiles < FEW_TILES else LONGEST_CONTRACTION
    return cuda_rows(gemm) if gemm.contraction < longest and fits_cuda(gemm) else triton_rows(gemm)


def choose_gathered(gemm: Rows) -> Config:
    """The forward of rows that are read where they are."""
    return triton_rows(gemm, GATHERED)


def choose_weights(gemm: Weights, *, gathers: bool = False) -> Config:
    """The weight gradient. `gathers`: rows are found by an index, which takes the warp that would fill a queue."""
    cuda = _hopper_weights(gemm, gathers)
    # The windows of rows that are loaded need as many rows as a step.
    counts = STEP <= gemm.rows < MAX_GROUP
    if gemm.device.runs_cuda and counts and cuda.stages >= cuda.min_stages:
        return cuda.config(gemm, STEP)
    tiles = WEIGHTS if gemm.device.reads_shared else NARROW
    if gemm.device.capability == 90:
        tiles = WEIGHTS_BY_POINTERS
    return Config("triton", tiles.fit(gemm.widths[1], gemm.out_dtype), gemm.device.programs())


def _hopper_weights(gemm: Weights, gathers: bool) -> WeightTiles:
    tiles, beside = WEIGHTS_HOPPER, _waves_beside(gemm)
    if jnp.dtype(gemm.out_dtype).itemsize == 4:
        tiles = WEIGHTS_HOPPER_WIDE
    elif gemm.rows <= SMALL_GROUP * gemm.groups:
        tiles = WEIGHTS_HOPPER_SMALL
    elif tiles.fit(gemm.groups, gemm.out_dtype) != tiles:
        tiles, beside = WEIGHTS_HOPPER_MANY, 0
    waves = 0 if gathers else beside or tiles.waves
    return dataclasses.replace(tiles.fit(gemm.groups, gemm.out_dtype), waves=waves)


def _waves_beside(gemm: Weights) -> int:
    """One more than a cluster has shares: a collective, such as of the gradient before, may begin where one ends."""
    if gemm.device.alone:
        return 0
    shares = gemm.programs((128, 256, STEP)) // gemm.device.multiprocessors
    return shares + (shares > 1)


def fits_cuda(gemm: Rows) -> bool:
    """Whether so many groups and results can take the kernels of rows in CUDA C++."""
    return (
        gemm.groups <= MAX_GROUPS and gemm.rows * gemm.width < MAX_RESULT and gemm.device.runs_cuda
    )


def cuda_rows(gemm: Rows) -> Config:
    """The kernel of rows in CUDA C++, in clusters of two."""
    tiles = dataclasses.replace(ROWS_HOPPER, waves=int(not gemm.device.alone))
    if gemm.rows <= gemm.groups * SMALL_GROUPS_HOPPER.rows[1]:
        tiles = dataclasses.replace(SMALL_GROUPS_HOPPER, waves=int(_outnumbers_clusters(gemm)))
    return Config("cuda", tiles, gemm.device.multiprocessors // 2 * 2)


def _outnumbers_clusters(gemm: Rows) -> bool:
    """Whether some sizes of groups have more tiles of small groups than clusters run at once."""
    height, width = SMALL_GROUPS_HOPPER.rows[1], SMALL_GROUPS_HOPPER.columns
    tiles = min(gemm.groups, gemm.rows) + gemm.rows // height
    return tiles * -(-gemm.width // width) > gemm.device.multiprocessors // 2


def triton_rows(gemm: Rows, tiles: Tiles = ROWS) -> Config:
    """The kernel of rows in Triton."""
    tiles = (tiles if gemm.device.reads_shared else NARROW).fit(gemm.width, gemm.out_dtype)
    return Config("triton", tiles, gemm.programs(tiles.mnk))
