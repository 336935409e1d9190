"""A stand-in for what Transformer Engine's layers give to fused ones, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup


def as_transformer_engine(q: Tensor, k: Tensor, v: Tensor, packed_seq_params: Any, **_: Any) -> Tensor:
    """Attend as Transformer Engine does in its two formats: rows of [rows, length, heads, ...], or [tokens, heads, ...]."""
    rows = list(zip(q, k, v, strict=True))
    if packed_seq_params.qkv_format == "thd":
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = (part.split(lengths) for part in (q, k, v))
        rows = [row for row in zip(*parts, strict=True) if len(row[0])]
    attended = [
        scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in row), is_causal=True, enable_gqa=True)
        for row in rows
    ]
    return torch.cat([part[0].transpose(0, 1) for part in attended]).flatten(1)


def like_transformer_engine(setup: ModelSetup) -> None:
    """Give fused layers attention and angles as Transformer Engine's layers have them."""
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    from ckptrain.megatron.fused import layer as layer_module

    get_model_config(setup.model).packed_format = "thd"
    rope = get_attr_wrapped_model(setup.model, "rotary_pos_emb").ropes[0]
    by_position = torch.outer(torch.arange(64.0), rope.frequencies).repeat(1, 2)[:, None, None, :]
    layer_module.angles_of = partial(_angles_by_position, layer_module.angles_of, by_position)
    for layer in get_attr_wrapped_model(setup.model, "decoder").layers:
        layer.forward._core = as_transformer_engine


def _angles_by_position(angles_of: Callable[..., Any], by_position: Tensor, _: Tensor, packed: Any) -> Any:
    """Compute with the angles of every position, whatever the model has."""
    return angles_of(by_position, packed)
