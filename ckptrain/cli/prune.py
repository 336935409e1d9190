"""`ckptrain prune`: which checkpoints of a run are kept and why; the others go, also while the run is at work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.checkpoint.contents import stored_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.retention import Retention, Verdict, judge
from ckptrain.checkpoint.store import CheckpointStore, DamagedCheckpoint
from ckptrain.checkpoint.working_copy import as_given
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import table
from ckptrain.cli.wording import bytes_text, plural
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound

_STYLES = {"kept": "green", "removed": "yellow", "damaged": "bold red"}


def prune_answer(run_dir: Path, wanted: Mapping[str, Any], *, dry_run: bool) -> Answer:
    """Remove what a run does not keep by its config, with the keys of `wanted` in place of the config's.

    Raises:
        CheckpointNotFound: the directory is not that of a run.
        CheckpointDamaged: the newest would be all that is left, and its files are not what its manifest says.
        SaveFailed: one cannot be removed.
    """
    options = api.config_of_run(run_dir, check_inputs=False).checkpoint
    retention = attrs.evolve(Retention.of(options), **wanted)
    store = store_of(run_dir)
    found = store.scan()
    whole = [checkpoint for checkpoint in found if isinstance(checkpoint, CommittedCheckpoint)]
    in_use = [checkpoint.path for checkpoint in whole if store.is_read(checkpoint)]
    verdicts = judge(whole, retention, in_use)
    if not all(verdict.kept for verdict in verdicts):
        _check_newest(store, whole[-1])
    removed = [] if dry_run else store.prune(retention, in_use)
    going = {verdict.checkpoint.path for verdict in verdicts if not verdict.kept} if dry_run else set(removed)
    left = {checkpoint.path for checkpoint in store.committed()} - going
    rows = [_judged(verdict, left) for verdict in verdicts]
    rows += [_damaged(checkpoint) for checkpoint in found if isinstance(checkpoint, DamagedCheckpoint)]
    report = {
        "run_dir": as_given(run_dir),
        "retention": attrs.asdict(retention),
        "dry_run": dry_run,
        "checkpoints": sorted(rows, key=lambda row: row["step"]),
        "freed_bytes": sum(row["num_bytes"] for row in rows if row["fate"] == "removed"),
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _check_newest(store: CheckpointStore, newest: CommittedCheckpoint) -> None:
    """Read the newest in full before others go: by names and sizes alone it could be the only one that is no good."""
    problems = []
    with contextlib.suppress(CheckpointNotFound), store.reading(newest):  # the run has saved a newer one, and pruned it
        problems = store.problems(newest)
    if problems:
        raise CheckpointDamaged(
            f"nothing is removed: the newest checkpoint {newest.path} is damaged, so one of those before it may be the"
            " last good one; the next start moves it to quarantine/ and goes on from there",
            problems,
        )


def _judged(verdict: Verdict, left: Collection[Path]) -> dict[str, Any]:
    """Return what became of a whole checkpoint, which a reader, or a prune by the run itself, may have changed."""
    path, reasons = verdict.checkpoint.path, verdict.reasons
    goes = path not in left
    return {
        "name": path.name,
        "step": verdict.checkpoint.step,
        "num_bytes": stored_bytes(verdict.checkpoint.manifest),
        "fate": "removed" if goes else "kept",
        "reasons": [] if goes else list(reasons or ("in use",)),
    }


def _damaged(checkpoint: DamagedCheckpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.path.name,
        "step": checkpoint.step,
        "num_bytes": None,
        "fate": "damaged",
        "reasons": list(checkpoint.problems),
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    if not report["checkpoints"]:
        console.print(Text(f"{report['run_dir']} has no checkpoint yet"))
        return
    lines = [
        (
            row["name"],
            "" if row["num_bytes"] is None else bytes_text(row["num_bytes"]),
            Text(_fate_text(row["fate"], dry_run=report["dry_run"]), style=_STYLES[row["fate"]]),
            "; ".join(row["reasons"]),
        )
        for row in report["checkpoints"]
    ]
    console.print(table(("checkpoint", "size", "", "why"), lines, right=("size",)))
    count = sum(row["fate"] == "removed" for row in report["checkpoints"])
    done = "would be removed" if report["dry_run"] else "removed"
    console.print(Text(f"\n{plural(count, 'checkpoint')} {done}, {bytes_text(report['freed_bytes'])} freed"))


def _fate_text(fate: str, *, dry_run: bool) -> str:
    return "would go" if dry_run and fate == "removed" else fate
