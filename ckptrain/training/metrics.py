"""RUN/metrics.jsonl: what was measured, a line a step, and never a step twice.

What a lost stretch wrote (steps after the checkpoint that a start goes on from, which are made again) is moved to
metrics.lost.jsonl beside it, so that a report can lay both over each other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import orjson

from ckptrain.training.observers import Observer, StepRecord


class MetricsFile(Observer):
    """RUN/metrics.jsonl: one object a line with `step` and what was measured then."""

    def __init__(self, path: Path, *, last_step: int, every_steps: int) -> None:
        """Open the file for a run that has done `last_step` steps; lines of a lost stretch after them are set aside."""
        self._every_steps = every_steps
        if path.exists():
            _set_aside_lines_after(path, last_step)
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


def lost_path(path: Path) -> Path:
    """Return where the lines of a metrics file go whose steps are made again."""
    return path.with_suffix(".lost.jsonl")


def _set_aside_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; those after it belong to steps that are made again, and a torn last line to none."""
    lines = _objects(path)
    lost = [values for _, values in lines if _whole(values, "step") > step]
    if lost:
        _add_stretch(lost_path(path), lost, step)
    _replace(path, b"".join(line for line, values in lines if _whole(values, "step") <= step))


def _add_stretch(path: Path, lines: list[dict[str, Any]], step: int) -> None:
    """Add lines as one more stretch; not again where a start died after this and before the lines left their file."""
    known = _objects(path)
    newest = max((_whole(values, "stretch") for _, values in known), default=0)
    if [_measured(values) for _, values in known if _whole(values, "stretch") == newest] == lines:
        return
    lost_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    where = {"stretch": newest + 1, "resumed_from": step, "lost_at": lost_at}
    added = [orjson.dumps({**where, **line}) + b"\n" for line in lines]
    _replace(path, b"".join([*(line for line, _ in known), *added]))


def _measured(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("stretch", "resumed_from", "lost_at")}


def _objects(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines that are whole, each as it stands and as what it says; a file that is not there has none."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(values, dict):
            found.append((line + b"\n", values))
    return found


def _whole(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


def _replace(path: Path, content: bytes) -> None:
    replacement = path.with_name(f"{path.name}.new")
    replacement.write_bytes(content)
    replacement.replace(path)
