"""Batches laid out ahead are the batches that are laid out when they are asked for, and no run waits for them to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_runs import (
    ROW_TOKENS,
    Dealt,
    Known,
    assert_once_an_epoch,
    known_records,
    seen_records,
    starts,
    taken,
    tiny_tokenisation,
    tiny_tokenizer,
    write_numbered,
)

from ckptrain.config.schema import DataConfig, SourceConfig
from ckptrain.data.batches import MicroBatch
from ckptrain.data.dataset import Dataset, build_datasets
from ckptrain.data.prefetch import Prefetcher
from ckptrain.errors import DataError

NUMBERS = range(30)

type Datasets = dict[bool, Dataset]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Return the numbers of the records by their tokens."""
    return known_records(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), NUMBERS)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """Return the same records packed and unpacked."""
    home = tmp_path_factory.mktemp("data")
    path = write_numbered(home / "train.jsonl", NUMBERS)
    how = tiny_tokenisation(home)
    train = (SourceConfig(path=str(path)),)
    return {
        packing: build_datasets(DataConfig(train=train, sequence_length=ROW_TOKENS, packing=packing), how, 0).train
        for packing in (True, False)
    }


@given(
    packing=st.booleans(),
    seed=st.integers(0, 2**32),
    starts=starts(),
)
@settings(max_examples=60)
def test_starts_of_any_kind_see_the_records_of_one_that_is_not_interrupted(
    packing: bool, seed: int, starts: list[tuple[int, Dealt]], datasets: Datasets, known: Known
) -> None:
    """Each start makes some steps on some ranks, looking ahead; together they see each record once in each epoch.

    Thirty records are 30 or 15 rows, and a step takes eight: no epoch begins with a step but every fourth or eighth.
    """
    steps: list[list[int]] = []
    for length, dealt in starts:
        steps += seen_records(taken(datasets[packing], seed, dealt, len(steps), length), known)
    assert_once_an_epoch(steps, NUMBERS)
    assert steps == seen_records(taken(datasets[packing], seed, Dealt(), 0, len(steps)), known)


class Watched:
    """Stands for a source of batches, whose every step is told and may be made to wait or to fail."""

    def __init__(self, act: Callable[[int], Any] = lambda _: None) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self._act = act

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Lay out a step."""
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        self._act(step)
        return [step]  # type: ignore[list-item]  # any value will do


def prefetcher(source: Watched, ahead: int, first_step: int = 0) -> Prefetcher:
    """Look ahead in a source that is watched."""
    return Prefetcher(source, first_step=first_step, ahead=ahead)  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_so_many_steps_are_laid_out_and_no_more(ahead: int) -> None:
    """Each once, in a thread, while the step before them is computed: memory is that of these."""
    source = Watched()
    with prefetcher(source, ahead, first_step=7) as batches:
        for step in range(7, 12):
            assert batches.take() == [step]
            wait_until(lambda step=step: len(source.steps) == step + 1 - 7 + ahead)
    assert source.steps == list(range(7, 12 + ahead))
    here = threading.current_thread().name
    assert source.threads == ({here} if ahead == 0 else {"ckptrain-batches_0"})


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_comes_out_where_its_step_is_taken(ahead: int) -> None:
    """Not before, though it was found before; and it is the error itself."""

    def fail(step: int) -> None:
        if step == 2:
            raise DataError("the disk is gone", ["read again"])

    with prefetcher(Watched(fail), ahead) as batches:
        assert [batches.take(), batches.take()] == [[0], [1]]
        with pytest.raises(DataError, match="the disk is gone"):
            batches.take()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["leaves", "is interrupted"])
def test_who_leaves_early_waits_for_one_step_at_most(error: BaseException | None) -> None:
    """The steps that wait for the thread are never begun, and no thread is left."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(30)

    source = Watched(wait)
    try:
        with prefetcher(source, ahead=500):
            assert begun.wait(30)
            threading.Timer(0.2, go_on.set).start()
            if error is not None:
                raise error
    except KeyboardInterrupt as caught:
        assert caught is error
    assert source.steps == [0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptrain-batches")]


def test_a_step_that_is_not_laid_out_yet_is_waited_for() -> None:
    """A slow disk makes a run slow, and loses no step."""
    with prefetcher(Watched(lambda _: time.sleep(0.02)), ahead=2) as batches:
        assert [batches.take() for _ in range(5)] == [[0], [1], [2], [3], [4]]
