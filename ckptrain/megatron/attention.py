"""Packed sequences for megatron-core's local layers: attention that stays inside a sequence.

megatron-core's own DotProductAttention writes the whole score matrix and refuses packed sequences. Here a micro-batch
is one row of sequences, [tokens, 1, ...], whose boundaries (`cu_seqlens`) are known: each sequence attends to itself
only, through torch's fused kernel, which keeps no scores, no mask is built and no padding is computed. Where scores
are capped or there is a sink, which the kernel knows nothing of, they are written for one sequence at a time.

Under context parallelism a process has two pieces of every sequence (`ckptrain.data.context`). The keys and values of
all processes are gathered, and a piece attends to its sequence up to its own end.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ckptrain.errors import ConfigError


class PackedDotProductAttention(nn.Module):
    """Causal attention over packed sequences, in the place of a layer spec's `core_attention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> None:
        """Take megatron-core's configuration of a layer; scores are kept within `softcap` by a tanh."""
        super().__init__()
        self.config = config
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.softcap = softcap
        self.window = _window(config, layer_number)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        elif config.softmax_type != "vanilla":
            raise ConfigError(
                "the local backend cannot run this model",
                [f"its attention uses softmax_type={config.softmax_type}; use Transformer Engine on a GPU"],
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        `query` is [tokens, 1, heads, head_dim], `key` and `value` [tokens, 1, kv_heads, head_dim]; heads are those of
        this tensor parallel rank, tokens those of this context parallel rank. Returns [tokens, 1, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("ckptrain gives every micro-batch as packed sequences (packed_seq_params)")
        if packed_seq_params.cu_seqlens_q_padded is not None:
            return self._attend_in_pieces(query, key, value, packed_seq_params.cu_seqlens_q_padded.diff().tolist())
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        pieces = [
            self._attend(q, k, v)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(2)

    def _attend_in_pieces(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """Attend from this process's two pieces of every sequence; `lengths` are those of whole padded sequences."""
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        head_dim = key.shape[-1]
        own = torch.cat((key, value), dim=-1)
        # Backwards, the gradients that all processes have for a key are summed where the key is.
        gathered = gather_from_sequence_parallel_region(own, group=parallel_state.get_context_parallel_group())
        theirs = gathered.unflatten(0, (size, -1)).split([length // size for length in lengths], dim=1)
        outputs = []
        for q, of_sequence in zip(query.split([length // size for length in lengths]), theirs, strict=True):
            early, late = of_sequence.chunk(2, dim=1)  # [processes, piece, 1, kv_heads, 2 * head_dim] each
            whole = torch.cat((early, late.flip(0))).flatten(0, 1)
            first, last = q.chunk(2)
            for piece, number in ((first, rank), (last, 2 * size - 1 - rank)):
                k, v = whole[: (number + 1) * len(piece)].split((head_dim, whole.shape[-1] - head_dim), dim=-1)
                outputs.append(self._attend(piece, k, v))
        return torch.cat(outputs).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend inside one sequence, from its last positions: [queries, 1, heads, head_dim] -> the same.

        `key` and `value` are [length, 1, kv_heads, head_dim], of the sequence up to the last query.
        """
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if self.softcap is not None or self.softmax_offset is not None:
            return self._attend_by_scores(q, k, v).permute(2, 0, 1, 3)
        grouped = q.shape[1] != k.shape[1]
        queries, length = q.shape[2], k.shape[2]
        all_before = self.window is None or length <= self.window
        mask = None if all_before and queries == length else _visible(queries, length, self.window, q.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3)

    def _attend_by_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the scores at hand: [1, heads, queries, head_dim] -> the same. A sink takes its share of them."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.mT * self.softmax_scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~_visible(q.shape[2], k.shape[2], self.window, q.device), -torch.inf)
        if self.softmax_offset is None:
            return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        sinks = self.softmax_offset.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(-1, dtype=torch.float32)
        return shares[..., :-1].to(v.dtype) @ v


def _visible(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which position sees which, bool [queries, length]: itself and the `window` - 1 before; None is all before.

    The queries are the last of the positions.
    """
    before = length - queries
    seen = torch.ones(queries, length, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _window(config: Any, layer_number: int) -> int | None:
    """Return how many positions, itself included, a token of this layer may see; None is all before it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, _ = config.window_size
    return int(left) + 1
