"""Runs that hold a directory: processes of their own, on hosts that are pretended, on disks that have no locks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrain.checkpoint import lock, processes
from ckptrain.checkpoint.lock import Claim, Pace, hold
from ckptrain.errors import ClaimLost, SaveFailed, StartRefused

FORK = multiprocessing.get_context("fork")
BEATING = Pace(beat_s=0.02, patience=500)
"""Ten seconds for a beat that comes fifty times a second: a busy machine does not make a live holder look dead."""
SHORT = Pace(beat_s=0.02, patience=5)
"""For holders that are dead, or silent for good."""


def here() -> None:
    """Leave a process on this host."""


def on_host(name: str) -> Callable[[], None]:
    """Return what puts the process that calls it on another host."""

    def move() -> None:
        socket.gethostname = lambda: name
        processes.pid_space = lambda: name

    return move


class Run:
    """A process that holds a directory, or was refused, and does as it is told until it ends."""

    def __init__(self, run_dir: Path, pace: Pace = BEATING, arrange: Callable[[], None] = here) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=self._main, args=(theirs, run_dir, pace, arrange), daemon=True)
        self.process.start()
        theirs.close()
        self.refused: StartRefused | OSError | None = self.pipe.recv()

    @property
    def pid(self) -> int:
        """Return its number."""
        assert self.process.pid is not None
        return self.process.pid

    def check(self) -> Any:
        """Return what its claim's check raises, or None."""
        self.pipe.send("check")
        return self.pipe.recv()

    def fork(self) -> int:
        """Make it fork a child that lives on; returns the child's number."""
        self.pipe.send("fork")
        return self.pipe.recv()

    def end(self) -> None:
        """Let it leave the directory and end."""
        self.pipe.send("end")
        self.process.join()

    def kill(self) -> None:
        """Kill it, and take note of its death."""
        self.process.kill()
        self.process.join()

    @staticmethod
    def _main(pipe: Any, run_dir: Path, pace: Pace, arrange: Callable[[], None]) -> None:
        arrange()
        try:
            with hold(run_dir, pace=pace) as claim:
                pipe.send(None)
                for command in iter(pipe.recv, "end"):
                    pipe.send(_fork_sleeper() if command == "fork" else raised_by(claim))
        except (StartRefused, OSError) as error:
            pipe.send(error)


def _fork_sleeper() -> int:
    if (child := os.fork()) == 0:
        signal.pause()
    return child


def raised_by(claim: Claim) -> Exception | None:
    try:
        claim.check()
    except (ClaimLost, SaveFailed) as error:
        return error
    return None


def start(run_dir: Path, pace: Pace = BEATING) -> list[str]:
    """Hold a directory for a moment; returns what it was told to wait for."""
    told: list[str] = []
    with hold(run_dir, pace=pace, tell=told.append) as claim:
        claim.check()
    return told


def refusal(run_dir: Path, pace: Pace = BEATING) -> tuple[str, list[str]]:
    """Return why a start is refused, and what it waited for before."""
    told: list[str] = []
    with pytest.raises(StartRefused) as caught, hold(run_dir, pace=pace, tell=told.append):
        pass
    return str(caught.value), told


def leave_record(run_dir: Path, **changes: object) -> None:
    """Write the record of a holder that does not beat."""
    fields: dict[str, Any] = {"token": "t" * 32, "pid": 1, "host": "lost", "pid_space": "lost", "born": 1}
    fields |= {"started": "2026-11-30T12:00:00+00:00", "beat_s": SHORT.beat_s, "held_s": 90.0}
    (run_dir / ".lock-1").write_bytes(lock._Record(**(fields | changes)).to_bytes())


def refuse_flock(number: int) -> Callable[..., None]:
    """Return a flock that fails as it does where the file system has none."""

    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock
