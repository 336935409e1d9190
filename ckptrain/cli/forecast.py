"""When will a run end? From what its steps, validations and saves have taken since this start."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import attrs

from ckptrain.config.schema import RunConfig

_RECENT = 30
"""How many steps, and pauses of each kind, the forecast goes by."""


@attrs.frozen(kw_only=True)
class Rhythm:
    """After which steps a run does what."""

    steps: int
    printed_every: int
    saved_every: int
    validated_every: int | None = None
    """None is after the last step only."""
    validates: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Rhythm:
        """Return that of a configuration."""
        data = config.data
        return cls(
            steps=config.train.steps,
            printed_every=config.log.every_steps,
            saved_every=config.checkpoint.every_steps,
            validated_every=config.train.eval_every_steps,
            validates=data.validation is not None or bool(data.split_validation_size),
        )

    def is_printed(self, step: int) -> bool:
        """Tell whether a step gets a line of its own."""
        return step % self.printed_every == 0 or step == self.steps

    def is_saved(self, step: int) -> bool:
        """Tell whether a save begins after a step."""
        return step % self.saved_every == 0 or step == self.steps

    def is_validated(self, step: int) -> bool:
        """Tell whether the validation set is looked at after a step."""
        return self.validates and (
            step == self.steps or (self.validated_every is not None and step % self.validated_every == 0)
        )

    def next_save(self, step: int) -> int:
        """Return after which step the next save begins, once `step` is done."""
        return min(self.steps, (step // self.saved_every + 1) * self.saved_every)


@attrs.frozen(kw_only=True)
class Left:
    """How long something takes from now on."""

    seconds: float
    is_whole: bool
    """False where a validation is still to come and none has been made since this start: it takes longer."""


class Forecast:
    """Learns from each step how long the rest takes; steps of earlier starts and the start itself do not enter.

    Between two steps lies a pause: for a validation, for the copy of a save, for both, or for nothing. Each kind is
    averaged on its own, and the rest of the run has so many of each.
    """

    def __init__(self, rhythm: Rhythm, clock: Callable[[], float] = time.monotonic) -> None:
        self._rhythm, self._clock = rhythm, clock
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._pauses_s: dict[tuple[bool, bool], deque[float]] = {}
        self._validation_s: float | None = None
        self._step: int | None = None
        self._ended_s = 0.0

    def add(self, step: int, seconds: float) -> None:
        """Take a step that has just ended and took so many seconds."""
        now = self._clock()
        if self._step == step - 1:
            pause_s = max(0.0, now - seconds - self._ended_s)
            self._pauses_s.setdefault(self._kind(step - 1), deque(maxlen=_RECENT)).append(pause_s)
        self._step, self._ended_s = step, now
        self._steps_s.append(seconds)

    def validated(self, seconds: float) -> None:
        """Take how long a validation took that came before the first step."""
        self._validation_s = (self._validation_s or 0.0) + seconds

    def until_end(self) -> Left | None:
        """Return how long the run takes, with what follows its last step; None before the first one of this start."""
        left = self.until(self._rhythm.steps)
        if left is None or not self._rhythm.validates:
            return left
        # What the last validation takes, and the save that is waited for, is at least what such pauses took so far.
        known = [pause for kind, pauses in self._pauses_s.items() if kind[0] for pause in pauses]
        last_s = statistics.fmean(known) if known else self._validation_s
        return Left(seconds=left.seconds + (last_s or 0.0), is_whole=left.is_whole and last_s is not None)

    def until(self, target: int) -> Left | None:
        """Return how long it takes until a step has ended; None before the first one of this start has."""
        if self._step is None:
            return None
        total_s, is_whole = self._after(self._step, target)
        # What has passed counts, as long as it is no more than the next step takes: then that one is late.
        next_s, _ = self._after(self._step, min(target, self._step + 1))
        passed_s = min(next_s, self._clock() - self._ended_s)
        return Left(seconds=max(0.0, total_s - passed_s), is_whole=is_whole)

    def _kind(self, step: int) -> tuple[bool, bool]:
        return self._rhythm.is_validated(step), self._rhythm.is_saved(step)

    def _after(self, done: int, target: int) -> tuple[float, bool]:
        """Return what the steps from `done` to `target` take with the pauses before them, and whether all is known."""
        # The first step of a start loads and compiles: the median passes over it.
        total_s = (target - done) * statistics.median(self._steps_s)
        is_whole = True
        for kind, count in self._pauses(done, target).items():
            known = self._pauses_s.get(kind)
            if known:
                total_s += count * statistics.fmean(known)
            elif kind[0] and self._validation_s is not None:
                total_s += count * self._validation_s
            elif count and kind[0]:
                is_whole = False
        return total_s, is_whole

    def _pauses(self, done: int, target: int) -> dict[tuple[bool, bool], int]:
        """Count the pauses of each kind, without walking over a million steps."""
        first, end, rhythm = done, target, self._rhythm  # after the steps first .. end-1
        saved = _multiples(rhythm.saved_every, first, end)
        every = rhythm.validated_every if rhythm.validates else None
        validated = _multiples(every, first, end) if every else 0
        both = _common(every, rhythm.saved_every, first, end) if every else 0
        return {
            (True, True): both,
            (True, False): validated - both,
            (False, True): saved - both,
            (False, False): (end - first) - saved - validated + both,
        }


def _multiples(number: int, first: int, end: int) -> int:
    """Return how many multiples of a number there are among first .. end-1."""
    return (end - 1) // number - (first - 1) // number


def _common(a: int, b: int, first: int, end: int) -> int:
    return _multiples(math.lcm(a, b), first, end)
