"""`ckptrain verify`: whether the bytes are what the manifest says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptrain.checkpoint.contents import stored_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import MANIFEST_NAME
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.store import CHECKPOINTS, CheckpointStore, DamagedCheckpoint, step_of
from ckptrain.checkpoint.working_copy import as_given, look_directory, run_of, store_url
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import facts
from ckptrain.cli.wording import bytes_text, plural
from ckptrain.errors import EXIT_DAMAGED, EXIT_DONE, CheckpointNotFound


def verify_answer(path: Path) -> Answer:
    """Read a checkpoint, or every one of a run, in full.

    Raises:
        CheckpointNotFound: `path` is neither.
        CheckpointDamaged: it is a checkpoint whose manifest cannot be read.
    """
    reports = list(_reports(path))
    damaged = any(report["problems"] for report in reports)
    return Answer(
        report={"checkpoints": reports, "intact": not damaged},
        show=functools.partial(_show, reports),
        exit_status=EXIT_DAMAGED if damaged else EXIT_DONE,
    )


def _reports(path: Path) -> Iterator[dict[str, Any]]:
    """Report on all checkpoints of a run, damaged ones included, or on the one that the path names."""
    store, found, is_run = _found(path)
    for checkpoint in found:
        report = {"path": as_given(checkpoint.path), "step": checkpoint.step}
        if isinstance(checkpoint, DamagedCheckpoint):
            yield {**report, "files": None, "num_bytes": None, "problems": list(checkpoint.problems)}
            continue
        manifest = checkpoint.manifest
        try:
            with store.reading(checkpoint):
                problems = store.problems(checkpoint)
        except CheckpointNotFound:
            if not is_run:
                raise
            continue  # the run, which is at work, has pruned it since it was listed
        yield {
            **report,
            "files": len(manifest.files),
            "num_bytes": stored_bytes(manifest),
            "problems": problems,
        }


def _found(path: Path) -> tuple[CheckpointStore, list[CommittedCheckpoint | DamagedCheckpoint], bool]:
    """Return where the path is, what it means there, and whether that is a whole run."""
    if (run_dir := run_of(path)) is not None and (url := store_url(run_dir)) is not None:
        store = store_of(look_directory(url.url))
        found = store.scan()
        if path in (run_dir, run_dir / CHECKPOINTS) and found:
            return store, found, True
        named = [checkpoint for checkpoint in found if checkpoint.step == step_of(path.name)]
        return store, named or [resolve_checkpoint(path)], False
    is_run = (path / CHECKPOINTS).is_dir() and not (path / MANIFEST_NAME).exists()
    store = CheckpointStore(path)
    found = store.scan() if is_run else []
    return store, found or [resolve_checkpoint(path)], bool(found)


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
