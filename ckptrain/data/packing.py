"""Put samples into rows: the unit that a global batch counts.

A row is a tuple of sample indices whose tokens fit in one sequence. Rows are made once for a dataset, and only their
order changes from epoch to epoch, so a position in the order means the same samples on every start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ckptrain.data.order import permutation

Row = tuple[int, ...]

# The order of rows uses the epochs from 0; this stream is for the order in which samples are packed.
_PACKING_STREAM = 2**64 - 1


def one_sample_rows(num_samples: int) -> tuple[Row, ...]:
    """Give each sample a row of its own."""
    return tuple((index,) for index in range(num_samples))


def packed_rows(lengths: Sequence[int], row_tokens: int, seed: int) -> tuple[Row, ...]:
    """Pack samples of `lengths` tokens into rows of at most `row_tokens`, each sample once.

    Best-fit decreasing: the longest sample first, each into the fullest row that still takes it. It never needs more
    than 11/9 of the fewest possible rows, and a few (Johnson et al. 1974, doi:10.1137/0203025). Samples of one length
    are taken in an order drawn from `seed`, or a file sorted by subject would give rows of one subject.
    """
    drawn = permutation(len(lengths), seed, _PACKING_STREAM)
    longest_first = sorted((int(index) for index in drawn), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in longest_first:
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(f"sample {index} has {length} tokens, a row takes {row_tokens}")
        fit = bisect_left(open_rows, (length, 0))
        if fit < len(open_rows):
            left, row = open_rows.pop(fit)
            rows[row].append(index)
        else:
            left, row = row_tokens, len(rows)
            rows.append([index])
        if left > length:
            insort(open_rows, (left - length, row))
    return tuple(tuple(row) for row in rows)
