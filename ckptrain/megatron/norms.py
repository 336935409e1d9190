"""Norms that megatron-core's local layers lack: around 1 + weight, and over all heads of a projection together.

The bases' weights do not learn, so nothing here keeps gradients of them in order between processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class ZeroCentredRMSNorm(nn.Module):
    """Gemma's RMS norm: x / rms(x) * (1 + weight), in float32 and rounded once."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        """Make a norm over the last axis, of `hidden_size`; megatron-core gives all of these by name."""
        super().__init__()
        self.config = config  # Megatron-Bridge looks for it in whatever it fills
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is normed over the last axis, of x's shape and type."""
        return rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class _WholeProjectionRMSNorm(nn.Module):
    """OLMoE's norm of q or k: over the channels of all heads together, not of each head."""

    def __init__(self, num_heads: int, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is normed, of x's shape: [tokens, 1, heads, head_dim]."""
        return rms_norm(x.flatten(2), self.weight.shape, self.weight, self.eps).view_as(x)


def whole_query_norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Make the norm of a whole q; `hidden_size` is that of a head."""
    return _WholeProjectionRMSNorm(config.num_attention_heads, config, hidden_size, eps)


def whole_key_norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Make the norm of a whole k; `hidden_size` is that of a head."""
    return _WholeProjectionRMSNorm(config.num_query_groups, config, hidden_size, eps)
