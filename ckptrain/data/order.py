"""The order of training: which row comes at which position, forever.

Position p lies in epoch p // rows of an epoch, and each epoch has its own permutation, drawn from (seed, epoch) alone.
Nothing else enters: not the number of processes, not the micro-batch size, not where a run was stopped. So the whole
state of the data is one number, the rows consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

# The order of rows uses the streams from 0, one an epoch; these are for other draws from the same seed.
PACKING_STREAM = 2**64 - 1
"""In which order samples of one length are packed."""
SPLIT_STREAM = 2**64 - 2
"""Which samples are kept for validation."""
_SOURCE_STREAMS = 2**63
_PASSES = 2**40
"""Streams of one source of a mixture, one for each pass over it."""

Integers = npt.NDArray[np.int64]


def permutation(length: int, seed: int, stream: int) -> Integers:
    """Draw a permutation of 0..length-1 from (seed, stream).

    It sorts the raw output of Philox instead of calling `Generator.permutation`: numpy keeps the stream of a bit
    generator the same across releases, and promises nothing for what a Generator makes of it (NEP 19). An order must
    survive an upgrade between a checkpoint and its resume.
    """
    key = np.array([seed % 2**64, stream % 2**64], dtype=np.uint64)
    drawn = np.random.Philox(key=key).random_raw(length)
    return np.argsort(drawn, kind="stable")


def rows_per_epoch(sizes: Sequence[int], weights: Sequence[float] | None) -> tuple[int, ...]:
    """Return how many rows of each source make an epoch: all of them, or by weight as many as the scarcest allows.

    A source of which an epoch takes a part goes on with the rest in the next one, and begins again once every row of it
    has been seen: none comes a second time before all have come.
    """
    if weights is None:
        return tuple(sizes)
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return tuple(min(size, max(1, round(scale * weight))) for size, weight in zip(sizes, weights, strict=True))


@attrs.frozen(kw_only=True)
class RowOrder:
    """The infinite order of the rows of one or several sources under `seed`.

    `sizes` are the rows of each source; rows are numbered through, source after source.
    """

    sizes: tuple[int, ...] = attrs.field(validator=attrs.validators.deep_iterable(attrs.validators.ge(1)))
    weights: tuple[float, ...] | None = None
    seed: int

    @property
    def epoch_length(self) -> int:
        """Rows of an epoch."""
        return sum(rows_per_epoch(self.sizes, self.weights))

    def row_at(self, position: int) -> int:
        """Return the row at a position, counted from 0 over all epochs."""
        epoch, place = divmod(position, self.epoch_length)
        return int(_epoch_order(self, epoch)[place])

    def rows_in(self, first: int, past: int) -> tuple[int, ...]:
        """Return the rows at positions first <= p < past."""
        return tuple(self.row_at(position) for position in range(first, past))


@lru_cache(maxsize=4)  # a global batch may straddle two epochs, for training and what is laid out ahead of it
def _epoch_order(order: RowOrder, epoch: int) -> Integers:
    shares = rows_per_epoch(order.sizes, order.weights)
    shuffled = permutation(sum(shares), order.seed, epoch)
    if shares == order.sizes:
        return shuffled
    # The shuffle says which source comes where, and each source goes on in the order of its own passes: were rows
    # shuffled too, one of the next pass could come before the last ones of this.
    source_at = np.repeat(np.arange(len(shares)), shares)[shuffled]
    first_rows = np.cumsum([0, *order.sizes[:-1]])
    rows = np.empty_like(shuffled)
    for source, (first, size, share) in enumerate(zip(first_rows, order.sizes, shares, strict=True)):
        rows[source_at == source] = first + _stretch(size, order.seed, source, epoch * share, share)
    return rows


def _stretch(size: int, seed: int, source: int, first: int, count: int) -> Integers:
    """Return `count` rows of a source from position `first` on, of which each pass has every row once."""
    pieces = []
    while count:
        number, place = divmod(first, size)
        order = permutation(size, seed, _SOURCE_STREAMS + source * _PASSES + number)
        piece = order[place : place + count]
        pieces.append(piece)
        first, count = first + len(piece), count - len(piece)
    return np.concatenate(pieces)
