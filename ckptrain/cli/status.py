"""`ckptrain status`: how far a run is, from what it has written; nothing is locked, loaded or changed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import orjson
from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.checkpoint.contents import stored_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.lock import Holder, holder
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import JOURNAL, DamagedCheckpoint
from ckptrain.checkpoint.working_copy import all_as_given, as_given, to_look_at
from ckptrain.cli.outcome import Answer, failure_of
from ckptrain.cli.page import Row, facts, problem_rows, start_rows
from ckptrain.cli.wording import bytes_text, duration_text
from ckptrain.config.base import locate_base
from ckptrain.config.load import load_config
from ckptrain.errors import CheckpointNotFound, CkptrainError, ConfigError
from ckptrain.lifecycle.journal import read_journal
from ckptrain.lifecycle.phases import TERMINAL, Phase

_METRICS = "metrics.jsonl"
_RUN_CONFIG = "run.yaml"
_EXPECTED = "is not a run directory: expected run.yaml, journal.jsonl or checkpoints/ in it"
_TAIL_BYTES = 1 << 20
"""How much of metrics.jsonl is read, from its end: some thousands of steps."""
_QUIET_S = 600.0
"""How long a phase that writes nothing (loading, saving, validating) may take before it looks dead."""
_QUIET_STEPS = 20
_QUIET_TRAINING_S = 30.0
"""Steps are written as they are made: silence for so many of them, and this on top, looks dead."""


@attrs.frozen(kw_only=True)
class _Written:
    """What a run has written so far."""

    run_dir: Path
    journal: Sequence[Mapping[str, Any]]
    """Since its last start."""
    metrics: Sequence[Mapping[str, Any]]
    silent_s: float | None
    """Seconds since anything was written; None where nothing was."""
    holder: Holder | None
    """Who holds the directory, or died without letting go of it."""


def status_answer(run_dir: Path) -> Answer:
    """Report on a run.

    Raises:
        CheckpointNotFound: the directory is not that of a run.
        CheckpointDamaged: a newer ckptrain wrote here.
    """
    run_dir = to_look_at(run_dir)
    store = store_of(run_dir)
    found = store.scan()
    written = _read(run_dir)
    if not found and not written.journal and not (run_dir / _RUN_CONFIG).is_file():
        found_there = _EXPECTED if run_dir.is_dir() else "does not exist, expected a run directory"
        raise CheckpointNotFound(f"{run_dir} {found_there}; start a run with `ckptrain run CONFIG --run-dir {run_dir}`")
    report = {
        "run_dir": as_given(run_dir),
        **_phase(written),
        "step": _last(written.metrics, "step") or max((checkpoint.step for checkpoint in found), default=0),
        "steps": _target(run_dir, found),
        "loss": _last(written.metrics, "loss"),
        "val_loss": _last(written.metrics, "val_loss"),
        "checkpoints": [_checkpoint(checkpoint) for checkpoint in found],
        "quarantined": store.quarantined(),
        "next": _next_start(run_dir, _processes(written)),
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _read(run_dir: Path) -> _Written:
    journal = read_journal(run_dir / JOURNAL)
    starts = [number for number, entry in enumerate(journal) if entry.get("event") == "plan"]
    times = [path.stat().st_mtime for name in (JOURNAL, _METRICS) if (path := run_dir / name).is_file()]
    return _Written(
        run_dir=run_dir,
        journal=journal[starts[-1] :] if starts else journal,
        metrics=_tail(run_dir / _METRICS),
        silent_s=max(0.0, time.time() - max(times)) if times else None,
        holder=holder(run_dir),
    )


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the last lines of a JSONL file; a line that is torn, at either end, is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    values = []
    for line in lines:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values


def _last(lines: Iterable[Mapping[str, Any]], key: str) -> Any:
    """Return the newest value of a key."""
    return next((line[key] for line in reversed(list(lines)) if line.get(key) is not None), None)


def _phase(written: _Written) -> dict[str, Any]:
    """Return the phase of the last start, why it ended where it did, and whether its process seems to have died.

    A process on another machine cannot be looked at from here; of that one silence has to tell.
    """
    phase = _last((entry for entry in written.journal if entry.get("event") == "phase"), "to")
    reason = None
    if phase == Phase.FAILED.value:
        reason = _last((entry for entry in written.journal if entry.get("event") == "error"), "message")
    elif phase in (Phase.STOPPED.value, Phase.DRAINING.value):
        reason = _last((entry for entry in written.journal if entry.get("event") == "stop_requested"), "reason")
    ended = phase is None or phase in {end.value for end in TERMINAL}  # a later version may have other phases
    silent, held_by = written.silent_s, written.holder
    if held_by is not None and held_by.alive is not None:
        died = not held_by.alive
    else:
        died = silent is not None and not ended and silent > _patience(phase, written.metrics)
    return {
        "phase": phase,
        "reason": reason,
        "silent_s": silent,
        "seems_dead": died and not ended,
        "holder": None if held_by is None else attrs.asdict(held_by),
    }


def _patience(phase: str, metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return how many seconds of silence are nothing unusual in a phase."""
    steps = [line["step"] for line in metrics if "loss" in line][-2:]
    seconds = _last(metrics, "seconds")
    if phase != Phase.TRAINING.value or seconds is None:
        return _QUIET_S
    steps_per_line = steps[-1] - steps[0] if len(steps) > 1 else 1
    return _QUIET_TRAINING_S + _QUIET_STEPS * float(seconds) * max(1, steps_per_line)


def _target(run_dir: Path, found: Sequence[CommittedCheckpoint | DamagedCheckpoint]) -> int | None:
    """Return the step the run goes to, as far as its config or its newest checkpoint can be read."""
    try:
        if (run_dir / _RUN_CONFIG).is_file():
            return load_config(run_dir / _RUN_CONFIG, check_inputs=False).train.steps
    except ConfigError:
        pass
    whole = [checkpoint for checkpoint in found if isinstance(checkpoint, CommittedCheckpoint)]
    steps = whole[-1].manifest.config.get("train.steps") if whole else None
    return steps if isinstance(steps, int) else None


def _checkpoint(checkpoint: CommittedCheckpoint | DamagedCheckpoint) -> dict[str, Any]:
    report: dict[str, Any] = {"name": checkpoint.path.name, "step": checkpoint.step}
    if isinstance(checkpoint, DamagedCheckpoint):
        known = {"age_s": None, "num_bytes": None, "metrics": None}
        return {**report, **known, "health": "damaged", "problems": list(checkpoint.problems)}
    manifest = checkpoint.manifest
    age = datetime.now(UTC) - datetime.fromisoformat(manifest.created)
    return {
        **report,
        "age_s": max(0.0, age.total_seconds()),
        "num_bytes": stored_bytes(manifest),
        "metrics": dict(manifest.metrics),
        "health": "whole",
        "problems": [],
    }


def _processes(written: _Written) -> int:
    """Return over how many processes the run was last started."""
    return int(_last((entry for entry in written.journal if entry.get("event") == "plan"), "world_size") or 1)


def _next_start(run_dir: Path, num_processes: int) -> dict[str, Any]:
    """Return what `ckptrain resume` would do now, or why it would not."""
    report: dict[str, Any] = {"num_processes": num_processes, "plan": None, "error": None}
    try:
        config = api.config_of_run(run_dir)
        if locate_base(config.model).path is None:
            raise ConfigError(  # a status is not to download a model
                f"the base model {config.model.pretrained} is not on this machine",
                ["`ckptrain plan` downloads it and tells what the next start would do"],
            )
        _, start = api.plan(config, run_dir=run_dir, world_size=num_processes)
    except CkptrainError as error:
        return {**report, "error": failure_of(error).report()["error"]}
    return {**report, "plan": all_as_given(start.plan.to_dict())}


def _show(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [("run", report["run_dir"]), *_phase_rows(report), ("step", _step_text(report))]
    losses = [f"{name} {report[name]:.4f}" for name in ("loss", "val_loss") if report[name] is not None]
    if losses:
        rows.append(("last", ", ".join(losses)))
    rows += _checkpoint_rows(report)
    if report["quarantined"]:
        rows.append(("quarantine", ", ".join(report["quarantined"])))
    console.print(facts(rows))
    console.print()
    console.print(facts(_next_rows(report)))


def _phase_rows(report: Mapping[str, Any]) -> list[Row]:
    phase, silent = report["phase"], report["silent_s"]
    if phase is None:
        return [("phase", "not started")]
    ago = f", last written {duration_text(silent)} ago" if silent is not None else ""
    if report["seems_dead"]:
        return [("phase", Text(f"{phase}{ago}: {_death_text(report['holder'])}", style="red"))]
    style = {"FAILED": "red", "STOPPED": "yellow", "FINISHED": "green"}.get(phase, "cyan")
    rows: list[Row] = [("phase", Text.assemble((phase, style), ago))]
    if report["reason"] is not None:
        rows.append(("", report["reason"]))
    held_by = report["holder"]
    if held_by is not None and held_by["alive"] is not False:
        rows.append(("held by", f"process {held_by['pid']} on {held_by['host']}, started {held_by['started']}"))
    return rows


def _death_text(held_by: Mapping[str, Any] | None) -> str:
    if held_by is None or held_by["alive"] is None:
        return "the process seems to have died in it"
    return f"process {held_by['pid']} on {held_by['host']}, started {held_by['started']}, died in it"


def _step_text(report: Mapping[str, Any]) -> str:
    return f"{report['step']} of {report['steps']}" if report["steps"] is not None else str(report["step"])


def _checkpoint_rows(report: Mapping[str, Any]) -> list[Row]:
    if not report["checkpoints"]:
        return [("checkpoints", "none yet")]
    rows: list[Row] = []
    for checkpoint in report["checkpoints"]:
        label = "" if rows else "checkpoints"
        if checkpoint["health"] == "damaged":
            rows.append((label, Text.assemble(f"{checkpoint['name']}  ", ("damaged", "bold red"))))
            rows += [("", f"  - {problem}") for problem in checkpoint["problems"]]
            continue
        loss = checkpoint["metrics"].get("val_loss")
        measured = f"  val_loss {loss:.4f}" if loss is not None else ""
        age, size = duration_text(checkpoint["age_s"]), bytes_text(checkpoint["num_bytes"])
        rows.append(
            (label, Text.assemble(f"{checkpoint['name']}  ", ("whole", "green"), f"  {size}, {age} old{measured}"))
        )
    return rows


def _next_rows(report: Mapping[str, Any]) -> list[Row]:
    following = report["next"]
    if following["error"] is not None:
        summary, *_ = following["error"]["message"].split("\n")
        rows = problem_rows(summary, following["error"]["problems"])
    else:
        rows = start_rows(following["plan"])
    return [(f"next {label}" if label in ("start", "refused") else label, text) for label, text in rows]
