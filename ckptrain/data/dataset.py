"""Build a dataset: read records, tokenise them, leave out what cannot be used and say so, make rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from ckptrain.config.schema import DataConfig
from ckptrain.data.chat import LossOn, Sample, encode
from ckptrain.data.packing import Row, one_sample_rows, packed_rows
from ckptrain.data.records import Record, data_fingerprint, read_records, shorten
from ckptrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen(kw_only=True)
class DatasetSummary:
    """What became of a data file, for the log and the plan; tokens are those that are trained on."""

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
    """Samples and the rows they lie in; `first_record` is what a run is asked before and after training."""

    samples: tuple[Sample, ...]
    rows: tuple[Row, ...]
    sequence_length: int
    fingerprint: str
    summary: DatasetSummary
    first_record: Record


@attrs.define(kw_only=True)
class _Sieve:
    """Samples kept so far, and counts of those that were not."""

    sequence_length: int
    on_too_long: Literal["refuse", "drop", "truncate"]
    kept: list[Sample] = attrs.field(factory=list)
    too_long: list[Sample] = attrs.field(factory=list)
    dropped_nothing_learnt: int = 0
    truncated: int = 0

    def take(self, sample: Sample) -> None:
        """Keep a sample, cut it, or leave it out."""
        is_cut = sample.num_tokens > self.sequence_length
        if is_cut and self.on_too_long != "truncate":
            self.too_long.append(sample)
            return
        if is_cut:
            sample = sample.truncated(self.sequence_length)
        if sample.num_learnt == 0:
            self.dropped_nothing_learnt += 1
            return
        self.truncated += is_cut
        self.kept.append(sample)


def build_dataset(path: Path, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
    """Read and tokenise a JSONL file and put its samples into rows; `seed` is that of the run.

    Raises:
        DataError: the file is malformed, a sample cannot be tokenised or is too long and `data.on_too_long` is refuse,
            or nothing is left to train on. All offending lines are told at once.
    """
    fingerprint = data_fingerprint(path)
    records = read_records(path, data.format)
    sieve = _Sieve(sequence_length=data.sequence_length, on_too_long=data.on_too_long)
    for sample in _encode_all(path, records, tokenizer, data.loss_on):
        sieve.take(sample)
    _refuse_too_long(path, sieve)
    if not sieve.kept:
        raise DataError(
            f"{path} leaves nothing to train on",
            [
                f"of {len(records)} records {len(sieve.too_long)} are longer than data.sequence_length"
                f" ({data.sequence_length}) and {sieve.dropped_nothing_learnt} have no token that data.loss_on"
                f" ({data.loss_on}) learns; raise data.sequence_length or change data.loss_on"
            ],
        )
    lengths = [sample.num_tokens for sample in sieve.kept]
    rows = packed_rows(lengths, data.sequence_length, seed) if data.packing else one_sample_rows(len(lengths))
    return Dataset(
        samples=tuple(sieve.kept),
        rows=rows,
        sequence_length=data.sequence_length,
        fingerprint=fingerprint,
        summary=_summarise(len(records), sieve, len(rows)),
        first_record=records[0],
    )


def _encode_all(path: Path, records: list[Record], tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> list[Sample]:
    samples: list[Sample] = []
    problems: list[str] = []
    for record in records:
        try:
            samples.append(encode(record, tokenizer, loss_on))
        except DataError as error:
            problems.extend(f"{error.summary}: {problem}" for problem in error.problems)
    if problems:
        raise DataError(f"{path} cannot be tokenised", shorten(problems))
    return samples


def _refuse_too_long(path: Path, sieve: _Sieve) -> None:
    if not sieve.too_long or sieve.on_too_long != "refuse":
        return
    longest = max(sample.num_tokens for sample in sieve.too_long)
    raise DataError(
        f"{path} has {len(sieve.too_long)} sample(s) longer than data.sequence_length ({sieve.sequence_length}); set"
        f" data.sequence_length={longest}, data.on_too_long=drop to leave them out, or data.on_too_long=truncate to cut"
        " them",
        shorten([f"{sample.where}: {sample.num_tokens} tokens" for sample in sieve.too_long]),
    )


def _summarise(num_records: int, sieve: _Sieve, num_rows: int) -> DatasetSummary:
    tokens = sum(sample.num_tokens for sample in sieve.kept)
    return DatasetSummary(
        records=num_records,
        samples=len(sieve.kept),
        rows=num_rows,
        dropped_too_long=len(sieve.too_long),
        dropped_nothing_learnt=sieve.dropped_nothing_learnt,
        truncated=sieve.truncated,
        tokens=tokens,
        learnt_tokens=sum(sample.num_learnt for sample in sieve.kept),
        longest_sample_tokens=max(sample.num_tokens for sample in sieve.kept),
        row_fill=tokens / (num_rows * sieve.sequence_length),
    )
