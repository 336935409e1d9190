"""What was measured, step by step, and by which start? From metrics.jsonl, and what lost stretches wrote before it."""

from __future__ import annotations

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

    def points(self, key: str) -> list[Point]:
        """Return (step, value) of what counts."""
        return points_of(self.kept, key)

    def made_by(self, number: int, starts: Sequence[Start]) -> dict[int, Row]:
        """Return the steps that one start made, whatever became of them."""
        made = {row["step"]: row for row in _steps(self.kept) if _maker(row["step"], starts) == number}
        for stretch in self.lost:
            earlier = [start for start in starts if start.number < stretch.lost_to]
            made |= {row["step"]: row for row in _steps(stretch.rows) if _maker(row["step"], earlier) == number}
        return dict(sorted(made.items()))


def read_measured(metrics: Sequence[Row], lost: Sequence[Row], starts: Sequence[Start]) -> Measured:
    """Sort out the lines of metrics.jsonl and metrics.lost.jsonl; what is no line of a step is passed over."""
    groups: dict[int, list[Row]] = {}
    for row in _with_step(lost):
        if isinstance(row.get("stretch"), int):
            groups.setdefault(row["stretch"], []).append(row)
    return Measured(
        kept=tuple(sorted(_with_step(metrics), key=lambda row: row["step"])),
        lost=tuple(
            Stretch(
                resumed_from=int(number_of(rows[0].get("resumed_from")) or 0),
                lost_to=_loser(rows[0], starts),
                rows=tuple(rows),
            )
            for _, rows in sorted(groups.items())
        ),
    )


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


def _maker(step: int, starts: Sequence[Start]) -> int:
    """Return which start made a step: the last one that began before it, since each makes all that follow its own."""
    return next((start.number for start in reversed(starts) if start.trains and start.step < step), 0)


def _loser(row: Row, starts: Sequence[Start]) -> int:
    """Return the start that set a stretch aside: the last one whose plan is older than that."""
    lost_at = time_of({"time": row.get("lost_at")})
    began = ((start.number, time_of({"time": start.began})) for start in starts if start.trains)
    before = [number for number, time in began if lost_at is not None and time is not None and time <= lost_at]
    return before[-1] if before else len(starts)
