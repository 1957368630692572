"""The two pictures of a run, from the columns of its CSV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

Columns = dict[str, npt.NDArray[np.float64]]


def plot_loss(columns: Columns, order1: float, path: Path) -> None:
    """Training and validation loss per step, with the order-1 model's loss as a line."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(columns["step"], columns["loss"], linewidth=0.8, label="training")
    valid = ~np.isnan(columns["valid_loss"])
    axes.plot(columns["step"][valid], columns["valid_loss"][valid], "o-", label="validation")
    axes.axhline(order1, color="grey", linestyle="--", label="order-1 byte model")
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", title="Loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_experts(
    steps: npt.NDArray[np.float64], shares_NLE: npt.NDArray[np.float64], path: Path
) -> None:
    """Each expert's share of its layer's rows per step, one panel per layer."""
    _, L, E = shares_NLE.shape
    figure = Figure(figsize=(8, 1 + 2.2 * L), layout="constrained")
    panels = figure.subplots(L, 1, sharex=True, squeeze=False)[:, 0]
    for i, axes in enumerate(panels):
        axes.plot(steps, shares_NLE[:, i], linewidth=0.8)
        axes.axhline(1 / E, color="grey", linestyle="--", label="even share, 1/E")
        axes.axhline(1 / (4 * E), color="red", linestyle=":", label="floor, 1/(4E)")
        axes.set(ylabel="share of rows", title=f"Expert load, layer {i}", ylim=(0, None))
    panels[0].legend(loc="upper right")
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
