"""Reads the files of a run's folder."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.train.metrics import expert_shares, read_columns
from expertmesh.train.rundir import RunFolder

Array = npt.NDArray[np.float64]


class RunError(Exception):
    """The folder is not that of a run with a finished step."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
      folder: its path.
      options: what `options.json` has.
      summary: what `summary.json` has; {} while the run goes on.
      columns: of its CSV, by name; NaN where a cell is empty.
      shares: float64[steps, L, E], each expert's share of its layer's rows.
      entropy: float64[steps, L], of the routers, in nats.
    """

    folder: Path
    options: dict[str, Any]
    summary: dict[str, Any]
    columns: dict[str, Array]
    shares: Array
    entropy: Array

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase of a block; {} without `--phases`, and while the run goes on."""
        found: dict[str, float] = self.summary.get("phases_ms", {})
        return found

    @property
    def exchange_bytes(self) -> dict[str, int]:
        """What a device sends in each leg, for one layer and microbatch; {} while the run goes on."""
        found: dict[str, int] = self.summary.get("exchange_bytes", {})
        return found


def read(path: Path) -> Run:
    """The run of a folder.

    Raises:
      RunError: a file is missing or no step is in it.
    """
    folder = RunFolder(path)
    try:
        options = _mapping(folder.options)
        columns = read_columns(folder.metrics)
        layers, experts = sizes(columns)
        summary = _mapping(folder.summary) if folder.summary.exists() else {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"RUN must be the folder of a run with a finished step; got {path}: {error}; "
            "give the --out of `python -m expertmesh.train`"
        ) from error
    entropy = np.stack([columns[f"entropy_l{i}"] for i in range(layers)], axis=1)
    shares = expert_shares(columns, layers, experts)
    return Run(path, options, summary, columns, shares, entropy)


def _mapping(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a mapping; got {content!r:.80}")
    return content


def sizes(columns: dict[str, Array]) -> tuple[int, int]:
    """(layers, experts) of a CSV's columns."""
    matches = (re.fullmatch(r"rows_l(\d+)_e(\d+)", name) for name in columns)
    numbers = [(int(match[1]), int(match[2])) for match in matches if match]
    return 1 + max(layer for layer, _ in numbers), 1 + max(expert for _, expert in numbers)


def binned(values: Array, most: int) -> Array:
    """[steps, ...] as the means of `most` neighbouring parts at most, [parts, ...]."""
    parts = np.array_split(values, min(most, len(values)))
    return np.stack([part.mean(axis=0) for part in parts])
