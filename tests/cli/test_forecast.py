"""How long a run takes yet, against a clock of the test's own."""

from __future__ import annotations

import pytest

from ckptrain.cli.forecast import Forecast, Left, Rhythm


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def made(forecast: Forecast, clock: Clock, rhythm: Rhythm, steps: range, *, first_s: float = 1.0) -> None:
    """Make steps of a second; a validation takes 10 s, the copy of a save half a second."""
    for step in steps:
        seconds = first_s if step == steps.start else 1.0
        clock.now += seconds
        forecast.add(step, seconds)
        clock.now += 10.0 * rhythm.is_validated(step) + 0.5 * rhythm.is_saved(step)


def took(rhythm: Rhythm, done: int) -> float:
    """Return what the rest of such a run takes."""
    steps = range(done + 1, rhythm.steps + 1)
    pauses = range(done, rhythm.steps + 1)
    return len(steps) + sum(10.0 * rhythm.is_validated(step) + 0.5 * rhythm.is_saved(step) for step in pauses)


@pytest.mark.parametrize("done", [41, 45, 60])
@pytest.mark.parametrize("first", [1, 31])
def test_the_end_is_foretold_with_validations_and_saves(first: int, done: int) -> None:
    """Whether the run began or went on here, and though the first step compiled for a minute."""
    rhythm = Rhythm(steps=100, printed_every=1, saved_every=10, validated_every=20)
    clock = Clock()
    forecast = Forecast(rhythm, clock)
    made(forecast, clock, rhythm, range(first, done + 1), first_s=60.0)
    made(forecast, clock, rhythm, range(done + 1, done + 1))
    clock.now = forecast._ended_s  # as the step ends
    left = forecast.until_end()
    assert left is not None
    assert left.seconds == pytest.approx(took(rhythm, done), rel=0.08)
    assert left.is_whole


def test_a_validation_that_has_not_been_made_yet_is_said_to_be_missing() -> None:
    """No number is made up for it."""
    rhythm = Rhythm(steps=100, printed_every=1, saved_every=10)
    clock = Clock()
    forecast = Forecast(rhythm, clock)
    assert forecast.until_end() is None
    made(forecast, clock, rhythm, range(1, 3))
    assert forecast.until_end() == Left(seconds=pytest.approx(98.0), is_whole=False)
    forecast.validated(10.0)
    assert forecast.until_end() == Left(seconds=pytest.approx(108.0), is_whole=True)
    assert forecast.until(rhythm.next_save(2)) == Left(seconds=pytest.approx(8.0), is_whole=True)


def test_the_time_counts_down_within_a_step_and_waits_for_one_that_is_late() -> None:
    """It never says that a step is done which is not."""
    rhythm = Rhythm(steps=10, printed_every=1, saved_every=100, validates=False)
    clock = Clock()
    forecast = Forecast(rhythm, clock)
    made(forecast, clock, rhythm, range(1, 5))
    found = []
    for _ in range(4):
        left = forecast.until_end()
        assert left is not None
        found.append(left.seconds)
        clock.now += 0.4
    assert found == pytest.approx([6.0, 5.6, 5.2, 5.0])


def test_pauses_are_counted_as_they_come() -> None:
    """By arithmetic, as by walking over the steps."""
    for saved, validated in ((3, 4), (4, 4), (5, None), (1, 6)):
        rhythm = Rhythm(steps=1000, printed_every=1, saved_every=saved, validated_every=validated)
        forecast = Forecast(rhythm)
        for first, end in ((0, 1), (1, 30), (7, 25), (12, 12)):
            walked = {(a, b): 0 for a in (True, False) for b in (True, False)}
            for step in range(first, end):
                if step:
                    walked[rhythm.is_validated(step), rhythm.is_saved(step)] += 1
            counted = forecast._pauses(max(first, 1), max(end, 1))
            assert counted == walked
