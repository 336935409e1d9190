"""How long does a run take from the command to its first step, and with what?

Every moment since the beginning belongs to one part, so the parts add up to what a person has waited. Nothing here
imports torch: importing it is one of the parts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import ckptrain
from ckptrain.lifecycle.journal import Journal
from ckptrain.training.observers import Observer

LAUNCH, IMPORTS, FIRST_STEP = "launch", "imports", "first step"
_SHOWN_S = 0.05
_NEXT_STEPS = 3
_SLOW_FIRST = 1.5
"""How many times a step the first one takes before a person is told."""


class StartClock:
    """Seconds by part of a start, in their order."""

    def __init__(self, began_s: float | None = None) -> None:
        """Begin now, or at a time of `time.monotonic` that is past."""
        self.began_s = time.monotonic() if began_s is None else began_s
        self._marked_s = self.began_s
        self.owns_process = False
        """Whether this process was started for the run alone."""
        self.seconds: dict[str, float] = {}

    @classmethod
    def of_command(cls) -> StartClock:
        """Return the clock of the command that this process was started for.

        It begins with the process, and where torch's agent started that, with the agent: then the first part is LAUNCH.
        """
        own_s = process_began_s(os.getpid())
        if own_s is None:
            own_s = ckptrain.IMPORTED_S
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        agent_s = None if "TORCHELASTIC_RUN_ID" not in os.environ or restarted else process_began_s(os.getppid())
        clock = cls(own_s if agent_s is None else min(agent_s, own_s))
        clock.owns_process = True
        if agent_s is not None:
            clock.mark(LAUNCH, at_s=own_s)
        return clock

    def mark(self, part: str, at_s: float | None = None) -> None:
        """Say what the time since the last mark went into; a part may be marked more than once."""
        now_s = time.monotonic() if at_s is None else at_s
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._marked_s
        self._marked_s = now_s

    @property
    def total_s(self) -> float:
        """The parts' sum."""
        return sum(self.seconds.values())

    def describe(self) -> str:
        """Say it in one line, the longest part first."""
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= _SHOWN_S)
        return f"first step after {self.total_s:.1f} s: {told}"


def process_began_s(pid: int) -> float | None:
    """Return when a process on this machine began, as `time.monotonic` counts; None where the kernel does not tell.

    proc_pid_stat(5): field 22 is the start time after boot, in clock ticks.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return time.monotonic() - age_s if age_s >= 0 else None


@contextlib.contextmanager
def without_collection(*, for_good: bool) -> Iterator[None]:
    """Import without looking for garbage, a fifth of the time: modules make a million objects, and keep them.

    With `for_good` what is there at the end is never looked at again; that is for a process which does nothing else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_enabled:
            gc.enable()


class StartReport:
    """Tells what the start took when the first step is made, and how much of that step was once only a little later."""

    def __init__(self, clock: StartClock, journal: Journal, told: Observer) -> None:
        self._clock, self._journal, self._told = clock, journal, told
        self._steps_s: list[float] = []

    def add(self, seconds: float) -> None:
        """Take the seconds of a step that has just been made."""
        if len(self._steps_s) > _NEXT_STEPS:
            return
        self._steps_s.append(seconds)
        if len(self._steps_s) == 1:
            self._tell_parts()
        elif len(self._steps_s) > _NEXT_STEPS:
            self._tell_first_step()

    def _tell_parts(self) -> None:
        self._clock.mark(FIRST_STEP)
        seconds = {part: round(seconds, 3) for part, seconds in self._clock.seconds.items()}
        self._journal.record("startup", seconds=seconds, total_s=round(self._clock.total_s, 3))
        self._told.on_progress(self._clock.describe())

    def _tell_first_step(self) -> None:
        first_s, *following = self._steps_s
        next_s = statistics.median(following)
        self._journal.record("first_step", seconds=round(first_s, 4), median_of_next_s=round(next_s, 4))
        if first_s > _SLOW_FIRST * next_s:
            self._told.on_progress(
                f"the first step took {first_s:.2f} s, those after it {next_s:.2f} s: kernels were loaded and compiled"
            )
