"""What Megatron is fed: the micro-batches of an optimizer step, as a pure function of the step.

A micro-batch is one flattened sequence in the layout that attention calls THD: rows, and the samples in them, lie one
after the other without padding, and `cu_seqlens` says where each sample begins, so that none attends to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from ckptrain.data.dataset import Dataset
from ckptrain.data.packing import Row
from ckptrain.errors import ConfigError


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """One forward pass of one data parallel rank; T tokens in S sequences, all on the CPU.

    tokens: int64 [1, T]
    labels: int64 [1, T], the next token of the same sample; 0, and not learnt, at a sample's last token
    loss_mask: float32 [1, T], 1.0 where the label is learnt
    position_ids: int64 [1, T], from 0 in each sequence
    cu_seqlens: int32 [S + 1], where each sequence begins; the first is 0 and the last is T
    max_seqlen: no sequence is longer, padding included; never above the row's sequence length
    num_learnt: the sum of loss_mask, what a loss is averaged over
    sample_ids: indices into `Dataset.samples`, in order; sequences beyond them are padding
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_learnt: int
    sample_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class BatchLayout:
    """How rows are dealt to data parallel ranks, and the shape of what a rank gets.

    `fixed_length` pads each micro-batch to micro_batch_size * sequence_length, for pipeline stages, which exchange
    activations of one agreed shape. `pad_to_multiple` is for sequence parallelism, which cuts T into equal parts.
    """

    micro_batch_size: int = attrs.field(validator=attrs.validators.ge(1))
    data_parallel_rank: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    data_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    pad_to_multiple: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    fixed_length: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse a rank outside the group: a fault of the caller."""
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(f"expected a rank below {self.data_parallel_size}, found {self.data_parallel_rank}")

    def tokens_for(self, num_tokens: int, sequence_length: int) -> int:
        """Return the length that a micro-batch of `num_tokens` is padded to."""
        wanted = self.micro_batch_size * sequence_length if self.fixed_length else max(num_tokens, 1)
        return -(-wanted // self.pad_to_multiple) * self.pad_to_multiple


def assemble(dataset: Dataset, rows: Sequence[Row], layout: BatchLayout) -> MicroBatch:
    """Lay rows one after the other; without rows it is padding alone, which nothing is learnt from."""
    sample_ids = tuple(index for row in rows for index in row)
    samples = [dataset.samples[index] for index in sample_ids]
    lengths = [sample.num_tokens for sample in samples]
    num_tokens = layout.tokens_for(sum(lengths), dataset.sequence_length)
    lengths += padding_lengths(num_tokens - sum(lengths), dataset.sequence_length)
    tokens = np.zeros(num_tokens, dtype=np.int64)
    labels = np.zeros(num_tokens, dtype=np.int64)
    loss_mask = np.zeros(num_tokens, dtype=np.float32)
    begin = 0
    for sample in samples:
        end = begin + sample.num_tokens
        tokens[begin:end] = sample.token_ids
        labels[begin : end - 1] = sample.token_ids[1:]
        loss_mask[begin : end - 1] = sample.learnt[1:]
        begin = end
    return MicroBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max_seqlen=max(lengths),
        num_learnt=sum(sample.num_learnt for sample in samples),
        sample_ids=sample_ids,
    )


def padding_lengths(num_tokens: int, sequence_length: int) -> list[int]:
    """Cut padding into sequences of at most a row's length: attention and rotary tables then stay as short as ever."""
    full, rest = divmod(num_tokens, sequence_length)
    return [sequence_length] * full + ([rest] if rest else [])


@attrs.frozen(kw_only=True)
class StepSize:
    """Tokens of one optimizer step over all ranks."""

    tokens: int
    """Computed, padding included."""
    padding: int
    attended_pairs: int
    """Pairs of a token and one that it sees in its sample, itself included; of padding none."""


@attrs.frozen(kw_only=True, eq=False)
class BatchSource:
    """The training batches of one data parallel rank.

    Step s consumes the rows at positions s * G to (s + 1) * G of the order, G being the global batch size. They are cut
    into G / micro_batch_size consecutive micro-batches, and the k-th goes to rank k % data_parallel_size as its
    micro-batch k // data_parallel_size. So the micro-batches of a step are the same whatever the number of ranks, only
    who computes them changes, and there is no state to save but the step.
    """

    dataset: Dataset
    seed: int
    global_batch_size: int
    layout: BatchLayout

    def __attrs_post_init__(self) -> None:
        """Refuse a global batch that cannot be dealt evenly."""
        layout = self.layout
        portion = layout.micro_batch_size * layout.data_parallel_size
        if self.global_batch_size < 1 or self.global_batch_size % portion:
            raise ConfigError(
                "the global batch cannot be dealt evenly to the ranks",
                [
                    f"train.global_batch_size is {self.global_batch_size}; expected a multiple of {portion}, which is"
                    f" train.micro_batch_size ({layout.micro_batch_size}) times the data parallel size"
                    f" ({layout.data_parallel_size})"
                ],
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in a step."""
        return self.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of optimizer step `step`, counted from 0."""
        rows = [self.dataset.rows[row] for row in self._rows(step)]
        return list(_deal(self.dataset, rows, self.layout, self.num_micro_batches))

    def size_of(self, step: int) -> StepSize:
        """Return what a step holds over all data parallel ranks; every rank says the same."""
        numbers = self._rows(step)
        tokens = [int(self.dataset.row_tokens[row]) for row in numbers]
        lengths = self.dataset.sample_tokens[[sample for row in numbers for sample in self.dataset.rows[row]]]
        micro = self.layout.micro_batch_size
        computed = sum(
            self.layout.tokens_for(sum(tokens[first : first + micro]), self.dataset.sequence_length)
            for first in range(0, len(tokens), micro)
        )
        pairs = int((lengths * (lengths + 1) // 2).sum())
        return StepSize(tokens=computed, padding=computed - sum(tokens), attended_pairs=pairs)

    def epochs_after(self, steps: int) -> float:
        """Return how often the dataset has been gone through after so many steps."""
        return steps * self.global_batch_size / self.dataset.order(self.seed).epoch_length

    def _rows(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's rows, in their order."""
        first = step * self.global_batch_size
        return self.dataset.order(self.seed).rows_in(first, first + self.global_batch_size)


def validation_batches(dataset: Dataset, layout: BatchLayout) -> list[MicroBatch]:
    """Return this rank's part of the validation set, unshuffled: every sample is on one rank once.

    All ranks get the same number of micro-batches, since Megatron's schedules meet in collectives; where the rows run
    out, a micro-batch is padding that no loss is taken on.
    """
    per_turn = layout.micro_batch_size * layout.data_parallel_size
    turns = -(-len(dataset.rows) // per_turn)
    return list(_deal(dataset, dataset.rows, layout, turns))


def _deal(dataset: Dataset, rows: Sequence[Row], layout: BatchLayout, turns: int) -> Iterator[MicroBatch]:
    """Yield a rank's share of consecutive micro-batches, dealt like cards."""
    for turn in range(turns):
        first = (turn * layout.data_parallel_size + layout.data_parallel_rank) * layout.micro_batch_size
        yield assemble(dataset, rows[first : first + layout.micro_batch_size], layout)
