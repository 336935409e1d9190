"""What was measured, step by step, and by which start? From metrics.jsonl, and what lost stretches wrote before it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ckptrain.cli.report.story import Start, number_of, time_of

Row = Mapping[str, Any]
Point = tuple[float, float]


@attrs.frozen(kw_only=True)
class Stretch:
    """Steps whose work was lost, because the start after it went on from an earlier step."""

    resumed_from: int
    lost_to: int
    """The number of the start that made them again."""
    rows: tuple[Row, ...]


@attrs.frozen(kw_only=True)
class Measured:
    """The lines of one run."""

    kept: tuple[Row, ...]
    """What counts: each step once."""
    lost: tuple[Stretch, ...]
    made: Mapping[int, Mapping[int, Row]]
    """By start, the steps that it made, whatever became of them."""

    def points(self, key: str) -> list[Point]:
        """Return (step, value) of what counts."""
        return points_of(self.kept, key)


def read_measured(metrics: Sequence[Row], lost: Sequence[Row], starts: Sequence[Start]) -> Measured:
    """Sort out the lines of metrics.jsonl and metrics.lost.jsonl; what is no line of a step is passed over."""
    groups: dict[int, list[Row]] = {}
    for row in _with_step(lost):
        if isinstance(row.get("stretch"), int):
            groups.setdefault(row["stretch"], []).append(row)
    kept = tuple(sorted(_with_step(metrics), key=lambda row: row["step"]))
    stretches = tuple(
        Stretch(
            resumed_from=int(number_of(rows[0].get("resumed_from")) or 0),
            lost_to=_loser(rows[0], starts),
            rows=tuple(rows),
        )
        for _, rows in sorted(groups.items())
    )
    return Measured(kept=kept, lost=stretches, made=_made(kept, stretches, starts))


def points_of(rows: Iterable[Row], key: str) -> list[Point]:
    """Return (step, value) where a value was measured and is a finite number."""
    values = ((row["step"], number_of(row.get(key))) for row in rows)
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def thinned(points: Sequence[Point], buckets: int) -> list[Point]:
    """Return at most four points of each of so many buckets: first, lowest, highest, last. So no spike is lost."""
    if len(points) <= 4 * buckets:
        return list(points)
    kept: list[Point] = []
    for bucket in range(buckets):
        inside = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        lowest, highest = min(inside, key=lambda i: points[i][1]), max(inside, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({inside[0], lowest, highest, inside[-1]})]
    return kept


def smoothed(points: Sequence[Point], over: int) -> list[Point]:
    """Return the mean of the last `over` points at each."""
    found: list[Point] = []
    total = 0.0
    for index, (step, value) in enumerate(points):
        total += value - (points[index - over][1] if index >= over else 0.0)
        found.append((step, total / min(index + 1, over)))
    return found


def _with_step(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if isinstance(row.get("step"), int) and not isinstance(row["step"], bool)]


def _steps(rows: Iterable[Row]) -> list[Row]:
    """Return the lines of steps: those of validations are of the same step again."""
    return [row for row in rows if "loss" in row]


def _made(kept: Sequence[Row], lost: Sequence[Stretch], starts: Sequence[Start]) -> dict[int, dict[int, Row]]:
    made: dict[int, dict[int, Row]] = {start.number: {} for start in starts}
    _add_made(made, kept, starts)
    for stretch in lost:
        _add_made(made, stretch.rows, [start for start in starts if start.number < stretch.lost_to])
    return {number: dict(sorted(rows.items())) for number, rows in made.items()}


def _add_made(made: dict[int, dict[int, Row]], rows: Iterable[Row], starts: Iterable[Start]) -> None:
    """Give each step to the last start that began before it, since each makes all that follow its own beginning."""
    last: list[Start] = []
    for start in starts:
        if start.trains:
            while last and last[-1].step >= start.step:
                last.pop()
            last.append(start)
    for row in _steps(rows):
        index = bisect.bisect_left(last, row["step"], key=lambda start: start.step)
        if index:
            made[last[index - 1].number][row["step"]] = row


def _loser(row: Row, starts: Sequence[Start]) -> int:
    """Return the start that set a stretch aside: the last one whose plan is older than that."""
    lost_at = time_of({"time": row.get("lost_at")})
    began = ((start.number, time_of({"time": start.began})) for start in starts if start.trains)
    before = [number for number, time in began if lost_at is not None and time is not None and time <= lost_at]
    return before[-1] if before else len(starts)
