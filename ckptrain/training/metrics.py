"""RUN/metrics.jsonl: what was measured, a line a step, and never a step twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import orjson

from ckptrain.training.observers import Observer, StepRecord


class MetricsFile(Observer):
    """RUN/metrics.jsonl: one object a line with `step` and what was measured then."""

    def __init__(self, path: Path, *, last_step: int, every_steps: int) -> None:
        """Open the file for a run that has done `last_step` steps, and drop what a lost stretch wrote after them."""
        self._every_steps = every_steps
        if path.exists():
            _drop_lines_after(path, last_step)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def on_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            self._write(attrs.asdict(record))

    def on_validation(self, step: int, val_loss: float) -> None:
        self._write({"step": step, "val_loss": val_loss})

    def on_end(self) -> None:
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        line = (b"\n" if self._torn else b"") + orjson.dumps(values) + b"\n"
        self._torn = True  # a full disk may take a part of the line; the next then starts on one of its own
        while line:
            line = line[self._file.write(line) :]
        self._torn = False


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; those after it belong to steps that are made again, and a torn last line to none."""
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if values.get("step", 0) <= step:
            kept.append(line + b"\n")
    replacement = path.with_suffix(".jsonl.new")
    replacement.write_bytes(b"".join(kept))
    replacement.replace(path)
