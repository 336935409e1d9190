"""Which curves does a report draw? Plain numbers for the script of the page, thinned so that no spike is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptrain.cli.report.measured import Measured, Point, points_of, smoothed, thinned
from ckptrain.cli.report.run import ReportedRun
from ckptrain.cli.report.story import STARTING, Start

_BUCKETS = 350
"""Of a curve: a third of the pixels of a wide screen, with up to four points each."""
_SMOOTH_FROM = 100
"""Steps from which on a loss is noisy enough for its mean to be drawn as well."""
_MOST_SPANS = 400
MOST_STARTS = 40
"""Of a timeline, the newest ones."""

_SMALL = (
    ("lr", "Learning rate", "number"),
    ("grad_norm", "Gradient norm", "number"),
    ("tokens_per_s", "Throughput, tokens/s", "number"),
    ("peak_memory_bytes", "GPU memory, peak", "bytes"),
    ("mfu", "Share of the GPU's peak (MFU)", "share"),
    ("seconds", "Time of a step", "seconds"),
)
"""What is drawn small where it was measured: key, title, unit."""


def charts_of(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the charts of one run, or of several laid over each other."""
    several = len(runs) > 1
    marks = [mark for index, run in enumerate(runs) for mark in _marks(run, index, several=several)]
    charts = [
        {
            "id": "loss",
            "title": "Loss",
            "unit": "number",
            "log": True,
            "series": [series for index, run in enumerate(runs) for series in _losses(run, index, several=several)],
            "marks": marks,
        }
    ]
    for key, title, unit in _SMALL:
        series = [one for index, run in enumerate(runs) for one in _curve(run, index, key, several=several)]
        if series:
            log = key == "grad_norm"
            charts.append({"id": key, "title": title, "unit": unit, "log": log, "series": series, "marks": marks})
    return charts


def timeline_of(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return what the newest starts spent their time on."""
    return [_timeline(start) for start in starts[-MOST_STARTS:]]


def _losses(run: ReportedRun, index: int, *, several: bool) -> list[dict[str, Any]]:
    series = _curve(run, index, "loss", name="training", several=several)
    losses = run.measured.points("loss")
    if len(losses) >= _SMOOTH_FROM:
        over = max(10, len(losses) // 50)
        mean = smoothed(losses, over)
        for one in series:
            if one["kind"] == "line":
                one["kind"] = "faint"
        series.append(_series(_named(run, f"mean of {over}", several=several), "line", index, mean))
    validation = run.measured.points("val_loss")
    if validation:
        series.append(_series(_named(run, "validation", several=several), "dots", index, validation))
    return series


def _curve(run: ReportedRun, index: int, key: str, *, several: bool, name: str | None = None) -> list[dict[str, Any]]:
    points = run.measured.points(key)
    if not points:
        return []
    title = _named(run, name or "kept", several=several)
    return [_series(title, "line", index, points), *_lost(run.measured, index, key, run.name if several else None)]


def _lost(measured: Measured, index: int, key: str, name: str | None) -> list[dict[str, Any]]:
    """Return what lost stretches measured, each as a curve of its own."""
    found = []
    for stretch in measured.lost:
        points = points_of(stretch.rows, key)
        if points:
            title = f"lost, made again by start {stretch.lost_to}"
            found.append(_series(title if name is None else f"{name}: {title}", "lost", index, points))
    return found


def _named(run: ReportedRun, name: str, *, several: bool) -> str:
    if not several:
        return name
    return run.name if name == "kept" else f"{run.name}: {name}"


def _series(name: str, kind: str, run: int, points: Sequence[Point]) -> dict[str, Any]:
    shown = thinned(points, _BUCKETS)
    return {
        "name": name,
        "kind": kind,
        "run": run,
        "x": [step for step, _ in shown],
        "y": [float(f"{value:.6g}") for _, value in shown],
    }


def _marks(run: ReportedRun, index: int, *, several: bool) -> list[dict[str, Any]]:
    """Return where a run was started again: between the step of the checkpoint and the one after it."""
    return [
        {
            "x": start.step + 0.5,
            "label": str(start.number),
            "text": (f"{run.name}: " if several else "") + f"start {start.number} goes on from step {start.step}",
            "run": index,
        }
        for start in run.starts
        if start.trains and start.number > 1
    ]


def _timeline(start: Start) -> dict[str, Any]:
    spans = list(start.spans)
    if len(spans) > _MOST_SPANS:  # the longest are what can be seen
        spans = sorted(sorted(spans, key=lambda span: span.begin_s - span.end_s)[:_MOST_SPANS], key=lambda s: s.begin_s)
    return {
        "number": start.number,
        "plan": start.plan,
        "end": start.end,
        "began": start.began,
        "lasted": round(start.lasted_s, 3),
        "spans": [
            {
                "phase": "starting" if span.phase == STARTING else span.phase.lower(),
                "from": round(span.begin_s, 3),
                "to": round(span.end_s, 3),
                "step": span.step,
            }
            for span in spans
        ],
        "saves": [
            {
                "step": save.step,
                "outcome": save.outcome,
                "from": round(save.begin_s, 3),
                "to": None if save.end_s is None else round(save.end_s, 3),
                "stall": save.stall_s,
                "bytes": save.num_bytes,
            }
            for save in start.saves[-_MOST_SPANS:]
        ],
    }
