"""What is there to report of one run? Its files, read once and put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.contents import stored_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.checkpoint.working_copy import as_given
from ckptrain.cli.report.judged import Continuation, Remark, continuations, health
from ckptrain.cli.report.measured import Measured, read_measured
from ckptrain.cli.report.story import Start, read_story
from ckptrain.lifecycle.journal import read_lines


@attrs.frozen(kw_only=True)
class ReportedRun:
    """A run as a report tells it."""

    name: str
    run_dir: str
    state: Mapping[str, Any]
    """What `ckptrain status` reports."""
    starts: Sequence[Start]
    measured: Measured
    resumes: Sequence[Continuation]
    health: Sequence[Remark]
    journal: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    """As it was asked for last, flattened."""
    manifests: Sequence[Mapping[str, Any]]
    """Of the checkpoints that are whole, without tensors and files."""

    def to_dict(self) -> dict[str, Any]:
        """Return what is told of the run in JSON's types, without its curves."""
        return {
            "name": self.name,
            **self.state,
            "health": [attrs.asdict(remark) for remark in self.health],
            "resumes": [attrs.asdict(resume) for resume in self.resumes],
            "starts": [attrs.asdict(start) for start in self.starts],
            "lost_steps": sum(len(stretch.rows) for stretch in self.measured.lost),
        }


def read_run(run_dir: Path, state: Mapping[str, Any], config: Mapping[str, Any] | None) -> ReportedRun:
    """Read a run directory, changing nothing in it.

    Args:
        run_dir: the run directory.
        state: what `ckptrain status` reports of it.
        config: as it was asked for last, flattened; None where that cannot be read.
    """
    journal = read_lines(run_dir / JOURNAL)
    ended = state["phase"] in (None, "STOPPED", "FINISHED", "FAILED")
    starts = read_story(journal, alive=not ended and not state["seems_dead"])
    measured = read_measured(read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "metrics.lost.jsonl"), starts)
    return ReportedRun(
        name=run_dir.absolute().name,
        run_dir=as_given(run_dir),
        state=state,
        starts=starts,
        measured=measured,
        resumes=continuations(starts, measured),
        health=health(state, starts, measured),
        journal=journal,
        config=config or next((start.config for start in reversed(starts) if start.config is not None), {}),
        manifests=[
            _manifest(checkpoint)
            for checkpoint in store_of(run_dir).scan()
            if isinstance(checkpoint, CommittedCheckpoint)
        ],
    )


def _manifest(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "name": checkpoint.path.name,
        "step": manifest.step,
        "created": manifest.created,
        "num_bytes": stored_bytes(manifest),
        "run_id": manifest.run_id,
        "consumed_samples": manifest.consumed_samples,
        "consumed_tokens": manifest.consumed_tokens,
        "metrics": dict(manifest.metrics),
        "base": attrs.asdict(manifest.base),
        "num_tensors": len(manifest.tensors),
        "layout": attrs.asdict(manifest.layout),
        "versions": dict(manifest.versions),
        "config_digest": manifest.config_digest,
    }
