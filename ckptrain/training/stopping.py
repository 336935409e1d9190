"""When should a run stop before its last step? Signals, time limits, a stop file; all ranks agree on the step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ckptrain.checkpoint.ranks import gather_to_all

STOP_FILE = "stop"
_BY_SIGNAL = "signal"
SLURM_END_TIME = "SLURM_JOB_END_TIME"
"""When Slurm will end the job, in seconds since the epoch: https://slurm.schedmd.com/sbatch.html (output variables)."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A scheduler may signal the launcher and its processes at once, so that one request arrives here twice.
_SAME_REQUEST_S = 1.0
# What a scheduler's end leaves for a save, besides what saves and steps have taken so far: clocks and disks differ.
_SLURM_MARGIN_S = 60.0


class StopRequests:
    """Asked between steps whether to stop; while entered, the first signal is a request and a later one ends at once.

    Signal handlers can be set in the main thread only; in another, a run is stopped by the file or the time limit.
    """

    def __init__(self, run_dir: Path, max_minutes: float | None) -> None:
        self._stop_file = run_dir / STOP_FILE
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._end_of_job = _end_of_job(os.environ)
        self._signal: str | None = None
        self._signalled_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        except ValueError:
            self._restore_handlers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled_at = signal.Signals(number).name, now
        elif now - self._signalled_at > _SAME_REQUEST_S:
            self._restore_handlers()
            os.kill(os.getpid(), number)

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def reason(self, needed_s: float = 0.0) -> str | None:
        """Return why to stop now, or None; collective: the first rank that has a reason decides for all.

        `needed_s` is how long another step and a save may take, which must fit in before a scheduler ends the job. It
        is 0 as long as this start has made no step: a job too short for one would be requeued for ever without it.
        """
        return next((reason for reason in gather_to_all(self._own_reason(needed_s)) if reason is not None), None)

    def forget(self) -> None:
        """Take the stop file away, so that the next start does not stop at once; for rank 0."""
        self._stop_file.unlink(missing_ok=True)

    def _own_reason(self, needed_s: float) -> str | None:
        if self._signal is not None:
            return f"{_BY_SIGNAL} {self._signal}"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "train.max_minutes is over"
        if self._end_of_job is not None and needed_s > 0:
            left = self._end_of_job - time.time()
            if left < needed_s + _SLURM_MARGIN_S:
                return f"Slurm ends the job in {left:.0f} s ({SLURM_END_TIME})"
        if self._stop_file.exists():
            return f"the file {self._stop_file} asks for it"
        return None


def is_signal(reason: str | None) -> bool:
    """Tell whether a reason to stop is a signal: of a scheduler, or a launcher that starts the processes anew."""
    return reason is not None and reason.split()[0] == _BY_SIGNAL


def _end_of_job(environment: Mapping[str, str]) -> float | None:
    """Return when Slurm ends the job, in seconds since the epoch; None where it does not or is not there."""
    try:
        end = float(environment[SLURM_END_TIME])
    except (KeyError, ValueError):
        return None
    return end if end > 0 else None
