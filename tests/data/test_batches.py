"""Micro-batches: the same at every number of ranks, nothing lost, and labels where they belong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptrain.data.batches import BatchLayout, BatchSource, MicroBatch, StepSize, assemble, validation_batches
from ckptrain.data.chat import Sample
from ckptrain.data.dataset import Dataset, DatasetSummary
from ckptrain.data.packing import one_sample_rows, packed_rows
from ckptrain.data.records import PromptCompletion
from ckptrain.errors import ConfigError

SEQUENCE_LENGTH = 16


def dataset(lengths: list[int], *, packing: bool = True) -> Dataset:
    """Build a dataset without a tokenizer: token ids are unique, the second half of each sample is learnt."""
    first_ids = np.cumsum([1, *lengths])
    samples = tuple(
        Sample(
            where=f"data.jsonl:{index + 1}",
            token_ids=np.arange(first_ids[index], first_ids[index] + length, dtype=np.int32),
            learnt=np.arange(length) >= max(1, length // 2),
        )
        for index, length in enumerate(lengths)
    )
    rows = packed_rows(lengths, SEQUENCE_LENGTH, 0) if packing else one_sample_rows(len(lengths))
    counts = {name: 0 for name in [field.name for field in DatasetSummary.__attrs_attrs__]}
    return Dataset(
        samples=samples,
        rows=rows,
        sequence_length=SEQUENCE_LENGTH,
        sample_tokens=np.array(lengths),
        row_tokens=np.array([sum(lengths[index] for index in row) for row in rows]),
        source_rows=(len(rows),),
        summary=DatasetSummary(**counts),
        first_record=lambda: PromptCompletion(where="data.jsonl:1", prompt="a", completion="b"),
    )


LENGTHS = [2 + (7 * i) % 13 for i in range(60)]


def source(
    size: int = 1, rank: int = 0, *, micro: int = 1, batch: int = 8, seed: int = 5, **layout: Any
) -> BatchSource:
    """Build the batches of one rank."""
    dealt = BatchLayout(micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=size, **layout)
    return BatchSource(dataset=dataset(LENGTHS), seed=seed, global_batch_size=batch, layout=dealt)


def same(a: MicroBatch, b: MicroBatch) -> bool:
    """Compare two micro-batches bit for bit."""
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    return a.sample_ids == b.sample_ids and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


@given(
    lengths=st.lists(st.integers(2, SEQUENCE_LENGTH), min_size=1, max_size=12),
    multiple=st.sampled_from([1, 2, 8]),
    fixed=st.booleans(),
    packing=st.booleans(),
)
@settings(max_examples=60)
def test_a_micro_batch_is_its_samples_one_after_the_other(
    lengths: list[int], multiple: int, fixed: bool, packing: bool
) -> None:
    """Checked sequence by sequence through cu_seqlens, the way attention reads it."""
    data = dataset(lengths, packing=packing)
    layout = BatchLayout(micro_batch_size=len(data.rows), pad_to_multiple=multiple, fixed_length=fixed)
    batch = assemble(data, data.rows, layout)
    num_tokens = batch.tokens.shape[1]
    bounds = batch.cu_seqlens.tolist()
    assert (bounds[0], bounds[-1]) == (0, num_tokens)
    assert bounds == sorted(set(bounds))
    assert batch.max_seqlen == max(np.diff(bounds)) <= SEQUENCE_LENGTH
    assert num_tokens % multiple == 0
    assert num_tokens - sum(lengths) < multiple or fixed
    if fixed:
        assert num_tokens == -(-len(data.rows) * SEQUENCE_LENGTH // multiple) * multiple
    for place, (begin, end) in enumerate(pairwise(bounds)):
        assert batch.position_ids[0, begin:end].tolist() == list(range(end - begin))
        if place < len(batch.sample_ids):
            sample = data.samples[batch.sample_ids[place]]
            assert batch.tokens[0, begin:end].tolist() == sample.token_ids.tolist()
            assert batch.labels[0, begin:end].tolist() == [*sample.token_ids[1:].tolist(), 0]
            assert batch.loss_mask[0, begin:end].tolist() == [*sample.learnt[1:].astype(float).tolist(), 0.0]
        else:
            assert not batch.tokens[0, begin:end].any()
            assert not batch.loss_mask[0, begin:end].any()
    assert sorted(batch.sample_ids) == list(range(len(lengths)))
    assert batch.num_learnt == int(batch.loss_mask.sum())


def test_a_micro_batch_has_the_types_that_megatron_wants() -> None:
    """Token ids and positions as int64, the mask as float32, cu_seqlens as int32, and a leading dimension of one."""
    batch = source().micro_batches(0)[0]
    num_tokens = batch.tokens.shape[1]
    for name, dtype in {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}.items():
        assert (getattr(batch, name).dtype, getattr(batch, name).shape) == (dtype, (1, num_tokens))
    assert (batch.position_ids.dtype, batch.position_ids.shape) == (torch.int64, (1, num_tokens))
    assert (batch.cu_seqlens.dtype, batch.cu_seqlens.dim()) == (torch.int32, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("step", [0, 1, 17])
def test_the_micro_batches_of_a_step_do_not_depend_on_the_number_of_ranks(size: int, micro: int, step: int) -> None:
    """Ranks interleaved give, bit for bit, what one rank gets alone."""
    alone = source(micro=micro).micro_batches(step)
    ranks = [source(size, rank, micro=micro).micro_batches(step) for rank in range(size)]
    interleaved = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    assert len(interleaved) == len(alone) == 8 // micro
    assert all(same(a, b) for a, b in zip(interleaved, alone, strict=True))


def test_the_samples_of_a_step_do_not_depend_on_the_micro_batch_size() -> None:
    """Rows are only cut differently."""
    order = [[i for batch in source(micro=micro).micro_batches(3) for i in batch.sample_ids] for micro in (1, 2, 4, 8)]
    assert order == [order[0]] * 4


def test_steps_read_in_any_order_are_the_same() -> None:
    """A new source that starts in the middle, as a resume does, gives what an uninterrupted run gets."""
    going_on = source()
    whole = [going_on.micro_batches(step) for step in range(12)]
    for step in (11, 4, 7):
        assert all(same(a, b) for a, b in zip(source().micro_batches(step), whole[step], strict=True))


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_every_sample_is_seen_once_in_each_epoch(batch: int) -> None:
    """Also where a global batch straddles two epochs."""
    batches = source(batch=batch)
    num_rows = len(batches.dataset.rows)
    epochs = 8
    steps = num_rows * epochs // batch
    rows_seen = steps * batch
    seen = [i for step in range(steps) for micro in batches.micro_batches(step) for i in micro.sample_ids]
    assert rows_seen == num_rows * epochs
    counts = np.bincount(seen, minlength=len(LENGTHS))
    assert counts.tolist() == [epochs] * len(LENGTHS)
    assert batches.epochs_after(steps) == epochs


def test_another_seed_is_another_order() -> None:
    """The seed of the run decides the order."""
    assert source(seed=1).micro_batches(0)[0].sample_ids != source(seed=2).micro_batches(0)[0].sample_ids


@pytest.mark.parametrize("layout", [{}, {"fixed_length": True}, {"pad_to_multiple": 8}])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_size_of_a_step_is_that_of_its_batches_on_all_ranks(size: int, layout: dict[str, Any]) -> None:
    """Every rank tells it without asking the others."""
    for step in (0, 3):
        ranks = [source(size, rank, micro=2, **layout).micro_batches(step) for rank in range(size)]
        everything = [batch for batches in ranks for batch in batches]
        tokens = sum(batch.tokens.shape[1] for batch in everything)
        of_samples = sum(LENGTHS[index] for batch in everything for index in batch.sample_ids)
        # Of each token those before it in its sample, and itself.
        pairs = sum(sum(range(LENGTHS[index] + 1)) for batch in everything for index in batch.sample_ids)
        told = {source(size, rank, micro=2, **layout).size_of(step) for rank in range(size)}
        assert told == {StepSize(tokens=tokens, padding=tokens - of_samples, attended_pairs=pairs)}


def test_a_global_batch_that_cannot_be_dealt_is_refused() -> None:
    """With the numbers, and the keys to change."""
    with pytest.raises(ConfigError, match=r"global_batch_size is 8; expected a multiple of 6, which is"):
        source(size=3, micro=2)


def test_a_rank_outside_its_group_is_refused() -> None:
    """It would silently train on no rows at all."""
    with pytest.raises(ValueError, match="expected a rank below 2, found 2"):
        BatchLayout(micro_batch_size=1, data_parallel_rank=2, data_parallel_size=2)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_validation_sample_is_on_one_rank_once(size: int, micro: int, fixed: bool) -> None:
    """All ranks have as many micro-batches, those without rows learn nothing, and their shape is an ordinary one."""
    data = dataset(LENGTHS)
    ranks = [
        validation_batches(
            data,
            BatchLayout(
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=size,
                fixed_length=fixed,
                pad_to_multiple=4,
            ),
        )
        for rank in range(size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    everything = [batch for batches in ranks for batch in batches]
    assert sorted(i for batch in everything for i in batch.sample_ids) == list(range(len(LENGTHS)))
    assert sum(batch.num_learnt for batch in everything) == sum(sample.num_learnt for sample in data.samples)
    for batch in everything:
        assert batch.tokens.shape[1] == micro * SEQUENCE_LENGTH if fixed else batch.tokens.shape[1] % 4 == 0
        assert batch.tokens.shape[1] > 0
        assert batch.sample_ids or batch.loss_mask.sum() == 0
