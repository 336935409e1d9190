"""The order of rows: a permutation in each epoch, and nothing but (seed, epoch) in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptrain.data.order import RowOrder, permutation

GOLDEN = (8, 9, 7, 3, 0, 1, 4, 2, 5, 6, 0, 9, 5, 6, 4, 2, 8, 1, 7, 3)


@given(num_rows=st.integers(1, 200), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 50))
def test_every_row_comes_once_in_each_epoch(num_rows: int, seed: int, epoch: int) -> None:
    """Whatever the seed and the epoch."""
    order = RowOrder(num_rows=num_rows, seed=seed)
    rows = order.rows_in(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(rows) == list(range(num_rows))


def test_epochs_and_seeds_give_different_orders() -> None:
    """Each epoch is shuffled anew."""
    drawn = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(drawn) == 25


def test_the_order_is_the_one_that_earlier_checkpoints_were_trained_in() -> None:
    """These numbers must never change: a checkpoint says how many rows were consumed, not which."""
    assert RowOrder(num_rows=10, seed=1234).rows_in(0, 20) == GOLDEN


def test_a_position_does_not_depend_on_how_it_is_reached() -> None:
    """Reading from the middle, backwards and across epochs gives what reading from the start gives."""
    order = RowOrder(num_rows=7, seed=3)
    whole = order.rows_in(0, 70)
    assert order.rows_in(33, 52) == whole[33:52]
    assert [order.row_at(position) for position in reversed(range(70))] == list(reversed(whole))
