"""The metrics of a run: one CSV row per step, read back as columns.

Columns: step, loss (cross entropy, nats per byte), aux_loss, z_loss, grad_norm, dropped (rows),
imbalance (largest over mean rows per expert, of the worst layer), tokens_per_second (of the steps
before it, without validation and checkpoints; none before the second), valid_loss (nats per byte, where
there was a validation after the step), entropy_l<layer> (of the router, in nats) and rows_l<layer>_e<expert>.
"""

from __future__ import annotations

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


def keep_until(path: Path, step: int) -> str | None:
    """Cuts the CSV back to the rows of the steps up to `step`; torn lines go, too, and a file without a whole one.

    Returns:
      A note if a step is missing.
    """
    names, rows = _whole_rows(path) if path.exists() else ([], [])
    kept = [row for row in rows if int(row[0]) <= step]
    if kept:
        write_whole(path, "".join(",".join(line) + "\n" for line in [names, *kept]))
    else:
        path.unlink(missing_ok=True)
    missing = step - len(kept)
    return (
        f"{path.name} lacks {missing} of {step} steps, which are not trained again"
        if missing
        else None
    )


def read_columns(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Columns by name; an empty cell is NaN.

    Raises:
      OSError: no such file.
      ValueError: it has no row.
    """
    names, rows = _whole_rows(path)
    if not rows:
        raise ValueError(f"{path} must have a row for a step; got none; train a step")
    columns = zip(*([float(cell or "nan") for cell in row] for row in rows), strict=True)
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def _whole_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """(names, the lines of steps): without those that are torn, which may hold any bytes."""
    lines = [line.split(",") for line in path.read_text(errors="replace").split("\n")[:-1]]
    names = lines[0] if lines else []
    return names, [line for line in lines[1:] if len(line) == len(names) and _is_row(line)]


def _is_row(cells: list[str]) -> bool:
    """Whether they are a step, and numbers or nothing."""
    try:
        numbers = [float(cell) for cell in cells if cell]
    except ValueError:
        return False
    return bool(numbers) and cells[0].isdecimal()


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
