"""Run directories as runs leave them, written without a run: journals, metrics and lost stretches of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson

from ckptrain.training.metrics import MetricsFile
from ckptrain.training.observers import StepRecord

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def at(seconds: float) -> str:
    """Return a time so many seconds after the first start, as journals have it."""
    return (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Write a file of one object a line, in place of what was there."""
    path.write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in entries))


def record(step: int, loss: float | None = None, **values: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    measured = {"loss": 3 / math.sqrt(step + 1) if loss is None else loss, "lr": 1e-4, "grad_norm": 1.0}
    told = {"tokens": 512, "learnt_tokens": 200, "padding_share": 0.1, "tokens_per_s": 1000.0 + step % 7}
    rest = {"seconds": 0.5, "data_s": 0.0, "tflops_per_s": 0.1, "mfu": None, "peak_memory_bytes": None}
    return {"step": step, **measured, **told, **rest, **values}


def write_steps(path: Path, *, done: int, to: int, shift: float = 0.0) -> None:
    """Let the real metrics file write the steps after `done`, as a start does; `shift` is added to their losses."""
    metrics = MetricsFile(path, last_step=done, every_steps=1)
    for step in range(done + 1, to + 1):
        values = record(step)
        metrics.on_step(StepRecord(**{**values, "loss": values["loss"] + shift}))
    metrics.on_end()


def start(seconds: float, step: int, *, config: dict[str, Any] | None = None, **facts: Any) -> list[dict[str, Any]]:
    """Return what the journal says of a start until it trains."""
    plan = "Resume" if step else "FreshStart"
    entries: list[dict[str, Any]] = [
        {"time": at(seconds), "event": "plan", "plan": plan, "reason": "because", "notes": [], "world_size": 1}
        | {"host": "here", "pid": 7, "first_step": step + 1}
        | ({"step": step, "checkpoint": f"checkpoints/step-{step:08}"} if step else {})
        | facts,
        {"time": at(seconds), "event": "config", "values": config or {}},
        {"time": at(seconds), "event": "phase", "from": "NEW", "to": "PLANNED"},
    ]
    if step:
        entries.append(
            {"time": at(seconds + 1), "event": "receipt", "checkpoint": f"step-{step:08}", "optimizer_step": step}
            | {"tensors_per_rank": [[24, 24]], "optimizer": "restored: moments", "next_step": step + 1}
            | {"next_learning_rate": 1e-4, "rng": "restored on every rank", "next_row": step * 4}
        )
    return [*entries, {"time": at(seconds + 2), "event": "phase", "from": "PLANNED", "to": "TRAINING", "step": step}]


def saved(seconds: float, step: int, stall_s: float = 0.25) -> list[dict[str, Any]]:
    """Return what the journal says of a save that goes on behind the training for three seconds."""
    name, where = f"step-{step:08}", {"event": "phase", "step": step}
    return [
        {"time": at(seconds), "from": "TRAINING", "to": "SAVING", **where},
        {"time": at(seconds + stall_s), "from": "SAVING", "to": "TRAINING", "stall_s": stall_s, **where},
        {
            "time": at(seconds + 5),
            "event": "saved",
            "step": step,
            "checkpoint": name,
            "num_bytes": 5000,
            "seconds": 3.0,
        },
    ]


def ended(seconds: float, phase: str, step: int, came_from: str = "TRAINING") -> list[dict[str, Any]]:
    """Return the last line of a start."""
    return [{"time": at(seconds), "event": "phase", "from": came_from, "to": phase, "step": step}]
