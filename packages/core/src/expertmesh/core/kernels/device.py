"""The GPU that kernels are chosen for, as a value."""

import dataclasses
import functools

import jax

from expertmesh.core import _jax
from expertmesh.core.kernels.cuda.cuda_call import nvrtc
from expertmesh.core.support import KernelError, warn_once

# NVIDIA H200, 2026-11-22: docs/dev/kernels.md says what was measured.
MAX_TURNS = 4  # programs of a multiprocessor
MIN_STEPS = 120  # of each, of 128 x 256 x 64, where there are several


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of a kernel reads of a GPU and its surroundings.

    Attributes:
      capability: compute capability, times ten.
      multiprocessors: of the GPU.
      nvrtc: kernels in CUDA C++ can be compiled and launched.
      alone: no other devices run the same program.
    """

    capability: int = 90
    multiprocessors: int = 132
    nvrtc: bool = True
    alone: bool = True

    @property
    def runs_cuda(self) -> bool:
        """Whether kernels in CUDA C++ can run: their instructions are Hopper's alone."""
        return self.capability == 90 and self.nvrtc

    @property
    def reads_shared(self) -> bool:
        """Whether tensor cores read shared memory, 227 KB that TMA fills: of H100, H200, B200 and their kin.

        Those of other GPUs read registers.
        """
        return 90 <= self.capability < 120

    def programs(self, num_steps: int = 0) -> int:
        """One program per multiprocessor; among other devices up to four, one after the other, if each has work enough.

        Each has its share of the tiles from the start. If a collective holds its multiprocessor it begins late, and
        everything waits for it: the smaller the shares, the shorter.

        Args:
          num_steps: of all tiles together, at most; see `num_steps`.
        """
        turns = 1 if self.alone else num_steps // (self.multiprocessors * MIN_STEPS)
        return self.multiprocessors * max(1, min(turns, MAX_TURNS))


def num_steps(
    tiles: tuple[int, int, int], num_rows: int, num_columns: int, contraction: int
) -> int:
    """Of tiles of so many rows and columns in all."""
    m, n, k = tiles
    return -(-num_rows // m) * -(-num_columns // n) * -(-contraction // k)


def current_device() -> Device:
    """This process' GPU and the mesh of the context; an H100 where there is no GPU, as when compiling ahead of time."""
    gpu = _jax.local_gpu()
    return Device(
        capability=round(_jax.target_capability() * 10),
        multiprocessors=gpu.core_count if gpu else 132,
        nvrtc=nvrtc() is not None,
        alone=jax.sharding.get_abstract_mesh().size <= 1,
    )


def for_device(function):
    """A function with a keyword `device`, made one without: it is given this process' GPU.

    Where a kernel in CUDA C++ cannot be compiled or loaded, it is given a GPU without these, and a warning says so.
    """

    @functools.wraps(function)
    def run(*operands, **options):
        device = current_device()
        try:
            return function(*operands, device=device, **options)
        except KernelError as error:
            if not device.runs_cuda:
                raise
            found = function(*operands, device=dataclasses.replace(device, nvrtc=False), **options)
            warn_once(f"{error}; a kernel in Triton takes its place")
            return found

    return run
