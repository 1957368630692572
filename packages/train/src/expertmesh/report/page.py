"""The page: numbers, plots as SVG, and the run's options, in one HTML file without links to others."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from expertmesh.report.run import Run, binned
from expertmesh.train.metrics import median_speed, smallest_share

COLUMNS = 160  # of a heat map at most
PHASES = (
    "Times in the first layer's block on one microbatch, after the last step: each of a program that ends after "
    "the phase, less that of the program that ends before it. A step may hide some behind others; --remat adds to them."
)
EXCHANGES = (
    "What a device sends to the others of its EP group for one layer and microbatch, by the shapes; over nvlink and "
    "ragged the most that it can be."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b;
  background: #fff; }
h1, h2 { line-height: 1.2; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; padding: 0; }
.numbers div { border: 1px solid #bbb; border-radius: .4rem; padding: .5rem .8rem; }
.numbers dt { font-size: .85rem; color: #555; }
.numbers dd { margin: 0; font-size: 1.3rem; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { border-bottom: 1px solid #ddd; padding: .2rem .8rem .2rem 0; text-align: left; overflow-wrap: anywhere; }
"""


def page(run: Run) -> str:
    """The HTML."""
    body = [f"<h1>{html.escape(str(run.folder))}</h1>", _numbers(run)]
    for title, text, figure in _plots(run):
        body.append(f"<h2>{title}</h2>\n<p>{text}</p>\n<figure>{_svg(figure, title)}</figure>")
    body.append(f"<h2>Options</h2>\n{_table(run.options | run.summary)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(run.folder.name)}: a run of expertmesh</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def numbers(run: Run) -> dict[str, str]:
    """The numbers at the top of the page, by name."""
    columns, speed = run.columns, median_speed(run.columns)
    valid = columns["valid_loss"][~np.isnan(columns["valid_loss"])]
    share, layer, expert, steps = smallest_share(run.shares)
    routed = sum(each.sum() for name, each in columns.items() if name.startswith("rows_l"))
    dropped = columns["dropped"].sum()
    return {
        "steps": f"{columns['step'][-1]:.0f}",
        "training loss, nats per byte": f"{columns['loss'][-1]:.3f}",
        "validation loss": f"{valid[-1]:.3f}" if len(valid) else "none yet",
        "tokens per second": "not known" if speed is None else f"{speed:,.0f}",
        "choices dropped": f"{dropped:.0f} ({dropped / routed:.2%})",
        "worst imbalance, last step": f"{columns['imbalance'][-1]:.2f}",
        f"smallest share, last {steps} steps": f"{share:.3f} (layer {layer}, expert {expert})",
        "even share": f"{1 / run.shares.shape[2]:.3f}",
    }


def _numbers(run: Run) -> str:
    tiles = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers(run).items())
    return f'<dl class="numbers">{"".join(tiles)}</dl>'


def _plots(run: Run) -> Iterator[tuple[str, str, Figure]]:
    """(title, what it shows, figure)."""
    columns = run.columns
    steps = columns["step"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per byte")
    axes.plot(steps, columns["loss"], linewidth=0.8, label="training")
    valid = ~np.isnan(columns["valid_loss"])
    axes.plot(steps[valid], columns["valid_loss"][valid], "o-", label="validation")
    axes.legend()
    yield "Loss", "Cross entropy of the next byte.", figure
    text = "Each expert's share of its layer's rows, times E: 1 is even, 0 is an expert that nobody chooses."
    yield "Expert load", text, _heat_maps(run)
    if run.phases:
        yield "Phases", PHASES, _bars(run.phases, "milliseconds")
    if any(run.exchange_bytes.values()):
        legs = {name.replace("_", " "): size / 1e6 for name, size in run.exchange_bytes.items()}
        yield "Exchanges", EXCHANGES, _bars(legs, "megabytes")
    for title, text, lines, even in (
        (
            "Router entropy",
            "In nats, of each layer. The dashed line is log E: a router without a preference.",
            {f"layer {i}": run.entropy[:, i] for i in range(run.entropy.shape[1])},
            np.log(run.shares.shape[2]),
        ),
        (
            "Imbalance",
            "The most loaded expert's rows over the mean, of the worst layer; 1 is even.",
            {"imbalance": columns["imbalance"]},
            1.0,
        ),
        (
            "Dropped choices",
            "Choices that did not fit the buffers, over all layers.",
            {"dropped": columns["dropped"]},
            None,
        ),
        (
            "Speed",
            "Tokens per second, without validation and checkpoints.",
            {"tokens/s": columns["tokens_per_second"]},
            None,
        ),
        ("Gradient norm", "Before clipping.", {"gradient norm": columns["grad_norm"]}, None),
    ):
        yield title, text, _lines(steps, lines, even)


def _lines(steps: Any, lines: dict[str, Any], even: float | None) -> Figure:
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    for name, values in lines.items():
        axes.plot(steps, values, linewidth=0.9, label=name)
    if even is not None:
        axes.axhline(even, color="grey", linestyle="--")
    axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend(fontsize=8)
    return figure


def _bars(values: dict[str, float], unit: str) -> Figure:
    figure = Figure(figsize=(9, 0.9 + 0.35 * len(values)), layout="constrained")
    axes = figure.add_subplot(xlabel=unit)
    bars = axes.barh(list(values), list(values.values()))
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    return figure


def _heat_maps(run: Run) -> Figure:
    """A panel a layer: steps to the right, experts downwards."""
    _, layers, experts = run.shares.shape
    load = binned(run.shares, COLUMNS) * experts
    figure = Figure(
        figsize=(9, 0.6 + layers * (0.8 + 0.05 * min(experts, 40))), layout="constrained"
    )
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    first, last = run.columns["step"][[0, -1]]
    for layer, axes in enumerate(panels):
        shown = axes.imshow(
            load[:, layer].T,
            aspect="auto",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            interpolation="nearest",
            extent=(first - 0.5, last + 0.5, experts - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
    panels[-1].set_xlabel("step")
    figure.colorbar(shown, ax=list(panels), label="share times E", extend="max")
    return figure


def _svg(figure: Figure, title: str) -> str:
    """Its text, to stand in HTML: the same each time, with ids that differ between figures."""
    stream = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    prefix = re.sub(r"\W", "", title)
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{prefix}", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _table(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in _flat(values, "")
    )
    return f"<table>{rows}</table>"


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
