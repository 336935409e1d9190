"""Which part of a micro-batch one context parallel process computes.

Of C processes each computes the same share of every sequence: a sequence is padded at its end to a multiple of 2 C and
cut into 2 C pieces, and process r keeps piece r and piece 2 C - 1 - r. An early piece has little before it to attend to
and a late one much, so every process has as much to do. It is the partition that megatron-core's rotary embedding and
Transformer Engine's kernels go by.
"""

from __future__ import annotations

import attrs
import torch

from ckptrain.data.batches import MicroBatch

PADDING = -1
"""Where in the row a token was that is not of the row."""


@attrs.frozen(kw_only=True, eq=False)
class ContextPart:
    """What one of C processes computes of a micro-batch of S sequences: P tokens of the padded row's C * P, on the CPU.

    tokens, labels, loss_mask: [1, P], as in the micro-batch; at padding 0, and not learnt
    position_ids: int64 [1, P], from 0 in each sequence
    origin: int64 [P], where in the micro-batch each token is; PADDING for padding
    cu_seqlens: int32 [S + 1], where each sequence begins in the micro-batch
    cu_seqlens_padded: int32 [S + 1], where each begins in the padded row; the last is C * P
    max_seqlen: no sequence is longer, padding included
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    origin: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    max_seqlen: int

    @property
    def whole_length(self) -> int:
        """Return the tokens of the padded row, those of all processes."""
        return int(self.cu_seqlens_padded[-1])

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of these positions of the micro-batch lie here, and where: bool [positions], int64 [found]."""
        matches = self.origin[None, :] == positions[:, None]
        here = matches.any(1)
        return here, matches[here].int().argmax(1)


def padded_length(batch: MicroBatch, num_processes: int) -> int:
    """Return the length of a micro-batch whose sequences are padded for so many context parallel processes."""
    if num_processes == 1:
        return int(batch.tokens.numel())
    return int(_padded(batch.cu_seqlens.diff().long(), num_processes).sum())


def context_part(batch: MicroBatch, rank: int, num_processes: int, whole_length: int = 0) -> ContextPart:
    """Cut a micro-batch for context parallel process `rank`; alone, it gets all of it as it is.

    Labels belong to their token already, so none is lost where a sequence is cut.

    Args:
        batch: the micro-batch, the same on all `num_processes`.
        rank: which of them this is.
        num_processes: how many there are.
        whole_length: pad the row to so many tokens by one more sequence, if it is shorter: a multiple of
            `_pieces(num_processes)`, for pipeline stages.
    """
    length = batch.tokens.numel()
    if num_processes == 1 and whole_length <= length:
        return ContextPart(
            tokens=batch.tokens,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            position_ids=batch.position_ids,
            origin=torch.arange(length),
            cu_seqlens=batch.cu_seqlens,
            cu_seqlens_padded=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
    pieces = _pieces(num_processes)
    lengths = batch.cu_seqlens.diff().long()
    padded = _padded(lengths, num_processes)
    if (missing := whole_length - int(padded.sum())) > 0:
        lengths = torch.cat((lengths, lengths.new_zeros(1)))
        padded = torch.cat((padded, padded.new_tensor([missing])))
    kept = (rank, pieces - 1 - rank) if pieces > 1 else (0,)
    sizes = (padded // pieces).tolist()
    within = torch.cat([torch.arange(piece * size, (piece + 1) * size) for size in sizes for piece in kept])
    sequence = torch.arange(len(sizes)).repeat_interleave(padded // pieces * len(kept))
    starts = lengths.cumsum(0) - lengths
    origin = torch.where(within < lengths[sequence], starts[sequence] + within, PADDING)
    return ContextPart(
        tokens=_take(batch.tokens, origin),
        labels=_take(batch.labels, origin),
        loss_mask=_take(batch.loss_mask, origin),
        position_ids=within[None],
        origin=origin,
        cu_seqlens=_boundaries(lengths),
        cu_seqlens_padded=_boundaries(padded),
        max_seqlen=max(int(padded.max()), batch.max_seqlen),
    )


def _pieces(num_processes: int) -> int:
    """Return how many pieces a sequence is cut into."""
    return 2 * num_processes if num_processes > 1 else 1


def _padded(lengths: torch.Tensor, num_processes: int) -> torch.Tensor:
    pieces = _pieces(num_processes)
    return (lengths + pieces - 1) // pieces * pieces


def _take(row: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """Return what the row has at `origin`, and 0 at padding: [1, T] -> [1, P]."""
    return row[:, origin.clamp(min=0)] * (origin != PADDING)


def _boundaries(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
