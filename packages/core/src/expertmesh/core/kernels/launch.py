"""What the launches of kernels that are limited by memory share."""

from expertmesh.core import _jax

__all__ = ["divisor", "target"]


def target() -> dict:
    """Options of a launch: an H100's where there is no GPU, as when compiling ahead of time."""
    return {} if _jax.local_gpu() else {"compute_capability": 90}


def divisor(size: int, most: int, least: int = 128) -> int:
    """The columns of a tile: the largest power of two that divides `size`, between `least` and `most`."""
    return max(least, min(most, size & -size))
