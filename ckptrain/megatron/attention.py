"""Packed sequences for megatron-core's local layers: rotary positions that restart, attention that stays inside.

megatron-core's own DotProductAttention writes the whole score matrix and refuses packed sequences, and its rotary
embedding takes them apart one by one. Here a micro-batch is one row of sequences, [tokens, 1, ...], whose boundaries
(`cu_seqlens`) both know: the frequencies are looked up by position for all tokens at once, and each sequence attends to
itself only, through torch's fused kernel, which keeps no scores. No mask is built and no padding is computed.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ckptrain.errors import ConfigError


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles of packed sequences, in the place of a model's `rotary_pos_emb`."""

    def __init__(self, frequencies: Tensor) -> None:
        """Take the angle of each pair of channels at position 1, float32 [head_dim / 2]."""
        super().__init__()
        self.inv_freq = frequencies

    def get_rotary_seq_len(self, *_: Any) -> Tensor:
        """Return what the model hands to `forward`: here the positions themselves, [tokens]."""
        packed: PackedSeqParams = _[-1]
        starts = packed.cu_seqlens_q[:-1].long()
        lengths = packed.cu_seqlens_q.diff().long()
        tokens = torch.arange(int(lengths.sum()), device=lengths.device)
        return tokens - starts.repeat_interleave(lengths)

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Return the angles, float32 [tokens, 1, 1, head_dim]; the two halves of a head turn together."""
        angles = torch.outer(positions.float(), self.inv_freq.to(positions.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedDotProductAttention(torch.nn.Module):
    """Causal attention over packed sequences, in the place of a layer spec's `core_attention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.softmax_type != "vanilla":
            raise ConfigError(
                "the local backend cannot run this model",
                [f"its attention uses softmax_type={config.softmax_type}; use Transformer Engine on a GPU"],
            )
        self.softmax_scale = softmax_scale
        self.window = _window(config, layer_number)

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
        this tensor parallel rank. Returns [tokens, 1, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("ckptrain gives every micro-batch as packed sequences (packed_seq_params)")
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        pieces = [
            self._attend(q, k, v)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend inside one sequence: [length, 1, heads, head_dim] -> the same."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        length = q.shape[2]
        mask = None
        if self.window is not None and length > self.window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3)


def _window(config: Any, layer_number: int) -> int | None:
    """Return how many positions, itself included, a token of this layer may see; None is all before it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, _ = config.window_size
    return int(left) + 1
