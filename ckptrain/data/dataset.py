"""Build a dataset: tokens of its sources, without what cannot be used, in rows; and say what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, overload

import attrs
import numpy as np
import numpy.typing as npt

from ckptrain.config.schema import DataConfig, SourceConfig
from ckptrain.data.chat import Sample
from ckptrain.data.order import SPLIT_STREAM, RowOrder, permutation
from ckptrain.data.packing import Row, Rows, join_rows, one_sample_rows, packed_rows
from ckptrain.data.records import Record, shorten
from ckptrain.data.sources import Role, locate
from ckptrain.data.token_cache import TokenCache
from ckptrain.data.tokenise import Tell, Tokenisation, record_at, tokenised
from ckptrain.errors import DataError

type Integers = npt.NDArray[np.int64]
type OnTooLong = Literal["refuse", "drop", "truncate"]


@attrs.frozen(kw_only=True)
class DatasetSummary:
    """What became of the rows of a dataset's files, for the log and the plan; tokens are those that are trained on."""

    records: int
    samples: int
    rows: int
    dropped_too_long: int
    dropped_nothing_learnt: int
    truncated: int
    tokens: int
    learnt_tokens: int
    longest_sample_tokens: int
    row_fill: float = attrs.field(metadata={"doc": "tokens / (rows * sequence_length), between 0 and 1"})

    def describe(self) -> str:
        """Say it in one line; what was left out is said only where there is something to say."""
        parts = [
            f"{self.samples} samples in {self.rows} rows ({self.row_fill:.0%} full)",
            f"{self.tokens} tokens, {self.learnt_tokens} learnt",
            f"longest {self.longest_sample_tokens}",
        ]
        if self.dropped_too_long:
            parts.append(f"{self.dropped_too_long} dropped as too long")
        if self.dropped_nothing_learnt:
            parts.append(f"{self.dropped_nothing_learnt} dropped with nothing to learn")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        return ", ".join(parts)


@attrs.frozen(kw_only=True, eq=False)
class Dataset:
    """Samples and the rows they lie in, of one or several sources."""

    samples: Sequence[Sample]
    rows: Sequence[Row]
    sample_tokens: Integers
    """Tokens of each sample, [samples]."""
    row_tokens: Integers
    """Tokens of each row, [rows]."""
    sequence_length: int
    summary: DatasetSummary
    source_rows: tuple[int, ...]
    """How many of the rows are of each source; they are numbered through, source after source."""
    weights: tuple[float, ...] | None = None
    """Shares of the sources in the order; None takes every row once an epoch."""
    first_record: Callable[[], Record]
    """Reads what the first sample was made from, which a run is asked before and after training."""

    def order(self, seed: int) -> RowOrder:
        """Return the order of the rows in training."""
        return RowOrder(sizes=self.source_rows, weights=self.weights, seed=seed)


@attrs.frozen(kw_only=True, eq=False)
class CachedSamples(Sequence[Sample]):
    """The samples of several caches that are trained on, numbered through; read when they are asked for."""

    caches: tuple[TokenCache, ...]
    cache_of: Integers
    """Which cache a sample is in, [S]."""
    place: Integers
    """Its number there, [S]."""
    sequence_length: int

    def __len__(self) -> int:
        return len(self.place)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        cache: TokenCache = self.caches[self.cache_of[index]]
        return cache.sample(int(self.place[index]), self.sequence_length)


@attrs.frozen(kw_only=True, eq=False)
class Sieved:
    """What is left of a cache: S samples of the N that it has."""

    cache: TokenCache
    name: str
    record: Callable[[int], Record]
    """Reads what the sample of a number in the cache was made from."""
    index: Integers
    """Their numbers in the cache, [S], ascending."""
    lengths: Integers
    """Their tokens, [S], none above the sequence length."""
    num_learnt: Integers
    """Learnt ones among them, [S]."""
    num_records: int
    too_long: Integers
    """Numbers of the samples that are too long and not kept."""
    dropped_nothing_learnt: int
    truncated: int

    def part(self, chosen: npt.NDArray[np.bool_]) -> Sieved:
        """Return the same with the chosen ones of the samples, [S]; what was left out is told of the whole."""
        return attrs.evolve(
            self, index=self.index[chosen], lengths=self.lengths[chosen], num_learnt=self.num_learnt[chosen]
        )


def sieve(
    cache: TokenCache, name: str, record: Callable[[int], Record], sequence_length: int, on_too_long: OnTooLong
) -> Sieved:
    """Choose the samples of a cache that can be trained on, and count the others."""
    lengths, num_learnt = cache.lengths, cache.samples["num_learnt"].astype(np.int64)
    is_long = lengths > sequence_length
    kept = np.ones(len(cache), dtype=np.bool_)
    if on_too_long == "truncate":
        for index in is_long.nonzero()[0].tolist():
            num_learnt[index] = cache.learnt_within(index, sequence_length)
    else:
        kept &= ~is_long
    has_nothing = kept & (num_learnt == 0)
    kept &= ~has_nothing
    return Sieved(
        cache=cache,
        name=name,
        record=record,
        index=kept.nonzero()[0],
        lengths=np.minimum(lengths, sequence_length)[kept],
        num_learnt=num_learnt[kept],
        num_records=len(cache),
        too_long=is_long.nonzero()[0] if on_too_long != "truncate" else np.zeros(0, dtype=np.int64),
        dropped_nothing_learnt=int(has_nothing.sum()),
        truncated=int((is_long & kept).sum()),
    )


@attrs.frozen(kw_only=True)
class Datasets:
    """What a run trains on and what it validates with."""

    train: Dataset
    validation: Dataset | None


def build_datasets(data: DataConfig, how: Tokenisation, seed: int, tell: Tell = lambda *_: None) -> Datasets:
    """Tokenise what `data` names, or find it in the cache, and put the samples into rows; `seed` is that of the run.

    Raises:
        ConfigError: a source is not there.
        DataError: rows are malformed, a sample cannot be tokenised or is too long and `data.on_too_long` is refuse, or
            nothing is left to train on. All offending rows of a source are told at once.
    """
    train = _sieved(data.train, "train", data, how, tell)
    validation = None if data.validation is None else _sieved(data.validation, "validation", data, how, tell)
    if data.split_validation_size is not None:
        train, validation = _split(train, data.split_validation_size, seed)
    weights = tuple(source.weight for source in data.train if source.weight is not None)
    return Datasets(
        train=in_rows(train, data, seed, weights or None),
        validation=None if validation is None else in_rows(validation, data, seed),
    )


def build_validation(data: DataConfig, how: Tokenisation, seed: int, tell: Tell = lambda *_: None) -> Dataset | None:
    """Build what a run validates with, as `build_datasets` does, where it trains on nothing that `data` names."""
    if data.validation is None:
        return None
    return in_rows(_sieved(data.validation, "validation", data, how, tell), data, seed)


def in_rows(parts: Sequence[Sieved], data: DataConfig, seed: int, weights: tuple[float, ...] | None = None) -> Dataset:
    """Put the samples of each part into rows of its own."""
    rows: list[Rows] = []
    first = 0
    for part in parts:
        count = len(part.index)
        own = packed_rows(part.lengths, data.sequence_length, seed) if data.packing else one_sample_rows(count)
        rows.append(own.renumbered(np.arange(first, first + count)))
        first += count
    joined = join_rows(rows)
    lengths = np.concatenate([part.lengths for part in parts])
    return Dataset(
        samples=CachedSamples(
            caches=tuple(part.cache for part in parts),
            cache_of=np.repeat(np.arange(len(parts)), [len(part.index) for part in parts]),
            place=np.concatenate([part.index for part in parts]),
            sequence_length=data.sequence_length,
        ),
        rows=joined,
        sample_tokens=lengths,
        row_tokens=np.add.reduceat(lengths[joined.samples], joined.bounds[:-1]),
        sequence_length=data.sequence_length,
        summary=_summarise(parts, len(joined), data.sequence_length),
        source_rows=tuple(len(own) for own in rows),
        weights=weights,
        first_record=partial(parts[0].record, int(parts[0].index[0])),
    )


def _sieved(
    sources: Sequence[SourceConfig], role: Role, data: DataConfig, how: Tokenisation, tell: Tell
) -> list[Sieved]:
    found = []
    for source in sources:
        located = locate(source, role)
        record_format = source.format or data.format
        cache = tokenised(located, record_format, source.columns, how, tell)
        record = partial(record_at, located, record_format, source.columns)
        part = sieve(cache, located.name, record, data.sequence_length, data.on_too_long)
        if data.on_too_long == "refuse" and len(part.too_long):
            raise _too_long(part, data.sequence_length)
        if not len(part.index):
            raise _nothing_left(part, data)
        found.append(part)
    return found


def _split(parts: Sequence[Sieved], size: float, seed: int) -> tuple[list[Sieved], list[Sieved]]:
    """Take a share (below 1) or a number of records out for validation, drawn from all sources together.

    Raises:
        DataError: nothing would be left for one of the two.
    """
    # Drawn from all records, kept or not: another sequence length must not move a sample from one side to the other.
    total = sum(part.num_records for part in parts)
    count = int(size) if size >= 1 else max(1, round(size * total))
    is_held_out = np.zeros(total, dtype=np.bool_)
    is_held_out[permutation(total, seed, SPLIT_STREAM)[:count]] = True
    of_caches = np.split(is_held_out, np.cumsum([part.num_records for part in parts])[:-1])
    held = [of_cache[part.index] for part, of_cache in zip(parts, of_caches, strict=True)]
    train = [part.part(~is_held) for part, is_held in zip(parts, held, strict=True)]
    validation = [part.part(is_held) for part, is_held in zip(parts, held, strict=True) if is_held.any()]
    if not validation:
        raise DataError(
            f"data.split_validation_size={size} leaves nothing to validate with",
            [f"of {total} records {count} would be for validation, and none of them is kept; raise it"],
        )
    emptied = [part.name for part in train if not len(part.index)]
    if emptied:
        raise DataError(
            f"data.split_validation_size={size} leaves nothing to train on",
            [f"of {total} records {count} would be for validation, among them all of {', '.join(emptied)}; lower it"],
        )
    return train, validation


def _too_long(part: Sieved, sequence_length: int) -> DataError:
    lengths = part.cache.lengths[part.too_long]
    return DataError(
        f"{part.name} has {len(lengths)} sample(s) longer than data.sequence_length ({sequence_length}); set"
        f" data.sequence_length={lengths.max()}, data.on_too_long=drop to leave them out, or data.on_too_long=truncate"
        " to cut them",
        shorten(
            [
                f"{part.cache.where(index)}: {length} tokens"
                for index, length in zip(part.too_long.tolist(), lengths.tolist(), strict=True)
            ]
        ),
    )


def _nothing_left(part: Sieved, data: DataConfig) -> DataError:
    return DataError(
        f"{part.name} leaves nothing to train on",
        [
            f"of {part.num_records} records {len(part.too_long)} are longer than data.sequence_length"
            f" ({data.sequence_length}) and {part.dropped_nothing_learnt} have no token that data.loss_on"
            f" ({data.loss_on}) learns; raise data.sequence_length or change data.loss_on"
        ],
    )


def _summarise(parts: Sequence[Sieved], num_rows: int, sequence_length: int) -> DatasetSummary:
    lengths = np.concatenate([part.lengths for part in parts])
    tokens = int(lengths.sum())
    return DatasetSummary(
        records=sum(part.num_records for part in parts),
        samples=len(lengths),
        rows=num_rows,
        dropped_too_long=sum(len(part.too_long) for part in parts),
        dropped_nothing_learnt=sum(part.dropped_nothing_learnt for part in parts),
        truncated=sum(part.truncated for part in parts),
        tokens=tokens,
        learnt_tokens=sum(int(part.num_learnt.sum()) for part in parts),
        longest_sample_tokens=int(lengths.max()),
        row_fill=tokens / (num_rows * sequence_length),
    )
