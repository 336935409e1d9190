"""A run that is stopped and resumed sees the samples of the one that was not: each record once in each epoch.

Every combination of where it is stopped, how many data parallel ranks there are before and after, and whether samples
are packed, and of each with how many batches are laid out ahead: real runs, whose model is asked what it was given.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.data_runs import (
    Known,
    RecordedRun,
    assert_once_an_epoch,
    known_records,
    numbered_config,
    run_all,
    run_recorded,
    seen_records,
    tiny_tokenizer,
    write_numbered,
)
from support.restored import StopAfter
from tiny import write_llama

from ckptrain.config.schema import RunConfig

NUMBERS = range(10)
# Ten records are ten rows, or five where they are packed, and a step takes two: packed, steps 3 and 8 straddle epochs.
STEPS = 8
WHOLE_EPOCHS = 10
STOPS = {"in an epoch": 2, "at its end": 5, "in the next": 6}
AHEAD = (0, 1, 4)
DATA_PARALLEL = ((1, 1), (1, 2), (2, 1), (2, 2))
PACKING = ("true", "false")


@attrs.frozen
class Stopped:
    """A run that was asked to stop after a step."""

    ranks: int
    stop: str
    ahead: int
    packing: str

    def __str__(self) -> str:
        """Name it, as a directory is named."""
        packed = "packed" if self.packing == "true" else "unpacked"
        return f"{self.stop}, {self.ahead} ahead, {packed}, DP {self.ranks}"


@attrs.frozen
class Resumed:
    """One that went on from there, on as many ranks as before or on others."""

    before: Stopped
    ranks: int

    def __str__(self) -> str:
        """Name it, as pytest shows it and a directory is named."""
        return f"{self.before} then {self.ranks}"


# Ahead goes in turn: each number meets every stop, every number of ranks, and packed and unpacked rows.
STOPPED = [
    Stopped(1 + ranks, stop, AHEAD[(ranks + when + packed) % len(AHEAD)], packing)
    for ranks in range(2)
    for when, stop in enumerate(STOPS)
    for packed, packing in enumerate(PACKING)
]
RESUMED = [Resumed(was, after) for was in STOPPED for before, after in DATA_PARALLEL if was.ranks == before]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama of one small layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return write_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=1, **sizes)


@pytest.fixture(scope="module")
def known(base: Path) -> Known:
    """Return the numbers of the records by their tokens."""
    return known_records(tiny_tokenizer(base), range(20))


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[RecordedRun]]:
    """Make all runs: those that are not stopped by their packing, the others by what they are."""
    home = tmp_path_factory.mktemp("runs")
    file = write_numbered(home / "train.jsonl", NUMBERS)

    def config(packing: str, steps: int, *overrides: str) -> RunConfig:
        return numbered_config(base, str(file), f"train.steps={steps}", f"data.packing={packing}", *overrides)

    def straight(packing: str) -> RecordedRun:
        return run_recorded(config(packing, WHOLE_EPOCHS), home / f"straight {packing}")

    def stop(run: Stopped) -> RecordedRun:
        ahead, path = f"data.workers={run.ahead}", home / str(run)
        return run_recorded(config(run.packing, STEPS, ahead), path, [StopAfter(STOPS[run.stop], path)])

    def resume(run: Resumed) -> RecordedRun:
        ahead = f"data.workers={run.before.ahead}"
        return run_recorded(config(run.before.packing, STEPS, ahead), home / str(run))

    found: dict[Any, list[RecordedRun]] = run_all(1, {packing: partial(straight, packing) for packing in PACKING})
    for ranks in (1, 2):
        found |= run_all(ranks, {run: partial(stop, run) for run in STOPPED if run.ranks == ranks})
    for run in RESUMED:
        shutil.copytree(home / str(run.before), home / str(run))
    for ranks in (1, 2):
        found |= run_all(ranks, {run: partial(resume, run) for run in RESUMED if run.ranks == ranks})
    return found


def seen(ranks: list[RecordedRun], known: Known) -> list[list[int]]:
    """Return the records of each step of a run."""
    return seen_records([rank.steps for rank in ranks], known)


@pytest.mark.parametrize("packing", PACKING)
def test_a_run_sees_each_record_once_in_each_epoch(
    packing: str, runs: dict[Any, list[RecordedRun]], known: Known
) -> None:
    """Read from what the model was given; the epochs have orders of their own."""
    steps = seen(runs[packing], known)
    flat = [number for step in steps for number in step]
    assert len(flat) == 2 * WHOLE_EPOCHS * (2 if packing == "true" else 1)
    assert_once_an_epoch(steps, NUMBERS)
    assert flat[:10] != flat[10:20]


@pytest.mark.parametrize("run", RESUMED, ids=str)
def test_a_resumed_run_sees_the_records_of_the_one_that_was_not_stopped(
    run: Resumed, runs: dict[Any, list[RecordedRun]], known: Known
) -> None:
    """The same in every step over all ranks: what was laid out ahead of the stop is neither lost nor seen twice."""
    before, after = runs[run.before], runs[run]
    at = STOPS[run.before.stop]
    assert [(rank.result.status, rank.result.step) for rank in before] == [("stopped", at)] * run.before.ranks
    assert [(rank.result.plan.kind, rank.result.status) for rank in after] == [("Resume", "finished")] * run.ranks
    steps = [*seen(before, known), *seen(after, known)]
    assert steps == seen(runs[run.before.packing], known)[:STEPS]
    assert_once_an_epoch(steps, NUMBERS)


def test_a_resumed_mixture_sees_each_record_once_in_each_pass_over_its_source(
    base: Path, known: Known, tmp_path: Path
) -> None:
    """Of six records an epoch takes two, and of four all: twice the share, whatever was stopped, and on how many ranks."""
    sources = {"six": range(6), "four": range(10, 14)}
    train = [
        {"path": str(write_numbered(tmp_path / f"{name}.jsonl", numbers)), "weight": weight}
        for (name, numbers), weight in zip(sources.items(), (1, 2), strict=True)
    ]
    config = numbered_config(base, train, "train.steps=9", "data.packing=false")
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    [uninterrupted] = run_all(1, {"": lambda: run_recorded(config, straight)}).values()
    [before] = run_all(1, {"": lambda: run_recorded(config, run_dir, [StopAfter(4, run_dir)])}).values()
    [after] = run_all(2, {"": lambda: run_recorded(config, run_dir)}).values()
    steps = [*seen(before, known), *seen(after, known)]
    assert len(steps) == 9
    assert steps == seen(uninterrupted, known)
    for numbers in sources.values():
        assert_once_an_epoch([[number for number in step if number in numbers] for step in steps], numbers)
    epochs = [[number for step in steps[first : first + 3] for number in step] for first in (0, 3, 6)]
    assert [sum(number in sources["six"] for number in epoch) for epoch in epochs] == [2, 2, 2]


@pytest.mark.parametrize("packing", PACKING)
def test_no_record_that_is_kept_for_validation_is_ever_trained_on(
    packing: str, base: Path, known: Known, tmp_path: Path
) -> None:
    """Before and after a resume on other ranks; what is trained on and what is kept are all records together."""
    train = str(write_numbered(tmp_path / "train.jsonl", NUMBERS))
    split = ["data.split_validation_size=0.3", f"data.packing={packing}"]
    config = numbered_config(base, train, "train.steps=8", *split)
    [before] = run_all(2, {"": lambda: run_recorded(config, tmp_path, [StopAfter(3, tmp_path)])}).values()
    [after] = run_all(1, {"": lambda: run_recorded(config, tmp_path)}).values()
    kept = [
        {number for step in seen_records([[r.validation] for r in run], known) for number in step}
        for run in (before, after)
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3
    steps = [*seen(before, known), *seen(after, known)]
    assert_once_an_epoch(steps, set(NUMBERS) - kept[0])
    assert len(steps) == 8
