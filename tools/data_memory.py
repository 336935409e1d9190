"""How much memory do this process's children have, all of them together, and when?

What several processes share is counted once (PSS: each has its part of it). What is mapped from files, such as
libraries and caches of tokens, is told apart: the system takes it away where memory is short. On Linux only; elsewhere
nothing is known.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs

_PROC = Path("/proc")
_INTERVAL_S = 0.5  # a look takes some ten milliseconds


@attrs.frozen(kw_only=True)
class Moment:
    """What the children had at a time of `time.monotonic`."""

    at: float
    total_bytes: int
    private_bytes: int
    """Without what is mapped from files."""
    num_processes: int


class MemoryOfChildren:
    """Looks at the children, and their children, several times a second while it is open."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def peak(self, until: float) -> Moment | None:
        """Return the moment of the most private memory up to a time; None where nothing is known."""
        seen = [moment for moment in self._moments if moment.at <= until]
        return max(seen, key=lambda moment: moment.private_bytes, default=None)

    def _watch(self) -> None:
        while _PROC.is_dir() and not self._stopped.wait(_INTERVAL_S):
            self._moments.append(_look())


def peak_of_process() -> int | None:
    """Return the most memory that this process has had since its program began, files included (VmHWM)."""
    status = _PROC / "self/status"
    if not status.exists():
        return None
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _look() -> Moment:
    at, total, private, count = time.monotonic(), 0, 0, 0
    for pid in _descendants(os.getpid()):
        try:
            lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total += sizes.get("Pss", 0)
        private += sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
        count += 1
    return Moment(at=at, total_bytes=total, private_bytes=private, num_processes=count)


def _descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        below = _children(waiting.pop())
        found += below
        waiting += below
    return found


def _children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    try:
        listed = [task.read_text() for task in (_PROC / str(pid) / "task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for child in " ".join(listed).split()]
