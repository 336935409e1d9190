"""Which tokens does a step learn from that a program makes for it? As many rows as a global batch has, each by itself.

What is dealt to whom is as for a data set. There is none, though: a step's samples are there when it begins, and not
before, since they may depend on the step before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptrain.config.schema import DataConfig
from ckptrain.data.batches import BatchLayout, BatchSource, MicroBatch, StepSize
from ckptrain.data.chat import Sample, encode_batch
from ckptrain.data.dataset import Dataset, DatasetSummary
from ckptrain.data.formats import RowReader
from ckptrain.data.packing import Rows
from ckptrain.data.records import Malformed, Record, shorten
from ckptrain.data.tokenise import Tokenisation
from ckptrain.errors import DataError

type Make = Callable[[int], Sequence[Sample | None]]
"""Of a step, from 1: a sample for each row of its global batch, None where the row is left out."""


class _InOrder(BatchSource):
    """The batches of one step, whose rows come in the order in which they were given."""

    def _rows(self, _: int) -> tuple[int, ...]:
        return tuple(range(self.global_batch_size))


class StreamSource:
    """The training batches of one data parallel rank, made step by step."""

    def __init__(self, make: Make, sequence_length: int, global_batch_size: int, layout: BatchLayout) -> None:
        self._make, self._sequence_length = make, sequence_length
        self._global_batch_size, self._layout = global_batch_size, layout
        self._made: tuple[int, BatchSource] | None = None

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of optimizer step `step`, counted from 0; they are made now."""
        dataset = _dataset(self._make(step + 1), self._sequence_length)
        source = _InOrder(dataset=dataset, seed=0, global_batch_size=self._global_batch_size, layout=self._layout)
        self._made = (step, source)
        return source.micro_batches(step)

    def size_of(self, step: int) -> StepSize:
        """Return what the step that was made last holds over all data parallel ranks."""
        assert self._made is not None
        made, source = self._made
        assert made == step
        return source.size_of(step)


def samples_of_rows(
    rows: Sequence[Mapping[str, Any]], data: DataConfig, how: Tokenisation, name: str
) -> list[Sample | None]:
    """Tokenise rows in any format that files may have; `name` is what they are called in messages.

    Rows that are too long are treated as `data.on_too_long` says; one that is left out, or of which nothing is learnt,
    is None.

    Raises:
        DataError: rows are malformed, cannot be tokenised, or are too long and `data.on_too_long` is refuse.
    """
    reader = RowReader(data.format, {})
    records: list[Record] = []
    problems: list[str] = []
    for number, row in enumerate(rows, start=1):
        try:
            records.append(reader.read(f"{name}:{number}", row))
        except Malformed as found:
            problems.append(f"row {number}: {found}")
    if problems:
        raise DataError(f"{name} has malformed rows", shorten(problems))
    encoded = encode_batch(records, how.tokenizer, how.loss_on)
    if problems := [
        f"{error.summary}: {'; '.join(error.problems)}" for error in encoded if isinstance(error, DataError)
    ]:
        raise DataError(f"{name} cannot be tokenised", shorten(problems))
    samples = [sample for sample in encoded if isinstance(sample, Sample)]
    too_long = [sample for sample in samples if sample.num_tokens > data.sequence_length]
    if too_long and data.on_too_long == "refuse":
        raise DataError(
            f"{name} has rows longer than data.sequence_length ({data.sequence_length}); set it higher, or"
            " data.on_too_long to drop or truncate",
            shorten([f"{sample.where}: {sample.num_tokens} tokens" for sample in too_long]),
        )
    return [_fitted(sample, data) for sample in samples]


def _fitted(sample: Sample, data: DataConfig) -> Sample | None:
    if sample.num_tokens > data.sequence_length:
        if data.on_too_long == "drop":
            return None
        sample = sample.truncated(data.sequence_length)
    return sample if sample.num_learnt else None


def _dataset(made: Sequence[Sample | None], sequence_length: int) -> Dataset:
    """Give each sample a row of its own, and a row without tokens to what was left out."""
    samples = [sample for sample in made if sample is not None]
    lengths = np.array([sample.num_tokens for sample in samples], dtype=np.int64)
    row_tokens = np.array([0 if sample is None else sample.num_tokens for sample in made], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(row_tokens > 0)])
    tokens = int(lengths.sum())
    return Dataset(
        samples=samples,
        rows=Rows(samples=np.arange(len(samples)), bounds=bounds),
        sample_tokens=lengths,
        row_tokens=row_tokens,
        sequence_length=sequence_length,
        summary=DatasetSummary(
            records=len(made),
            samples=len(samples),
            rows=len(made),
            dropped_too_long=0,
            dropped_nothing_learnt=len(made) - len(samples),
            truncated=0,
            tokens=tokens,
            learnt_tokens=sum(sample.num_learnt for sample in samples),
            longest_sample_tokens=int(lengths.max(initial=0)),
            row_fill=tokens / (len(made) * sequence_length),
        ),
        source_rows=(len(made),),
        first_record=_no_record,
    )


def _no_record() -> Record:
    raise LookupError("the samples of a step are not kept as records")
