"""How did a run end? The answer as an object for programs, and as RUN/result.json for the next stage of a pipeline."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson

from ckptrain.checkpoint.lock import holder
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.retention import Retention, judge
from ckptrain.checkpoint.working_copy import all_as_given
from ckptrain.config.schema import CheckpointConfig
from ckptrain.errors import EXIT_DONE, EXIT_STOPPED_EARLY, CkptrainError
from ckptrain.lifecycle.start_plan import StartPlan
from ckptrain.training.observers import SampleAnswer

RESULT = "result.json"


@attrs.frozen(kw_only=True)
class RunResult:
    """How a run ended, or where it has paused."""

    status: Literal["finished", "stopped", "already_done", "paused"]
    """`paused` is what `run_until` gives before the last step: the run is open, and nothing need be saved yet."""
    run_dir: Path
    plan: StartPlan
    step: int
    """Optimizer steps done, those of earlier starts included."""
    checkpoint: Path | None
    loss: float | None
    """Of the last step; None where none was made."""
    val_loss_before: float | None
    """When this start began; None on a resume or without a validation set."""
    val_loss_after: float | None
    samples: tuple[SampleAnswer, ...]
    stop_reason: str | None

    @property
    def exit_status(self) -> int:
        """Return the command line's exit status for this end."""
        return EXIT_STOPPED_EARLY if self.status in ("stopped", "paused") else EXIT_DONE


def write_result(result: RunResult, options: CheckpointConfig, export: Path | None = None) -> None:
    """Write RUN/result.json, whole or not at all.

    A start that finds its work done leaves the file of the start that did it, which says more; where that is lost, the
    losses are those of the checkpoint.
    """
    if result.status == "already_done":
        found = _read(result.run_dir)
        if found.get("exit_status") == EXIT_DONE and found.get("step") == result.step and export is None:
            return
    kept = store_of(result.run_dir).committed()
    last = max(kept, key=lambda checkpoint: checkpoint.step, default=None)
    metrics = last.manifest.metrics if last is not None and last.step == result.step else {}
    retention = attrs.evolve(Retention.of(options), keep_best=1)
    best = next(
        (verdict.checkpoint for verdict in judge(kept, retention) if f"best {options.metric}" in verdict.reasons), None
    )
    _write(
        result.run_dir,
        {
            "status": result.status,
            "exit_status": result.exit_status,
            "plan": result.plan.kind,
            "step": result.step,
            "loss": result.loss if result.loss is not None else metrics.get("loss"),
            "val_loss": result.val_loss_after if result.val_loss_after is not None else metrics.get("val_loss"),
            "last_checkpoint": None if last is None else str(last.path),
            "best_checkpoint": None if best is None else str(best.path),
            "best_metric": options.metric,
            "export": None if export is None else str(export),
            "stop_reason": result.stop_reason,
            "error": None,
        },
    )


@contextlib.contextmanager
def refusals_told(run_dir: Path, *, is_ours: bool = False) -> Iterator[None]:
    """Write RUN/result.json where the block is refused, which decides a start; the error goes on.

    Left alone are a directory that is not there, one that another run may hold, which will write its own, and the file
    of a run that has finished: what it did is done, whatever a later start was asked for. `is_ours` says that this
    process holds the directory.
    """
    try:
        yield
    except CkptrainError as error:
        if os.environ.get("RANK", "0") == "0" and run_dir.is_dir() and (is_ours or _is_free(run_dir)):
            with contextlib.suppress(OSError, CkptrainError):
                if _read(run_dir).get("exit_status") != EXIT_DONE:
                    write_failure(run_dir, None, None, error)
        raise


def _is_free(run_dir: Path) -> bool:
    found = holder(run_dir)
    return found is None or found.alive is False


def write_failure(run_dir: Path, step: int | None, plan: str | None, error: BaseException) -> None:
    """Write RUN/result.json for a run that failed; a disk that cannot take it leaves the error as it was."""
    kept = store_of(run_dir).committed()
    _write(
        run_dir,
        {
            "status": "failed",
            "exit_status": error.exit_status if isinstance(error, CkptrainError) else 1,
            "plan": plan,
            "step": step,
            "loss": None,
            "val_loss": None,
            "last_checkpoint": str(kept[-1].path) if kept else None,
            "best_checkpoint": None,
            "best_metric": None,
            "export": None,
            "stop_reason": None,
            "error": f"{type(error).__name__}: {error}",
        },
    )


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = orjson.loads((run_dir / RESULT).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(run_dir: Path, content: dict[str, Any]) -> None:
    replacement = run_dir / f".{RESULT}.new"
    with replacement.open("wb") as file:
        file.write(orjson.dumps(all_as_given(content), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(run_dir / RESULT)
