"""The order of training: which row comes at which position, forever.

Position p lies in epoch p // num_rows, and each epoch has its own permutation, drawn from (seed, epoch) alone. Nothing
else enters: not the number of processes, not the micro-batch size, not where a run was stopped. So the whole state of
the data is one number, the rows consumed.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt


def permutation(length: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    """Draw a permutation of 0..length-1 from (seed, stream).

    It sorts the raw output of Philox instead of calling `Generator.permutation`: numpy keeps the stream of a bit
    generator the same across releases, and promises nothing for what a Generator makes of it (NEP 19). An order must
    survive an upgrade between a checkpoint and its resume.
    """
    key = np.array([seed % 2**64, stream % 2**64], dtype=np.uint64)
    drawn = np.random.Philox(key=key).random_raw(length)
    return np.argsort(drawn, kind="stable")


@lru_cache(maxsize=2)  # a global batch may straddle two epochs
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return permutation(num_rows, seed, epoch)


@attrs.frozen(kw_only=True)
class RowOrder:
    """The infinite order of `num_rows` rows under `seed`."""

    num_rows: int = attrs.field(validator=attrs.validators.ge(1))
    seed: int

    def row_at(self, position: int) -> int:
        """Return the row at a position, counted from 0 over all epochs."""
        epoch, place = divmod(position, self.num_rows)
        return int(_epoch_order(self.num_rows, self.seed, epoch)[place])

    def rows_in(self, first: int, past: int) -> tuple[int, ...]:
        """Return the rows at positions first <= p < past."""
        return tuple(self.row_at(position) for position in range(first, past))
