"""Processes that a test may kill, and what is left of others."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptrain.errors import CkptrainError

FORK = multiprocessing.get_context("fork")
HANGS_S = 120.0
"""After so many seconds a process is taken to hang."""


class Child:
    """A process of its own, which another may kill: a fork of this one, so that nothing is imported again."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._out, inlet = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._go, args=(act, inlet), daemon=True)
        self.process.start()
        inlet.close()

    @staticmethod
    def _go(act: Callable[[], Any], inlet: Any) -> None:
        faulthandler.dump_traceback_later(HANGS_S - 10)  # to stderr: where it hangs
        try:
            inlet.send(act())
        except CkptrainError as error:
            inlet.send(error)

    def result(self) -> Any:
        """Return what it returned, or the error that it raised; it is killed where it hangs."""
        try:
            assert self._out.poll(HANGS_S), "it hangs"
            return self._out.recv()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def runs(pid: int) -> bool:
    """Tell whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
