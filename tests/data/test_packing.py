"""Rows: every sample once, none too long, nearly full, and the same on every start."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrain.data.packing import join_rows, one_sample_rows, packed_rows

GOLDEN = ((8, 7), (2, 0), (1, 3), (4, 6), (5, 9))


def fewest_rows(lengths: list[int], row_tokens: int) -> int:
    """Bound the number of rows from below: by volume, and by samples of which no two fit in one row."""
    return max(-(-sum(lengths) // row_tokens), sum(2 * length > row_tokens for length in lengths))


@given(lengths=st.lists(st.integers(1, 64), max_size=120), seed=st.integers(0, 1000))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int], seed: int) -> None:
    """For any lengths."""
    rows = packed_rows(lengths, 64, seed)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= 64 for row in rows)


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=120))
def test_no_two_rows_could_have_been_one(lengths: list[int]) -> None:
    """What every best-fit packing promises; packing each sample alone would break it."""
    filled = sorted(sum(lengths[index] for index in row) for row in packed_rows(lengths, 64, 0))
    assert len(filled) < 2 or filled[0] + filled[1] > 64


def test_a_hundred_thousand_samples_are_packed_almost_full_within_seconds() -> None:
    """At most one row in a hundred above the lower bound, for lengths as chat data has them."""
    draw = random.Random(0)
    lengths = [min(2048, max(8, int(draw.lognormvariate(5.5, 0.8)))) for _ in range(100_000)]
    began = time.perf_counter()
    rows = packed_rows(lengths, 2048, 0)
    assert time.perf_counter() - began < 20
    assert len(rows) <= 1.01 * fewest_rows(lengths, 2048)


def test_rows_depend_on_the_seed_and_on_nothing_else() -> None:
    """A resume must find the rows of the run it goes on with."""
    lengths = [8, 8, 8, 5, 5, 3, 3, 3, 8, 8, 8, 8] * 10
    assert tuple(packed_rows(lengths, 20, 1)) == tuple(packed_rows(tuple(lengths), 20, 1))
    assert tuple(packed_rows(lengths, 20, 1)) != tuple(packed_rows(lengths, 20, 2))


def test_samples_of_one_length_are_mixed() -> None:
    """A file sorted by subject does not give rows of one subject."""
    rows = packed_rows([10] * 100, 100, 0)
    assert len(rows) == 10
    assert all(max(row) - min(row) > 20 for row in rows)


def test_a_sample_that_no_row_takes_is_a_fault_of_the_caller() -> None:
    """Too long samples are dealt with before rows are made."""
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, a row takes 8"):
        packed_rows([3, 9], 8, 0)


def test_without_packing_a_row_is_a_sample() -> None:
    """In the order of the file; the order of training shuffles them."""
    assert tuple(one_sample_rows(3)) == ((0,), (1,), (2,))


def test_rows_are_those_that_earlier_checkpoints_were_trained_in() -> None:
    """These must never change: a checkpoint says how many rows were consumed, not what was in them."""
    rows = packed_rows([3, 7, 7, 2, 5, 5, 5, 1, 9, 4], 10, 1234)
    assert tuple(rows) == GOLDEN


@given(st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=20), min_size=1, max_size=4))
def test_joined_rows_are_those_of_the_parts(parts: list[list[int]]) -> None:
    """Samples of the next part are numbered after those of the one before."""
    firsts = np.cumsum([0, *[len(part) for part in parts]])
    rows = [packed_rows(part, 16, 0) for part in parts]
    joined = join_rows(
        [
            own.renumbered(np.arange(first, first + len(part)))
            for own, first, part in zip(rows, firsts[:-1], parts, strict=True)
        ]
    )
    expected = [tuple(int(first) + i for i in row) for own, first in zip(rows, firsts[:-1], strict=True) for row in own]
    assert list(joined) == expected
    assert len(joined) == len(expected)
    assert joined[1:3] == tuple(expected[1:3])
