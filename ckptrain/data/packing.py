"""Put samples into rows: the unit that a global batch counts.

A row is a tuple of sample indices whose tokens fit in one sequence. Rows are made once for a source, and only their
order changes from epoch to epoch, so a position in the order means the same samples on every start: there is no window
of samples waiting for a place whose state could be lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import overload

import attrs
import numpy as np
import numpy.typing as npt

from ckptrain.data.order import PACKING_STREAM, permutation

Row = tuple[int, ...]
Integers = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Rows(Sequence[Row]):
    """R rows of S samples in two arrays: a million rows as tuples would take a hundred times the memory."""

    samples: Integers
    """[S], row after row."""
    bounds: Integers
    """[R + 1], where each row begins in `samples`; the last is S."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return tuple(self.samples[self.bounds[index] : self.bounds[index + 1]].tolist())

    def renumbered(self, samples: Integers) -> Rows:
        """Return the rows with `samples[i]` in the place of sample i."""
        return Rows(samples=samples[self.samples], bounds=self.bounds)


def one_sample_rows(num_samples: int) -> Rows:
    """Give each sample a row of its own."""
    return Rows(samples=np.arange(num_samples), bounds=np.arange(num_samples + 1))


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, one after the other."""
    sizes = np.concatenate([np.diff(part.bounds) for part in parts])
    return Rows(
        samples=np.concatenate([part.samples for part in parts]), bounds=np.concatenate([[0], np.cumsum(sizes)])
    )


def packed_rows(lengths: Sequence[int] | Integers, row_tokens: int, seed: int) -> Rows:
    """Pack samples of `lengths` tokens into rows of at most `row_tokens`, each sample once.

    Best-fit decreasing: the longest sample first, each into the fullest row that still takes it. It never needs more
    than 11/9 of the fewest possible rows, and a few (Johnson et al. 1974, doi:10.1137/0203025). Samples of one length
    are taken in an order drawn from `seed`, or a file sorted by subject would give rows of one subject.

    Rows are kept by the tokens that they have left, and one integer has a bit for every number of tokens that some row
    has left, so that a place is found without a search: a million samples take seconds.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.max() > row_tokens:
        worst = int(sizes.argmax())
        raise ValueError(f"sample {worst} has {sizes[worst]} tokens, a row takes {row_tokens}")
    drawn = permutation(len(sizes), seed, PACKING_STREAM)
    longest_first = drawn[np.argsort(-sizes[drawn], kind="stable")]
    open_rows: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # by tokens left: a heap of row numbers
    has_open = 0  # bit n is set where a row has n tokens left
    num_rows = 0
    chosen: list[int] = []
    for length in sizes[longest_first].tolist():
        if fitting := has_open >> length:
            left = length + (fitting & -fitting).bit_length() - 1
            row = heapq.heappop(open_rows[left])
            if not open_rows[left]:
                has_open ^= 1 << left
        else:
            left, row = row_tokens, num_rows
            num_rows += 1
        chosen.append(row)
        if left > length:
            heapq.heappush(open_rows[left - length], row)
            has_open |= 1 << (left - length)
    row_of = np.array(chosen, dtype=np.int64)
    by_row = np.argsort(row_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return Rows(samples=longest_first[by_row], bounds=bounds)
