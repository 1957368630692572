"""The order-1 byte model, the yardstick of the main job: each byte predicted from the one before.

p(b | a) = (n(a, b) + SMOOTHING) / (n(a) + 256 * SMOOTHING),   n counted over the training bytes
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertmesh.train.data import Bytes

SMOOTHING = 0.1


def fit(train: Bytes) -> npt.NDArray[np.float64]:
    """log p(b | a), float64[256, 256] indexed [a, b], in nats."""
    pairs = train[:-1].astype(np.int32) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + SMOOTHING
    return np.log(counts / counts.sum(axis=1, keepdims=True))


def loss(log_p: npt.NDArray[np.float64], windows: npt.NDArray[np.int32]) -> float:
    """Mean of -log p over every byte of the windows but their first, in nats per byte."""
    return float(-log_p[windows[:, :-1], windows[:, 1:]].mean())
