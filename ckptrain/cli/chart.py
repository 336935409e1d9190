"""A curve drawn with characters: on one row, or on several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_MOST_POINTS = 2048
_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#%"


class Curve:
    """A long row of numbers in bounded memory: when there are too many, each two become their mean."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each = 1
        self._waiting: list[float] = []

    def add(self, value: float) -> None:
        """Take the next number; those that are not finite cannot be drawn."""
        if not math.isfinite(value):
            return
        self._waiting.append(value)
        if len(self._waiting) < self._each:
            return
        self.values.append(sum(self._waiting) / len(self._waiting))
        self._waiting = []
        if len(self.values) >= _MOST_POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2

    def columns(self, width: int) -> list[float]:
        """Return at most so many numbers, each the mean of as many of the curve as fall into its column."""
        values = self.values
        if len(values) <= width:
            return list(values)
        edges = [round(number * len(values) / width) for number in range(width + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def chart_lines(values: Sequence[float], rows: int, *, is_ascii: bool) -> list[str]:
    """Draw numbers as columns of so many rows, from the least to the largest; a single row is a sparkline."""
    if not values:
        return [""] * rows
    signs = _ASCII if is_ascii else _BLOCKS
    low, high = min(values), max(values)
    steps = rows * (len(signs) - 1)
    # The least is one eighth high: a column that is empty looks like a missing one.
    heights = [1 + round((value - low) / (high - low) * (steps - 1)) if high > low else steps // 2 for value in values]
    full = len(signs) - 1
    return [
        "".join(signs[min(full, max(0, height - row * full))] for height in heights) for row in reversed(range(rows))
    ]
