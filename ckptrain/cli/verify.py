"""`ckptrain verify`: whether the bytes are what the manifest says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptrain.checkpoint.integrity import CommittedCheckpoint, verify_files
from ckptrain.checkpoint.manifest import MANIFEST_NAME
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.store import CHECKPOINTS, CheckpointStore, DamagedCheckpoint
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import facts
from ckptrain.cli.wording import bytes_text, plural
from ckptrain.errors import EXIT_DAMAGED, EXIT_DONE


def verify_answer(path: Path) -> Answer:
    """Read a checkpoint, or every one of a run, in full.

    Raises:
        CheckpointNotFound: `path` is neither.
        CheckpointDamaged: it is a checkpoint whose manifest cannot be read.
    """
    reports = [_report(checkpoint) for checkpoint in _checkpoints(path)]
    damaged = any(report["problems"] for report in reports)
    return Answer(
        report={"checkpoints": reports, "intact": not damaged},
        show=functools.partial(_show, reports),
        exit_status=EXIT_DAMAGED if damaged else EXIT_DONE,
    )


def _checkpoints(path: Path) -> list[CommittedCheckpoint | DamagedCheckpoint]:
    """Return all checkpoints of a run, damaged ones included, or the one that the path names."""
    is_run = (path / CHECKPOINTS).is_dir() and not (path / MANIFEST_NAME).exists()
    found = CheckpointStore(path).scan() if is_run else []
    return found or [resolve_checkpoint(path)]


def _report(checkpoint: CommittedCheckpoint | DamagedCheckpoint) -> dict[str, Any]:
    report: dict[str, Any] = {"path": str(checkpoint.path), "step": checkpoint.step}
    if isinstance(checkpoint, DamagedCheckpoint):
        return {**report, "files": None, "num_bytes": None, "problems": list(checkpoint.problems)}
    files = checkpoint.manifest.files
    return {
        **report,
        "files": len(files),
        "num_bytes": sum(file.num_bytes for file in files.values()),
        "problems": verify_files(checkpoint),
    }


def _show(reports: list[dict[str, Any]], console: Console) -> None:
    rows: list[tuple[str, str | Text]] = []
    for report in reports:
        name = Path(report["path"]).name
        if report["problems"]:
            rows.append((name, Text("damaged", style="bold red")))
            rows += [("", f"- {problem}") for problem in report["problems"]]
        else:
            size = f"{plural(report['files'], 'file')}, {bytes_text(report['num_bytes'])} read and compared"
            rows.append((name, Text.assemble(("intact", "green"), f": {size}")))
    console.print(facts(rows))
