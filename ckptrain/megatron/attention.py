"""Attention of megatron-core's local layers, for packed sequences: torch's scaled dot product, one sequence at a time.

megatron-core's own DotProductAttention writes the whole score matrix and refuses packed sequences. Here a micro-batch
is one flat row of sequences (THD layout, `cu_seqlens`), each attends to itself only, and torch's fused kernel keeps no
scores. No mask is built and no padding is computed.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # isort: split

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ckptrain.errors import ConfigError


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

        `query` is [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim]; heads are those of this
        tensor parallel rank. Returns [tokens, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("ckptrain gives every micro-batch as packed sequences (packed_seq_params)")
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        pieces = [
            self._attend(q, k, v)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend inside one sequence: [length, heads, head_dim] -> the same."""
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        length = q.shape[2]
        mask = None
        if self.window is not None and length > self.window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.squeeze(0).transpose(0, 1)


def _window(config: Any, layer_number: int) -> int | None:
    """Return how many positions, itself included, a token of this layer may see; None is all before it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, _ = config.window_size
    return int(left) + 1
