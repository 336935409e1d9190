"""Micro-batches of few shapes: recorded layers (`ckptrain.megatron.fused.graph`) compute the shape they were given.

Packed rows differ by some tokens, and hold more or fewer sequences. Here tokens are rounded up to a sixteenth of the
next power of two, which adds less than an eighth, to full packed rows nearly nothing, and sequences to a power of two.
What is added is padding, in sequences of its own, and empty sequences: nothing sees it.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn.functional import pad

from ckptrain.data.batches import MicroBatch, padding_lengths

_PARTS = 16
"""Of a power of two."""
_LEAST_SEQUENCES = 16


def rounded_up(num_tokens: int) -> int:
    """Return the number of tokens, at least `num_tokens`, that a micro-batch is padded to."""
    part = max(1, (1 << (num_tokens - 1).bit_length()) // _PARTS)
    return -(-num_tokens // part) * part


def of_few_shapes(batch: MicroBatch, sequence_length: int) -> MicroBatch:
    """Return a micro-batch with the same samples and one of few shapes; no sequence is above `sequence_length`.

    One of full rows stays what it is: an ordinary batch, which attention does faster.
    """
    lengths = batch.cu_seqlens.diff()
    if bool((lengths == sequence_length).all()):
        return batch
    num_tokens = batch.tokens.shape[1]
    missing = rounded_up(num_tokens) - num_tokens
    added = padding_lengths(missing, sequence_length)
    sequences = max(_LEAST_SEQUENCES, 1 << (len(lengths) + len(added) - 1).bit_length())
    empty = [0] * (sequences - len(lengths) - len(added))
    boundaries = torch.tensor([*added, *empty], dtype=torch.int32).cumsum(0, dtype=torch.int32) + num_tokens
    positions = [torch.arange(length) for length in added]
    return attrs.evolve(
        batch,
        tokens=pad(batch.tokens, (0, missing)),
        labels=pad(batch.labels, (0, missing)),
        loss_mask=pad(batch.loss_mask, (0, missing)),
        position_ids=torch.cat([batch.position_ids[0], *positions])[None],
        cu_seqlens=torch.cat([batch.cu_seqlens, boundaries]),
        max_seqlen=sequence_length,
    )
