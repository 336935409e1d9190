"""Rotary embeddings as Hugging Face computes them: frequencies from its config, positions that restart in a row.

Megatron-Bridge passes on the scaling factor alone and megatron-core has the other constants of llama3 and yarn scaling
built in, so a base with others (original_max_position_embeddings, say) would get wrong logits without any error.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ckptrain.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


@attrs.frozen(kw_only=True)
class Rope:
    """The rotary embedding of one kind of layer."""

    frequencies: Tensor
    """The angle of each pair of channels at position 1, float32 [head_dim / 2]."""
    attention_factor: float
    """What q and k are multiplied by after their rotation."""
    long_frequencies: Tensor | None = None
    """In place of `frequencies` where a sequence is longer than `limit` tokens."""
    limit: int = 0


def read_ropes(hf_config: Any) -> dict[str, Rope]:
    """Return the rotary embedding of each kind of layer, `full_attention` first; all are alike but in Gemma 3."""
    parameters = hf_config.rope_parameters
    if isinstance(parameters.get(FULL), Mapping):
        return {kind: _read_rope(hf_config, kind, parameters[kind]) for kind in (FULL, SLIDING)}
    return {FULL: _read_rope(hf_config, None, parameters)}


def _read_rope(hf_config: Any, layer_type: str | None, parameters: Mapping[str, Any]) -> Rope:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters["rope_type"]
    if kind == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return Rope(frequencies=1.0 / parameters["rope_theta"] ** exponents, attention_factor=1.0)

    def compute(length: int | None) -> tuple[Tensor, float]:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            hf_config, torch.device("cpu"), seq_len=length, layer_type=layer_type
        )
        return frequencies.float(), factor

    # Dynamic scaling begins behind max_position_embeddings, which no sequence of a run is longer than.
    frequencies, factor = compute(None)
    if kind != "longrope":
        return Rope(frequencies=frequencies, attention_factor=factor)
    limit = parameters["original_max_position_embeddings"]
    longer, _ = compute(limit + 1)
    return Rope(frequencies=frequencies, attention_factor=factor, long_frequencies=longer, limit=limit)


def attention_factor(ropes: Mapping[str, Rope]) -> float:
    """Return what q and k are multiplied by, in all layers.

    Raises:
        ConfigError: it is not the same for local layers and the others.
    """
    factors = {kind: rope.attention_factor for kind, rope in ropes.items()}
    if len(set(factors.values())) > 1:
        raise ConfigError(
            "this model cannot be run", [f"its rotary embeddings scale the attention differently: {factors}"]
        )
    return factors[FULL]


def constant_frequencies(ropes: Mapping[str, Rope], longest: int) -> Tensor:
    """Return the frequencies where one table must do for all layers and sequences of up to `longest` tokens.

    Raises:
        ConfigError: one does not.
    """
    rope = ropes[FULL]
    if len(ropes) > 1 or (rope.long_frequencies is not None and longest > rope.limit):
        raise ConfigError(
            "Transformer Engine's layers cannot run this model",
            ["its rotary frequencies differ from layer to layer or with the length of a text; set model.backend=local"],
        )
    return rope.frequencies


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles of packed sequences, in the place of a model's `rotary_pos_emb`."""

    def __init__(self, ropes: Mapping[str, Rope]) -> None:
        """Take the rotary embedding of each kind of layer."""
        super().__init__()
        self.ropes = tuple(ropes.values())

    def get_rotary_seq_len(self, *_: Any) -> tuple[Tensor, Tensor]:
        """Return what the model hands to `forward`: here of each token its position and its sequence's length."""
        packed: PackedSeqParams = _[-1]
        starts = packed.cu_seqlens_q[:-1].long()
        lengths = packed.cu_seqlens_q.diff().long()
        tokens = torch.arange(int(lengths.sum()), device=lengths.device)
        return tokens - starts.repeat_interleave(lengths), lengths.repeat_interleave(lengths)

    def forward(self, places: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Return the angles, float32 [tokens, 1, 1, head_dim]; the two halves of a head turn together.

        Where layers differ, there is an axis of two before that: other layers, local layers.
        """
        angles = [_angles(rope, *places) for rope in self.ropes]
        return angles[0] if len(angles) == 1 else torch.stack(angles)


def _angles(rope: Rope, positions: Tensor, lengths: Tensor) -> Tensor:
    angles = torch.outer(positions.float(), rope.frequencies.to(positions.device))
    if rope.long_frequencies is not None:
        longer = torch.outer(positions.float(), rope.long_frequencies.to(positions.device))
        angles = torch.where((lengths > rope.limit)[:, None], longer, angles)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
