"""Reads the files of a run's folder."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.train.metrics import expert_shares, header, read_columns
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
        return _sizes_by_name(self.summary, "phases_ms")

    @property
    def exchange_bytes(self) -> dict[str, float]:
        """What a device sends in each leg, for one layer and microbatch; {} while the run goes on."""
        return _sizes_by_name(self.summary, "exchange_bytes")


def read(path: Path) -> Run:
    """The run of a folder.

    Raises:
      RunError: a file is missing or damaged, or no step is in it.
    """
    folder = RunFolder(path)
    try:
        options = _mapping(folder.options)
        columns = read_columns(folder.metrics)
        layers, experts = sizes(columns)
        _check_names(columns, header(layers, experts))
        summary = _mapping(folder.summary) if folder.summary.exists() else {}
        for key in ("phases_ms", "exchange_bytes"):
            _sizes_by_name(summary, key)
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


def _sizes_by_name(summary: dict[str, Any], key: str) -> dict[str, float]:
    """{} where it is left out."""
    found = summary.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(n, int | float) for n in found.values()):
        raise ValueError(f"summary.json must hold a mapping of numbers as {key}; got {found!r:.80}")
    return found


def _check_names(columns: dict[str, Array], names: list[str]) -> None:
    if missing := [name for name in names if name not in columns]:
        raise ValueError(
            f"metrics.csv must have the columns of a run; got no {missing[0]}, {len(missing)} of {len(names)} missing"
        )


def sizes(columns: dict[str, Array]) -> tuple[int, int]:
    """(layers, experts) of a CSV's columns.

    Raises:
      ValueError: none of them is of an expert's rows.
    """
    matches = (re.fullmatch(r"rows_l(\d+)_e(\d+)", name) for name in columns)
    numbers = [(int(match[1]), int(match[2])) for match in matches if match]
    if not numbers:
        raise ValueError(
            f"metrics.csv must have a column of each expert's rows, such as rows_l0_e0; got {', '.join(columns):.80}"
        )
    return 1 + max(layer for layer, _ in numbers), 1 + max(expert for _, expert in numbers)


def binned(values: Array, most: int) -> Array:
    """[steps, ...] as the means of `most` neighbouring parts at most, [parts, ...]."""
    parts = np.array_split(values, min(most, len(values)))
    return np.stack([part.mean(axis=0) for part in parts])
