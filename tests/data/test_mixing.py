"""Several sources in one run, and records that are kept for validation: none is lost, none is seen twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
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
from ckptrain.data.dataset import Dataset, Datasets, build_datasets
from ckptrain.errors import DataError

SOURCES = {"many": range(24), "few": range(50, 58)}
NUMBERS = [*chain(*SOURCES.values())]

type Build = Callable[..., Datasets]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a file for each source, and a tokenizer."""
    directory = tmp_path_factory.mktemp("mixing")
    for name, numbers in SOURCES.items():
        write_numbered(directory / f"{name}.jsonl", numbers)
    return directory


@pytest.fixture(scope="module")
def known(home: Path) -> Known:
    """Return the numbers of the records by their tokens."""
    return known_records(tiny_tokenizer(home), NUMBERS)


@pytest.fixture(scope="module")
def build(home: Path) -> Build:
    """Build the datasets of both sources."""
    how = tiny_tokenisation(home)

    def both(weights: Iterable[float | None] = (None, None), seed: int = 0, **options: Any) -> Datasets:
        train = tuple(
            SourceConfig(path=str(home / f"{name}.jsonl"), weight=weight)
            for name, weight in zip(SOURCES, weights, strict=True)
        )
        return build_datasets(DataConfig(train=train, **{"sequence_length": ROW_TOKENS, **options}), how, seed)

    return both


def numbers_of(dataset: Dataset | None, known: Known) -> list[int]:
    """Return the numbers of the records that a dataset has, in its rows."""
    assert dataset is not None
    return [known[tuple(dataset.samples[index].token_ids.tolist())] for row in dataset.rows for index in row]


@given(
    weights=st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)),
    packing=st.booleans(),
    seed=st.integers(0, 2**32),
    starts=starts(),
)
@settings(max_examples=50)
def test_starts_of_any_kind_see_each_record_once_in_each_pass_over_its_source(
    weights: tuple[float, float],
    packing: bool,
    seed: int,
    starts: list[tuple[int, Dealt]],
    build: Build,
    known: Known,
) -> None:
    """Whatever the weights, on any ranks, looking ahead: the order is that of one start that sees it all."""
    dataset = build(weights, seed, packing=packing).train
    steps: list[list[int]] = []
    for length, dealt in starts:
        steps += seen_records(taken(dataset, seed, dealt, len(steps), length), known)
    assert steps == seen_records(taken(dataset, seed, Dealt(), 0, len(steps)), known)
    order = dataset.order(seed)
    for first in range(0, 8 * len(steps), order.epoch_length):
        rows = order.rows_in(first, first + order.epoch_length)
        assert sum(row >= dataset.source_rows[0] for row in rows) == share_of_few(dataset, weights)
    for numbers in SOURCES.values():
        assert_once_an_epoch([[number for number in step if number in numbers] for step in steps], numbers)


def share_of_few(dataset: Dataset, weights: tuple[float, float]) -> int:
    """Work out how many rows of the second source an epoch takes: as many as the scarcer of the two allows."""
    many, few = dataset.source_rows
    if few / weights[1] <= many / weights[0]:
        return few
    return min(few, max(1, round(many / weights[0] * weights[1])))


def test_rows_are_of_one_source_each(build: Build, known: Known) -> None:
    """Or the shares of the sources would be those of their rows to a part of a row only."""
    dataset = build((1.0, 1.0)).train
    for number, row in enumerate(dataset.rows):
        numbers = [known[tuple(dataset.samples[index].token_ids.tolist())] for index in row]
        name = "many" if number < dataset.source_rows[0] else "few"
        assert set(numbers) <= set(SOURCES[name])
        assert len(row) == 2


def test_the_order_is_that_of_the_content_wherever_it_lies(
    home: Path, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were moved, on a machine that has tokenised nothing yet, give the same tokens in the same steps."""
    moved = [shutil.copy(home / f"{name}.jsonl", tmp_path / f"{name}-moved.json") for name in SOURCES]
    monkeypatch.setenv("CKPTRAIN_CACHE", str(tmp_path / "another-machine"))
    train = tuple(SourceConfig(path=str(path)) for path in moved)
    data = DataConfig(train=train, sequence_length=ROW_TOKENS)
    elsewhere = build_datasets(data, tiny_tokenisation(home), 3).train
    assert taken(elsewhere, 3, Dealt(), 0, 6) == taken(build(seed=3).train, 3, Dealt(), 0, 6)
    assert [elsewhere.samples[index].where for index in (0, 31)] == [f"{moved[0]}:1", f"{moved[1]}:8"]


@pytest.mark.parametrize("weights", [(None, None), (1.0, 3.0)], ids=["unweighted", "weighted"])
@pytest.mark.parametrize(("size", "count"), [(0.01, 1), (0.25, 8), (1, 1), (5, 5)])
@pytest.mark.parametrize("packing", [True, False])
def test_a_record_is_trained_on_or_kept_and_never_both(
    size: float, count: int, packing: bool, weights: tuple[float | None, ...], build: Build, known: Known
) -> None:
    """A share or a number of all records together; what is left is trained on once in each pass."""
    for seed in range(5):
        built = build(weights, seed, split_validation_size=size, packing=packing)
        train, kept = numbers_of(built.train, known), numbers_of(built.validation, known)
        assert len(kept) == count
        assert sorted(train + kept) == NUMBERS
        seen = set(chain(*seen_records(taken(built.train, seed, Dealt(), 0, 20), known)))
        assert seen == set(train)


def test_what_is_kept_is_drawn_by_the_seed_from_all_sources(build: Build, known: Known) -> None:
    """The same for the same seed, and no source is left out for good."""

    def kept(seed: int) -> list[int]:
        return sorted(numbers_of(build(seed=seed, split_validation_size=4).validation, known))

    assert kept(1) == kept(1)
    drawn = [kept(seed) for seed in range(12)]
    assert len(set(map(tuple, drawn))) == 12
    assert all(set(chain(*drawn)) & set(numbers) for numbers in SOURCES.values())


def test_no_record_changes_sides_with_the_length_of_a_row(build: Build, known: Known) -> None:
    """A shorter row drops some records from either side; the others stay where they were."""
    options: dict[str, Any] = {"split_validation_size": 8, "on_too_long": "drop"}
    whole, short = build(**options), build(**options, sequence_length=28)
    for of_whole, of_short in ((whole.train, short.train), (whole.validation, short.validation)):
        there, here = set(numbers_of(of_whole, known)), set(numbers_of(of_short, known))
        assert here < there


def test_a_split_that_leaves_nothing_is_refused(build: Build) -> None:
    """On either side, with the numbers."""
    with pytest.raises(DataError, match=r"leaves nothing to train on(.|\n)*of 32 records 32 would be"):
        build(split_validation_size=32)
    with pytest.raises(DataError, match=r"leaves nothing to train on(.|\n)*all of .*(many|few)\.jsonl; lower it"):
        build(split_validation_size=31)


def test_a_validation_file_of_its_own_is_not_split(home: Path, build: Build, known: Known) -> None:
    """All of it is validated with, in the order of the file where it is not packed."""
    validation = (SourceConfig(path=str(home / "few.jsonl")),)
    built = build(validation=validation, packing=False)
    assert numbers_of(built.validation, known) == [*SOURCES["few"]]
    assert sorted(numbers_of(built.train, known)) == NUMBERS
