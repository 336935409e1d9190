"""Which rows of which splits? `train[:1000]`, `train[10%:20%]`, `train+test`: notation and rounding of `datasets`."""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

from ckptrain.errors import ConfigError

_SLICE = re.compile(r"(?P<split>\w+(?:\.\w+)*)(?:\[(?P<begin>-?[\d_]+%?)?:(?P<end>-?[\d_]+%?)?\])?")


@attrs.frozen(kw_only=True)
class SplitSlice:
    """A split, or the rows of one between two numbers or percentages; a negative one counts from the end."""

    split: str
    begin: int | None = None
    end: int | None = None
    is_percent: bool = False

    def rows(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """Return the first row, and the one behind the last, or None for the split's end.

        `count` tells the rows of the split; it is asked where they matter.
        """
        if not self.is_percent and (self.begin or 0) >= 0 and (self.end is None or self.end >= 0):
            return self.begin or 0, self.end
        total = count()
        first = 0 if self.begin is None else self._row(self.begin, total)
        return first, None if self.end is None else self._row(self.end, total)

    def _row(self, bound: int, total: int) -> int:
        row = round(bound * total / 100) if self.is_percent else bound
        return min(max(row + total, 0) if row < 0 else row, total)


def parse_splits(text: str) -> tuple[SplitSlice, ...]:
    """Read the notation of `datasets`.

    Raises:
        ConfigError: it is not that.
    """
    return tuple(_parse(part, text) for part in re.split(r"\s*\+\s*", text.strip()))


def _parse(part: str, whole: str) -> SplitSlice:
    found = _SLICE.fullmatch(part)
    if found is None:
        raise _refused(whole, f"expected a split, or a slice such as train[:1000] or train[10%:20%]; found {part!r}")
    bounds = [bound for bound in found.group("begin", "end") if bound]
    is_percent = any(bound.endswith("%") for bound in bounds)
    begin, end = (int(bound.removesuffix("%")) if bound else None for bound in found.group("begin", "end"))
    if is_percent and not all(bound.endswith("%") for bound in bounds):
        raise _refused(whole, f"expected two numbers or two percentages, found {part!r}")
    if is_percent and any(abs(bound) > 100 for bound in (begin, end) if bound is not None):
        raise _refused(whole, f"expected at most 100%, found {part!r}")
    return SplitSlice(split=found["split"], begin=begin, end=end, is_percent=is_percent)


def _refused(text: str, problem: str) -> ConfigError:
    return ConfigError(f"cannot use the split {text!r}", [problem])
