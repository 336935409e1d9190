"""The rule of what is kept: in words, and over all runs that hypothesis can think of."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import Manifest
from ckptrain.checkpoint.retention import Retention, judge
from ckptrain.checkpoint.store import checkpoint_name
from ckptrain.config.schema import CheckpointConfig

Losses = dict[int, float | None]


def checkpoints(manifest: Manifest, losses: Losses, metric: str = "val_loss") -> list[CommittedCheckpoint]:
    """Return checkpoints of these steps and losses; None has none."""
    return [
        CommittedCheckpoint(
            path=Path("run/checkpoints") / checkpoint_name(step),
            manifest=attrs.evolve(manifest, step=step, metrics={} if loss is None else {metric: loss}),
        )
        for step, loss in losses.items()
    ]


def reasons(found: list[CommittedCheckpoint], retention: Retention, *in_use: int) -> dict[int, tuple[str, ...]]:
    """Return why each step is kept."""
    paths = [Path("elsewhere") / checkpoint_name(step) for step in in_use]
    return {verdict.checkpoint.step: verdict.reasons for verdict in judge(found, retention, paths)}


def kept(found: list[CommittedCheckpoint], retention: Retention, *in_use: int) -> set[int]:
    """Return the steps that are kept."""
    return {step for step, why in reasons(found, retention, *in_use).items() if why}


def test_every_reason_is_told(manifest: Manifest) -> None:
    """In the words that `ckptrain prune` prints, whatever the order they are given in."""
    losses = {700: 0.9, 100: 0.8, 200: 0.5, 300: 0.7, 400: 0.4, 500: None, 600: 0.9, 250: 0.95}
    retention = Retention(keep_last=2, keep_every=300, keep_best=2)
    assert reasons(checkpoints(manifest, losses), retention, 100) == {
        100: ("in use",),
        200: ("one of the best 2 by val_loss",),
        250: (),
        300: ("every 300th step",),
        400: ("best val_loss",),
        500: (),
        600: ("one of the last 2", "every 300th step"),
        700: ("newest",),
    }


@pytest.mark.parametrize(
    ("every", "words"),
    [(1, "every step"), (2, "every 2nd step"), (3, "every 3rd step"), (11, "every 11th step"), (12, "every 12th step"),
     (21, "every 21st step"), (100, "every 100th step"), (111, "every 111th step")],
)  # fmt: skip
def test_a_multiple_is_told_as_people_say_it(manifest: Manifest, every: int, words: str) -> None:
    """An ordinal number, with its exceptions."""
    found = checkpoints(manifest, {every * 2: None, every * 3: None})
    assert reasons(found, Retention(keep_last=1, keep_every=every))[every * 2] == (words,)


def test_of_two_equally_good_checkpoints_the_newer_is_kept(manifest: Manifest) -> None:
    """It has seen more."""
    found = checkpoints(manifest, {100: 1.0, 200: 1.0, 300: 2.0})
    assert kept(found, Retention(keep_last=1, keep_best=1)) == {200, 300}


def test_the_best_go_by_the_metric_that_is_asked_for(manifest: Manifest) -> None:
    """A checkpoint without it is never the best."""
    found = [
        *checkpoints(manifest, {100: 0.1}, "val_loss"),
        *checkpoints(manifest, {200: 0.5, 300: 0.6, 400: 0.7}, "loss"),
    ]
    assert kept(found, Retention(keep_last=1, keep_best=1, metric="loss")) == {200, 400}


def test_a_configuration_is_taken_over_whole() -> None:
    """Every key of the section that is about keeping has its place."""
    options = CheckpointConfig(keep_last=2, keep_every=50, keep_best=4, metric="loss")
    assert Retention.of(options) == Retention(keep_last=2, keep_every=50, keep_best=4, metric="loss")


@pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_every": 0}, {"keep_best": -1}], ids=str)
def test_a_rule_that_makes_no_sense_cannot_be_made(bad: dict[str, int]) -> None:
    """Keeping nothing, least of all."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        Retention(**{"keep_last": 1, **bad})


RUNS = st.dictionaries(
    st.integers(1, 60), st.none() | st.sampled_from([0.5, 1.0, 1.5]) | st.floats(0, 10), min_size=1, max_size=12
)
RULES = st.builds(
    Retention,
    keep_last=st.integers(1, 15),
    keep_every=st.none() | st.integers(1, 70),
    keep_best=st.integers(0, 15),
    metric=st.sampled_from(["val_loss", "loss"]),
)
quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(losses=RUNS, retention=RULES)
def test_the_newest_is_never_removed_and_so_never_the_only_one(
    manifest: Manifest, losses: Losses, retention: Retention
) -> None:
    """Whatever the rule, something to go on from is left."""
    assert max(losses) in kept(checkpoints(manifest, losses), retention)


@quick
@given(losses=RUNS, retention=RULES)
def test_pruning_twice_is_pruning_once(manifest: Manifest, losses: Losses, retention: Retention) -> None:
    """What was kept is kept again, for the same reasons."""
    found = checkpoints(manifest, losses)
    left = [verdict.checkpoint for verdict in judge(found, retention) if verdict.kept]
    assert [verdict for verdict in judge(found, retention) if verdict.kept] == judge(left, retention)


@quick
@given(losses=RUNS, retention=RULES, more=st.integers(0, 5), data=st.data())
def test_asking_for_more_never_keeps_less(
    manifest: Manifest, losses: Losses, retention: Retention, more: int, data: Any
) -> None:
    """More of the last, more of the best, finer multiples, more in use."""
    found = checkpoints(manifest, losses)
    before = kept(found, retention)
    assert before <= kept(found, attrs.evolve(retention, keep_last=retention.keep_last + more))
    assert before <= kept(found, attrs.evolve(retention, keep_best=retention.keep_best + more))
    if retention.keep_every is not None:
        divisors = [n for n in range(1, retention.keep_every + 1) if retention.keep_every % n == 0]
        finer = data.draw(st.sampled_from(divisors))
        assert before <= kept(found, attrs.evolve(retention, keep_every=finer))
    used = data.draw(st.sets(st.sampled_from(sorted(losses))))
    assert kept(found, retention, *used) == before | used


@quick
@given(losses=RUNS, retention=RULES)
def test_what_is_kept_is_the_union_of_what_is_asked_for(
    manifest: Manifest, losses: Losses, retention: Retention
) -> None:
    """Computed here in another way, from the steps alone."""
    metric_is_there = retention.metric == "val_loss"
    ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None and metric_is_there)
    expected = set(sorted(losses)[-retention.keep_last :]) | {-step for _, step in ranked[: retention.keep_best]}
    if retention.keep_every is not None:
        expected |= {step for step in losses if step % retention.keep_every == 0}
    assert kept(checkpoints(manifest, losses), retention) == expected
