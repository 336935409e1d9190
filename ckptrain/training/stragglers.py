"""Does a process keep the others waiting, step after step? A GPU that is throttled, a disk that is slow, a busy host.

Steps differ, with the lengths of their samples; so one counts as slow that has needed more than the others in every one
of several steps.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ckptrain.lifecycle.journal import Journal, NullJournal
from ckptrain.training.observers import Observer

STEPS = 10
"""In each of which a process must have been slow, and after as many in which it was not it is told of again."""
FACTOR = 1.25
"""Times the median of all; with two processes, of the other."""


class Stragglers:
    """Looks at how long each process has computed in a step."""

    def __init__(self, names: Sequence[str], journal: Journal | NullJournal, told: Observer) -> None:
        """Take the processes by name, in the order of what `look` is given."""
        self._names, self._journal, self._told = names, journal, told
        self._slow: Counter[int] = Counter()
        self._fast: Counter[int] = Counter()
        self._is_told: set[int] = set()

    def look(self, step: int, own_s: Sequence[float]) -> None:
        """Look at the seconds of a step, and tell, once, of a process that was slow in so many steps."""
        for place, seconds in enumerate(own_s):
            others = statistics.median([*own_s[:place], *own_s[place + 1 :]])
            is_slow = seconds > FACTOR * others
            self._slow[place] = self._slow[place] + 1 if is_slow else 0
            self._fast[place] = 0 if is_slow else self._fast[place] + 1
            if self._fast[place] >= STEPS:
                self._is_told.discard(place)
            if self._slow[place] >= STEPS and place not in self._is_told:
                self._is_told.add(place)
                self._tell(step, self._names[place], seconds, others)

    def _tell(self, step: int, name: str, seconds: float, others: float) -> None:
        self._journal.record("straggler", step=step, process=name, seconds=round(seconds, 4), others_s=round(others, 4))
        self._told.on_warning(
            f"{name} keeps the others waiting: in each of the last {STEPS} steps it has computed for longer than they"
            f" have, {seconds:.3g} s of step {step} and they {others:.3g} s; look at its GPU's clock and temperature,"
            " at its disk, and at what else its host does"
        )
