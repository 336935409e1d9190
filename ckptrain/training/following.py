"""How do numbers reach a service that may be slow, far away or down, without the training waiting for it?

A thread of its own reads them from RUN/metrics.jsonl, where each step is once, and sends what the service has not got
yet. So a run that goes on after any kind of end sends what was lost with the process, nothing twice, and a service that
was away for an hour gets that hour afterwards, from the disk and not from memory.
"""

from __future__ import annotations

import abc
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import orjson

from ckptrain.errors import CkptrainError
from ckptrain.training.observers import Observer, StepRecord

_MEASURED = frozenset(field.name for field in attrs.fields(StepRecord)) - {"step"}
_VALIDATION = "val_loss"
_END_S = 20.0
"""How long the end of a run waits for a service."""
_QUIET_END_S = 2.0
"""How long it does so before that is told."""
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
"""Between tries, doubled each time."""
_POLL_S = 1.0
"""How long the first of some steps may lie before it is sent."""
_READ_BYTES = 1 << 20


@attrs.frozen(kw_only=True)
class Row:
    """What was measured after one step, under the names that services show."""

    step: int
    values: dict[str, float]
    time_ms: int
    """When it was read, in milliseconds since 1970; the same however often the row is sent."""


class Following(Observer, abc.ABC):
    """A service that is sent the rows of RUN/metrics.jsonl; the first thing to record begins it."""

    def __init__(self, metrics: Path, *, last_step: int, tell: Callable[[str], object]) -> None:
        """Take the file, the step that makes a run finished, and whom to tell where the run is to be seen."""
        self._metrics = metrics
        self._last_step = last_step
        self._tell = tell
        self._thread = threading.Thread(target=self._follow, name=type(self).__name__, daemon=True)
        self._more, self._ending = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._news: str | None = None
        self._sent_step = -1

    def on_step(self, record: StepRecord) -> None:  # noqa: ARG002  read from the file
        self._wake()

    def on_validation(self, step: int, val_loss: float) -> None:  # noqa: ARG002  read from the file
        self._wake()

    def on_end(self) -> None:
        if not self._thread.ident:
            return
        self._ending.set()
        self._more.set()
        self._thread.join(_QUIET_END_S)
        if self._thread.is_alive():
            self._tell(f"waiting until {type(self).__name__} has taken the rest, for at most {_END_S:.0f} s")
            self._thread.join(_END_S)
        if self._thread.is_alive():
            self.abandon()
            self._failure = self._failure or CkptrainError(
                f"it has not taken everything within {_END_S:.0f} s; a start that goes on with the run sends the rest"
            )
        self._pass_on()

    @abc.abstractmethod
    def connect(self) -> str:
        """Open or find the run of the service, and find out which steps it has; returns where it is to be seen."""

    @abc.abstractmethod
    def send(self, row: Row) -> None:
        """Send what the service has not got of a row; may be called again for one that failed."""

    @abc.abstractmethod
    def disconnect(self, *, finished: bool) -> None:
        """Say that this process sends no more; `finished` is whether the run has come to its last step."""

    def abandon(self) -> None:
        """Let go of a service that hangs, so that it does not keep this process from its end."""

    def _wake(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._more.set()
        self._pass_on()

    def _pass_on(self) -> None:
        """Tell in the run's own thread what this one has come to know; a failure is told once, by whoever calls."""
        if self._news is not None:
            news, self._news = self._news, None
            self._tell(news)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _follow(self) -> None:
        if not self._until_it_works(self._connect):
            return
        for row in self._rows():
            if not self._until_it_works(functools.partial(self.send, row)):
                return
            self._sent_step = row.step
        self._until_it_works(lambda: self.disconnect(finished=self._sent_step >= self._last_step))

    def _connect(self) -> None:
        self._news = self.connect()

    def _until_it_works(self, act: Callable[[], object]) -> bool:
        """Try again and again; give up where the run ends."""
        pause_s = _PAUSE_S
        while True:
            try:
                act()
            except Exception as error:  # whatever a service's client raises: it is told, and the run goes on
                self._failure = error
                if self._ending.wait(pause_s):
                    return False
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return True

    def _rows(self) -> Iterator[Row]:
        """Yield each step's row when another follows it, or the run ends: a step and its validation are one row."""
        step, values = -1, dict[str, float]()
        for line in self._lines():
            if values and line["step"] != step:
                yield Row(step=step, values=values, time_ms=time.time_ns() // 1_000_000)
                values = {}
            step = line["step"]
            values.update(_named(line))
        if values:
            yield Row(step=step, values=values, time_ms=time.time_ns() // 1_000_000)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the file, waiting for more until the run ends."""
        rest = b""
        with self._metrics.open("rb") as file:
            while True:
                ending = self._ending.is_set()  # before reading: nothing is written after it
                self._more.clear()
                while read := file.read(_READ_BYTES):
                    *lines, rest = (rest + read).split(b"\n")
                    yield from filter(None, map(_parsed, lines))
                if ending:
                    return
                self._more.wait()
                self._ending.wait(_POLL_S)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for one that a full disk cut short."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _named(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names that services show."""
    numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
    named = {f"train/{name}": value for name, value in numbers.items() if name in _MEASURED}
    return named | ({"val/loss": numbers[_VALIDATION]} if _VALIDATION in numbers else {})
