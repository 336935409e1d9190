"""The curves as a picture, for a README or a slide."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptrain.cli.report.charts import charts_of
from ckptrain.cli.report.run import ReportedRun
from ckptrain.errors import CkptrainError

_COLOURS = ("#2563eb", "#c026d3", "#0d9488", "#b45309", "#4f46e5", "#be123c")
_LOST = "#ea580c"
_MOST_LABELS = 8
_SHOWN = ("loss", "lr", "tokens_per_s")


def need_matplotlib() -> None:
    """Look whether a picture can be drawn.

    Raises:
        CkptrainError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CkptrainError(
            "--png draws with matplotlib, which is not installed: uv sync --extra report, or pip install matplotlib;"
            " the HTML file needs nothing more"
        )


def draw_picture(runs: Sequence[ReportedRun], path: Path) -> None:
    """Write a PNG of the loss, the learning rate and the throughput."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state that another program shares

    charts = {chart["id"]: chart for chart in charts_of(runs)}
    shown = [charts[name] for name in _SHOWN if name in charts]
    figure = Figure(figsize=(10, 5.2), dpi=140, layout="constrained")
    grid = figure.add_gridspec(max(1, len(shown) - 1), 3)
    for index, chart in enumerate(shown):
        place = grid[:, :2] if index == 0 and len(shown) > 1 else grid[:, :] if index == 0 else grid[index - 1, 2]
        _draw(figure.add_subplot(place), chart, legend=index == 0)
    figure.savefig(path, format="png")


def _draw(axes: Any, chart: dict[str, Any], *, legend: bool) -> None:
    for series in chart["series"]:
        colour = _COLOURS[series["run"] % len(_COLOURS)]
        style: dict[str, Any] = {
            "line": {"color": colour, "linewidth": 1.8},
            "faint": {"color": colour, "linewidth": 0.8, "alpha": 0.35},
            "lost": {"color": _LOST, "linewidth": 1.4, "linestyle": "--", "marker": "o", "markersize": 3},
            "dots": {"color": "#0d9488", "linewidth": 1.2, "marker": "o", "markersize": 5},
        }[series["kind"]]
        # A legend leaves out names that begin with an underscore; `$` would begin a formula.
        axes.plot(series["x"], series["y"], label=series["name"].replace("$", r"\$").lstrip("_"), **style)
    for mark in chart["marks"]:
        axes.axvline(mark["x"], color="#94a3b8", linewidth=1, linestyle=":")
        axes.text(
            mark["x"],
            1.0,
            f" start {mark['label']}" if legend and len(chart["marks"]) <= _MOST_LABELS else "",
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            color="#64748b",
            va="top",
        )
    axes.set_title(chart["title"], loc="left", fontsize=11)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and chart["series"]:
        axes.legend(fontsize=8, frameon=False)
