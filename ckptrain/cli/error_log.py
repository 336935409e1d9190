"""Where does the traceback of a fault go? Into a file, of each process its own, whose path is what the screen shows.

Of a run it lies in its directory; of other commands where the user's programs keep their state.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

_run_dir: ContextVar[Path | None] = ContextVar("run_dir", default=None)
_journal_before: ContextVar[int | None] = ContextVar("journal_before", default=None)


def keep_logs_in(run_dir: Path | None) -> None:
    """Say which run the command is about, once that is known and before it begins; None for none."""
    _run_dir.set(run_dir)
    _journal_before.set(None if run_dir is None else _changed_ns(_journal(run_dir)))


def journal_of_run() -> Path | None:
    """Return the journal of the run that the command is about, where the command has written to it."""
    run_dir = _run_dir.get()
    if run_dir is None or _changed_ns(_journal(run_dir)) == _journal_before.get():
        return None
    return _journal(run_dir)


def write_trace(trace: str, environment: Mapping[str, str]) -> Path | None:
    """Add a traceback to the log; returns its path, or None where it can be written nowhere."""
    rank = environment.get("RANK", "0")
    name = "error.log" if rank == "0" else f"error.rank{rank}.log"
    text = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {rank}, process {os.getpid()}\n{trace}\n"
    for directory in _directories(environment):
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / name).open("a") as file:
                file.write(text)
            return directory / name
    return None


def _journal(run_dir: Path) -> Path:
    from ckptrain.checkpoint.store import JOURNAL  # late, as `--help` needs none of it

    return run_dir / JOURNAL


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _directories(environment: Mapping[str, str]) -> Iterator[Path]:
    run_dir = _run_dir.get()
    if run_dir is not None and run_dir.is_dir():
        yield run_dir
    if state := environment.get("XDG_STATE_HOME"):
        yield Path(state) / "ckptrain"
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".local/state/ckptrain"
    yield Path(tempfile.gettempdir()) / f"ckptrain-{os.getuid()}"
