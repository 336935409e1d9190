"""From a file to rows: what is left out is counted, refused or told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ckptrain.config.schema import DataConfig, SourceConfig
from ckptrain.data.dataset import Dataset, build_datasets
from ckptrain.data.tokenise import Tokenisation
from ckptrain.errors import DataError

Build = Callable[..., Dataset]


def chat(answer: str, question: str = "Say it.") -> dict[str, Any]:
    """Build a row of one question and one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def how(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Tokenisation:
    """Tokenise with this tokenizer."""
    return Tokenisation(tokenizer=tokenizer, tokenizer_fingerprint=str(tokenizer.chat_template), loss_on=data.loss_on)


@pytest.fixture
def build(write_jsonl: Callable[..., Path], unmarked: PreTrainedTokenizerBase) -> Build:
    """Write rows and build a dataset of them."""

    def build_rows(*rows: Any, seed: int = 0, **options: Any) -> Dataset:
        path = write_jsonl(*rows)
        data = DataConfig(train=(SourceConfig(path=str(path)),), **options)
        return build_datasets(data, how(unmarked, data), seed).train

    return build_rows


def test_the_summary_counts_what_is_trained_on(build: Build, tmp_path: Path) -> None:
    """Samples, rows and tokens are those of the samples that are left."""
    dataset = build(chat("one"), chat("two two"), sequence_length=64)
    summary = dataset.summary
    assert (summary.records, summary.samples, summary.rows) == (2, 2, 1)
    assert summary.tokens == sum(len(sample.token_ids) for sample in dataset.samples)
    assert summary.learnt_tokens == 2 + 3  # "one" and the end of the turn, "two two" and the end of the turn
    assert summary.row_fill == summary.tokens / 64
    assert summary.describe().startswith("2 samples in 1 rows")
    assert "dropped" not in summary.describe()


def test_a_sample_too_long_is_refused_with_the_ways_out(build: Build) -> None:
    """File, line, its tokens, the limit, and the three settings to choose from."""
    with pytest.raises(DataError) as caught:
        build(chat("short"), chat("word " * 40), chat("word " * 50), sequence_length=32)
    message = str(caught.value)
    assert "2 sample(s) longer than data.sequence_length (32)" in message
    ways = ("data.sequence_length=", "data.on_too_long=drop", "data.on_too_long=truncate")
    assert all(way in message for way in ways)
    assert [problem.split(": ")[0].rsplit(":")[-1] for problem in caught.value.problems] == ["2", "3"]


def test_the_sequence_length_that_the_refusal_names_is_enough(build: Build) -> None:
    """Following the advice works."""
    rows = [chat("short"), chat("word " * 40)]
    with pytest.raises(DataError) as caught:
        build(*rows, sequence_length=32)
    advised = int(caught.value.summary.split("set data.sequence_length=")[1].split(",")[0])
    assert build(*rows, sequence_length=advised).summary.longest_sample_tokens == advised


def test_samples_too_long_are_dropped_and_counted(build: Build) -> None:
    """The others stay."""
    dataset = build(chat("short"), chat("word " * 40), sequence_length=32, on_too_long="drop")
    assert (dataset.summary.samples, dataset.summary.dropped_too_long) == (1, 1)
    assert "1 dropped as too long" in dataset.summary.describe()


def test_samples_too_long_are_cut_at_the_end_and_counted(build: Build) -> None:
    """What is left of them is trained on, unless the answer lies beyond the cut."""
    rows = (chat("short"), chat("word " * 40), chat("never reached", question="word " * 40))
    dataset = build(*rows, sequence_length=32, on_too_long="truncate")
    assert [sample.num_tokens for sample in dataset.samples][1:] == [32]
    assert (dataset.summary.truncated, dataset.summary.dropped_nothing_learnt) == (1, 1)


def test_a_file_of_which_nothing_is_left_is_refused(build: Build) -> None:
    """Training on nothing is not training."""
    with pytest.raises(DataError, match=r"leaves nothing to train on(.|\n)*of 1 records 1 are longer"):
        build(chat("word " * 40), sequence_length=32, on_too_long="drop")


def test_records_that_the_template_refuses_are_told_together(
    write_jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each with its line."""
    tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('start with user') }}{% endif %}x"
    bad = {"messages": [{"role": "assistant", "content": "x"}]}
    path = write_jsonl(bad, chat("fine"), bad)
    with pytest.raises(DataError) as caught:
        data = DataConfig(train=(SourceConfig(path=str(path)),), loss_on="all")
        build_datasets(data, how(tokenizer, data), 0)
    assert [problem.split(" cannot")[0] for problem in caught.value.problems] == [f"{path}:1", f"{path}:3"]


def test_without_packing_each_sample_has_its_row(build: Build) -> None:
    """In the order of the file."""
    assert build(chat("one"), chat("two"), packing=False).rows[:] == ((0,), (1,))


def test_the_first_record_is_kept_for_a_sample_answer(build: Build) -> None:
    """The record itself, not its tokens."""
    record = build(chat("one"), chat("two")).first_record()
    assert record.where.endswith("data.jsonl:1")
