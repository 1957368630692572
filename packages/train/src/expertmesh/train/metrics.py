"""The metrics of a run: one CSV row per step, read back as columns.

Columns: step, loss (cross entropy, nats per byte), aux_loss, z_loss, grad_norm, dropped (rows),
imbalance (largest over mean rows per expert, of the worst layer), tokens_per_second (of the steps
before it, without validation and checkpoints; none before the second), valid_loss (nats per byte, where
there was a validation after the step), entropy_l<layer> (of the router, in nats) and rows_l<layer>_e<expert>.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.train.checkpoint import write_whole
from expertmesh.train.step import StepMetrics

Row = dict[str, Any]


def header(layers: int, experts: int) -> list[str]:
    """The column names."""
    names = ["step", "loss", "aux_loss", "z_loss", "grad_norm", "dropped", "imbalance"]
    names += ["tokens_per_second", "valid_loss", *(f"entropy_l{i}" for i in range(layers))]
    return names + [f"rows_l{i}_e{j}" for i in range(layers) for j in range(experts)]


def row(
    step: int, metrics: StepMetrics, tokens_per_second: float | None, valid_loss: float | None
) -> Row:
    """A step's row from metrics that are on the host. Floats are written with all their digits."""
    rows_LE = np.asarray(metrics.tokens_per_expert)
    entropies = {f"entropy_l{i}": float(x) for i, x in enumerate(metrics.entropy)}
    counts = {f"rows_l{i}_e{j}": int(n) for (i, j), n in np.ndenumerate(rows_LE)}
    return {
        "step": step,
        "loss": float(metrics.loss),
        "aux_loss": float(metrics.aux_loss),
        "z_loss": float(metrics.z_loss),
        "grad_norm": float(metrics.grad_norm),
        "dropped": int(metrics.num_dropped),
        "imbalance": float((rows_LE.max(axis=1) / rows_LE.mean(axis=1)).max()),
        "tokens_per_second": "" if tokens_per_second is None else round(tokens_per_second, 1),
        "valid_loss": "" if valid_loss is None else valid_loss,
        **entropies,
        **counts,
    }


def keep_until(path: Path, step: int) -> None:
    """Cuts the CSV back to the rows of the steps up to `step`; torn lines go, too, and a file without a whole one."""
    rows = []
    if path.exists():
        with open(path, newline="") as stream:
            rows = list(csv.reader(stream))
    names = rows[0] if rows else []
    kept = [r for r in rows[1:] if len(r) == len(names) and r[0].isdecimal() and int(r[0]) <= step]
    if not kept:
        path.unlink(missing_ok=True)
        return
    write_whole(path, "".join(",".join(line) + "\n" for line in [names, *kept]))


def read_columns(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Columns by name; an empty cell is NaN.

    Raises:
      OSError: no such file.
      ValueError: it has no row.
    """
    with open(path, newline="") as stream:
        rows = list(csv.DictReader(stream))
    if not rows:
        raise ValueError(f"{path} must have a row for a step; got none; train a step")
    return {name: np.array([float(r[name] or "nan") for r in rows]) for name in rows[0]}


def expert_shares(
    columns: dict[str, npt.NDArray[np.float64]], layers: int, experts: int
) -> npt.NDArray[np.float64]:
    """float64[steps, L, E]: each expert's share of its layer's rows."""
    names = header(layers, experts)[-layers * experts :]
    rows_NLE = np.stack([columns[n] for n in names], axis=1).reshape(-1, layers, experts)
    return rows_NLE / rows_NLE.sum(axis=2, keepdims=True)


def smallest_share(shares_NLE: npt.NDArray[np.float64]) -> tuple[float, int, int, int]:
    """The smallest mean share over the last quarter of the steps: (share, layer, expert, steps)."""
    steps = max(1, len(shares_NLE) // 4)
    mean_LE = shares_NLE[-steps:].mean(axis=0)
    layer, expert = np.unravel_index(mean_LE.argmin(), mean_LE.shape)
    return float(mean_LE.min()), int(layer), int(expert), steps


def median_speed(columns: dict[str, npt.NDArray[np.float64]]) -> float | None:
    """Tokens per second, of the steps that have a speed; None without any."""
    speeds = columns["tokens_per_second"]
    return float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else None
