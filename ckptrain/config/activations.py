"""What does one micro-batch take of memory? Bytes, tensor by tensor, as the layers and the loss keep and drop them.

With h, f the widths of hidden states and MLP, a = heads x head_dim, q the width of q, k and v together, r the ranks of
a layer's adapters, values are of the model's type unless float32 is said. Under tensor parallelism q, a and f are what
one process has.

A fused layer (`ckptrain.megatron.fused.layer`) keeps for its backward pass, for each token: its input (h), q, k, v (q),
the attention's output (a) and float32 log-sum-exp (one a head), what comes after the attention (h), gate and up (2 f)
with room for the image of their gradient (r), the products with A (r) and two float32 factors of its norms. A plain one
keeps the outputs of both norms (2 h) and of the SwiGLU (f) too, because the adapters' A are given them.

For a moment there is more. Fused, that is in the backward pass of the MLP: the gradient given (h), the same beside its
image (h + r), and silu(gate) x up (f); the gradient of gate and up takes their place. Plain, it is in the forward pass
of linear_fc1: the base's output, the adapter's, and their sum, 2 f each.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ckptrain.config.fusion import LOSS_ROWS, AssumedLayers
from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape

_FLOAT32 = 4
_RANK_MULTIPLE = 8
"""Of the fused layers' joint rank (`ckptrain.megatron.fused.weight`)."""

Ranks = Mapping[str, int]
"""The rank of all adapters of a layer's module together, by its short name; what has none is left out."""


@attrs.frozen(kw_only=True)
class LayerMemory:
    """Bytes that one layer takes on one process, for one micro-batch."""

    kept: int
    """From its forward pass to its backward pass."""
    momentary: int
    """At most beside that, while it is computed or its gradients are."""


@attrs.frozen(kw_only=True)
class _Widths:
    """Features of one layer on one process, and bytes of a value."""

    hidden: int
    attended: int
    """Of all heads together."""
    qkv: int
    ffn: int
    heads: int
    value: int

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, value: int) -> _Widths:
        """Return those of a model under a layout."""
        return cls(
            hidden=shape.hidden_size,
            attended=shape.num_heads * shape.head_dim // layout.tensor,
            qkv=shape.qkv_size // layout.tensor,
            ffn=shape.ffn_hidden_size // layout.tensor,
            heads=shape.num_heads // layout.tensor,
            value=value,
        )


def padded(ranks: Ranks, name: str) -> int:
    """Return the rank that a fused layer has for a module."""
    return -(-ranks.get(name, 0) // _RANK_MULTIPLE) * _RANK_MULTIPLE


def layer_memory(
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    layers: AssumedLayers,
    *,
    ranks: Ranks,
    tokens: int,
    value: int,
) -> LayerMemory:
    """Count what one layer takes for `tokens` tokens; `value` is the bytes of one of the model's type."""
    widths = _Widths.of(shape, layout, value)
    if layers.choice.fused:
        return _fused(config, layers, widths, ranks, tokens)
    return _plain(config, shape, layout, layers, widths, ranks, tokens)


def _fused(config: RunConfig, layers: AssumedLayers, widths: _Widths, ranks: Ranks, tokens: int) -> LayerMemory:
    value, hidden, ffn = widths.value, widths.hidden, widths.ffn
    rank = {name: padded(ranks, name) for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    in_8_bits = config.model.fp8 is not None  # adapters are computed beside the weight then, and need no wider matrix
    image = value * rank["linear_fc1"]  # of the gradient of gate and up, which takes their place
    gate_up = value * 2 * ffn + (0 if in_8_bits else image)
    whole = value * (2 * hidden + widths.qkv + widths.attended + sum(rank.values())) + gate_up
    whole += _FLOAT32 * (widths.heads + 2)
    whole += 0 if layers.transformer_engine else value * _joined_outputs(widths)
    given = value * hidden
    down = value * ((0 if in_8_bits else hidden) + rank["linear_fc2"] + ffn)
    recompute = config.train.recompute
    beside = given + (gate_up if recompute == "selective" else 0) + (image if in_8_bits else 0)
    at_swiglu = tokens * (beside + down)
    at_product = tokens * (beside + value * hidden)
    if in_8_bits:  # the gradient in 8 bits, and the weight turned over
        at_product += tokens * 2 * ffn + 2 * ffn * hidden
    momentary = max(at_swiglu, at_product)
    if recompute == "full":
        # The layer again, whose input is kept already, and its output.
        return LayerMemory(kept=tokens * value * hidden, momentary=tokens * whole + momentary)
    return LayerMemory(kept=tokens * (whole - (gate_up if recompute == "selective" else 0)), momentary=momentary)


def _plain(
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    layers: AssumedLayers,
    widths: _Widths,
    ranks: Ranks,
    tokens: int,
) -> LayerMemory:
    """Count a plain layer, in values of a token.

    Under sequence parallelism tensor parallel processes share what is as wide as the hidden state; adapters of parts of
    a layer keep its input whole.
    """
    slices = layout.tensor if config.parallel.sequence else 1
    residual = widths.hidden // slices
    whole_input = widths.hidden // (1 if config.lora.splits_fused else slices)
    local = not layers.transformer_engine
    attention = residual + (whole_input if "linear_qkv" in ranks else 0)
    attention += _plain_attention(config, shape, widths, ranks, local=local)
    after_norm = whole_input if "linear_fc1" in ranks else 0
    gate_up, active = 2 * widths.ffn, _active(widths, ranks, local=local)
    computing = _copies(config, ranks) * gate_up
    if shape.num_experts:
        # The dispatcher's copy of each token's hidden state, one for each expert that it visits.
        after_norm = whole_input + shape.experts_per_token * widths.hidden
        gate_up = active = computing = shape.experts_per_token * 2 * shape.moe_ffn_hidden_size
    images = sum(ranks.values())
    if config.lora.has_magnitudes:  # the base's output and the adapter's, both multiplied with what is learnt
        images += 2 * _outputs(widths, ranks)

    before = after_norm + computing  # the MLP as far as linear_fc1
    inside = after_norm + gate_up + active + gate_up  # its backward pass, as far as the gradient of gate and up
    if config.train.recompute == "full":
        kept, factors = residual, 0
        # The layer again; its input is kept already, what comes after the attention is not. At last its output.
        momentary = attention + images + max(before, inside + residual) + residual
    elif config.train.recompute == "selective":
        kept, factors = attention + residual, widths.heads + 2
        momentary = residual + images + max(before, inside)
    else:
        kept, factors = attention + residual + after_norm + gate_up + active + images, widths.heads + 2
        momentary = max(computing - gate_up - active, residual + gate_up)
    # Log-sum-exp of the attention's heads, factors of the norms.
    return LayerMemory(
        kept=tokens * (widths.value * kept + _FLOAT32 * factors),
        momentary=tokens * (widths.value * momentary + _FLOAT32 * (widths.heads + 2 - factors)),
    )


def _plain_attention(config: RunConfig, shape: ModelShape, widths: _Widths, ranks: Ranks, *, local: bool) -> int:
    """Return the width of q, k, v and the output, as kept, and of scores where the kernel does not do without them."""
    kept = widths.qkv + widths.attended
    if local:
        # v is a view of the projection's output, which is so kept whole beside q and k, and each is turned by itself.
        kept += widths.attended + (widths.qkv - widths.attended) // 2 + 4 * shape.head_dim
        kept += _joined_outputs(widths) if "linear_proj" in ranks else 0
    if shape.keeps_scores:  # two of every head and pair of tokens, of sequences as long as a row
        kept += 2 * widths.heads * config.data.sequence_length
    return kept


def _joined_outputs(widths: _Widths) -> int:
    """Return the width of what the local attention makes of all sequences' outputs, beside what its kernel keeps."""
    return widths.attended


def _active(widths: _Widths, ranks: Ranks, *, local: bool) -> int:
    """Return what is kept of the SwiGLU: its output for an adapter; locally also silu(gate) and a copy of up."""
    return (widths.ffn if "linear_fc2" in ranks else 0) + (2 * widths.ffn if local else 0)


def _copies(config: RunConfig, ranks: Ranks) -> int:
    """Return how many tensors as large as linear_fc1's output there are while it is computed.

    The base's, the adapter's and the sum; of adapters of parts also what joins them; of DoRA what it multiplies.
    """
    if "linear_fc1" not in ranks:
        return 1
    return 5 if config.lora.has_magnitudes else 4 if config.lora.splits_fused else 3


def _outputs(widths: _Widths, ranks: Ranks) -> int:
    outputs = {
        "linear_qkv": widths.qkv,
        "linear_proj": widths.hidden,
        "linear_fc1": 2 * widths.ffn,
        "linear_fc2": widths.hidden,
    }
    return sum(outputs[name] for name in ranks)


def angle_bytes(shape: ModelShape, tokens: int) -> int:
    """Count cosine and sine of each token's rotation, float32, which all layers share."""
    return tokens * shape.head_dim * _FLOAT32


def loss_bytes(shape: ModelShape, layout: Layout, layers: AssumedLayers, *, tokens: int, value: int) -> int:
    """Count the logits of `tokens` learnt tokens, what they are made of, and their gradient, at the loss.

    The last norm's input and output, what of that is learnt, and the gradient of it: 4 h a token. In portions there is
    one of LOSS_ROWS rows. Whole, they are there in float32, as their softmax and as its gradient.
    """
    hidden = tokens * shape.hidden_size * value
    vocabulary = shape.vocab_size // layout.tensor
    # A family that caps its logits does more to them than one product.
    if layers.gpu and layout.tensor == 1 and shape.architecture != "Gemma2ForCausalLM":
        rows = min(tokens, LOSS_ROWS)
        return rows * vocabulary * value + 4 * hidden
    in_loss = 3 * _FLOAT32 if layout.tensor == 1 else 2 * value + _FLOAT32
    return tokens * vocabulary * in_loss + 4 * hidden
