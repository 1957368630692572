"""What the launches of kernels that are limited by memory share."""

import jax

__all__ = ["divisor", "target"]


def target() -> dict:
    """Options of a launch: an H100's where there is no GPU, as when compiling ahead of time."""
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        return {"compute_capability": 90}
    return {}


def divisor(size: int, most: int, least: int = 128) -> int:
    """The columns of a tile: the largest power of two that divides `size`, between `least` and `most`."""
    return max(least, min(most, size & -size))
