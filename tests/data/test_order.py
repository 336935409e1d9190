"""The order of rows: a permutation in each epoch, and nothing but (seed, epoch) in it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptrain.data.order import RowOrder, permutation, rows_per_epoch

MIXED = (6, 5, 8, 7, 2, 7, 1, 6, 8, 3, 7, 4, 0, 8, 6)
GOLDEN = (8, 9, 7, 3, 0, 1, 4, 2, 5, 6, 0, 9, 5, 6, 4, 2, 8, 1, 7, 3)


@given(num_rows=st.integers(1, 200), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 50))
def test_every_row_comes_once_in_each_epoch(num_rows: int, seed: int, epoch: int) -> None:
    """Whatever the seed and the epoch."""
    order = RowOrder(sizes=(num_rows,), seed=seed)
    rows = order.rows_in(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(rows) == list(range(num_rows))


def test_epochs_and_seeds_give_different_orders() -> None:
    """Each epoch is shuffled anew."""
    drawn = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(drawn) == 25


def test_the_order_is_the_one_that_earlier_checkpoints_were_trained_in() -> None:
    """These numbers must never change: a checkpoint says how many rows were consumed, not which."""
    assert RowOrder(sizes=(10,), seed=1234).rows_in(0, 20) == GOLDEN


def test_a_position_does_not_depend_on_how_it_is_reached() -> None:
    """Reading from the middle, backwards and across epochs gives what reading from the start gives."""
    order = RowOrder(sizes=(7,), seed=3)
    whole = order.rows_in(0, 70)
    assert order.rows_in(33, 52) == whole[33:52]
    assert [order.row_at(position) for position in reversed(range(70))] == list(reversed(whole))


MIXTURES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20)), min_size=1, max_size=4)


def test_sources_without_weights_are_one_dataset() -> None:
    """All rows once an epoch, shuffled together."""
    order = RowOrder(sizes=(5, 9, 1), seed=3)
    assert order.rows_in(0, 45) == RowOrder(sizes=(15,), seed=3).rows_in(0, 45)


@given(mixture=MIXTURES, seed=st.integers(0, 100), epoch=st.integers(0, 9))
def test_a_mixture_has_the_shares_that_were_asked_for(mixture: list[tuple[int, float]], seed: int, epoch: int) -> None:
    """In every epoch alike, to the nearest row, and one source, the scarcest for its weight, is seen as a whole."""
    sizes, weights = zip(*mixture, strict=True)
    order = RowOrder(sizes=sizes, weights=weights, seed=seed)
    shares = rows_per_epoch(sizes, weights)
    rows = order.rows_in(epoch * order.epoch_length, (epoch + 1) * order.epoch_length)
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    drawn = [sum(first <= row < past for row in rows) for first, past in pairwise(bounds)]
    assert tuple(drawn) == shares
    assert any(share == size for share, size in zip(shares, sizes, strict=True))
    scale = min(size / weight for size, weight in mixture)
    assert all(abs(share - scale * weight) <= 0.5 or share == 1 for share, weight in zip(shares, weights, strict=True))


@given(mixture=MIXTURES, seed=st.integers(0, 100))
def test_each_row_of_a_mixture_comes_once_in_each_pass_over_its_source(
    mixture: list[tuple[int, float]], seed: int
) -> None:
    """Whatever part of a source an epoch takes: none is left out, none comes a second time before all have come."""
    sizes, weights = zip(*mixture, strict=True)
    order = RowOrder(sizes=sizes, weights=weights, seed=seed)
    seen: Counter[int] = Counter()
    for epoch in range(12):
        rows = order.rows_in(epoch * order.epoch_length, (epoch + 1) * order.epoch_length)
        assert max(Counter(rows).values()) <= 2  # a pass may end and the next begin within an epoch
        seen.update(rows)
        first = 0
        for size in sizes:
            counts = [seen[row] for row in range(first, first + size)]
            assert max(counts) - min(counts) <= 1
            first += size


def test_a_mixture_is_the_one_that_earlier_checkpoints_were_trained_in() -> None:
    """These numbers must never change."""
    assert RowOrder(sizes=(6, 3), weights=(1.0, 2.0), seed=7).rows_in(0, 15) == MIXED
