"""How much arithmetic does a step ask for, and how much can a GPU do? FLOPs of LoRA training, and peaks.

Counted is what the model asks for, whatever the layout and the kernels (a multiplication and an addition are two):

- frozen linear layers and the output layer: 4 a parameter and token, 2 forward and 2 for the gradient of the input; a
  frozen weight has no gradient of its own, which full training counts 2 more for. Of experts those that a token visits.
  The first layer is counted like the others, though nothing before it needs a gradient.
- adapters: 6 a parameter and token.
- attention, causal: 12 for each head, feature of a head, and pair of a token with one that it sees: 2 for the score and
  2 for the weighted value forward, twice that backward (PaLM, arXiv:2204.02311, appendix B, and Korthikanti et al.,
  arXiv:2205.05198, appendix A, count all pairs of a sequence; the half that a causal mask hides is not counted here).
- the output layer is counted where something is learnt, and padding not at all: nobody asks for the rest.

Not counted: norms, activations, softmax, the optimizer, the input embedding (a lookup), the norms of DoRA, and whatever
is computed a second time to save memory, by activation recomputation or by flash attention's backward pass. A window
that layers attend to is not known here: sequences that are longer than it are counted as if they had none.
"""

from __future__ import annotations

import re

import attrs

from ckptrain.config.linear import features, is_expert
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import Targets

# Dense bfloat16 TFLOP/s with float32 accumulation, of NVIDIA's data sheets (where they print the rate with sparsity,
# half of it), by a word of the name that the driver gives; the first that is found counts.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"H200 NVL", 835.5),
    (r"H200", 989.4),
    (r"GH200", 989.4),
    (r"H100 PCIe", 756.5),
    (r"H100 NVL", 835.5),
    (r"H100", 989.4),
    (r"H800 PCIe", 756.5),
    (r"H800", 989.4),
    (r"H20", 148.0),
    (r"A100(-\w+)*", 312.0),
    (r"A800(-\w+)*", 312.0),
    (r"L40S", 362.05),
    (r"L4", 121.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
)


@attrs.frozen(kw_only=True)
class TrainingFlops:
    """FLOPs of forward and backward of LoRA training, by what there is a number of in a step."""

    per_token: int
    """Of the decoder's linear layers and their adapters."""
    per_learnt_token: int
    """Of the output layer."""
    per_pair: int
    """Of attention, for a token and one that it sees, itself included, in all layers."""

    def of(self, *, tokens: int, learnt_tokens: int, attended_pairs: int) -> int:
        """Return the FLOPs of so much."""
        return tokens * self.per_token + learnt_tokens * self.per_learnt_token + attended_pairs * self.per_pair

    def of_token(self, sequence_length: int) -> float:
        """Return the FLOPs of a token of sequences of this length in which everything is learnt."""
        pairs = causal_pairs(sequence_length)
        return self.of(tokens=sequence_length, learnt_tokens=sequence_length, attended_pairs=pairs) / sequence_length


def causal_pairs(sequence_length: int) -> int:
    """Return how many pairs of a token and one that it sees there are in a sequence."""
    return sequence_length * (sequence_length + 1) // 2


def training_flops(shape: ModelShape, lora: LoraConfig, targets: Targets) -> TrainingFlops:
    """Count the FLOPs of training adapters of `targets` on a model of this shape."""
    return TrainingFlops(
        per_token=4 * shape.num_layers * _linear_parameters(shape) + 6 * _adapter_parameters(shape, lora, targets),
        per_learnt_token=4 * shape.embedding_parameters,
        per_pair=12 * shape.num_layers * shape.num_heads * shape.head_dim,
    )


def peak_flops_per_s(device_name: str) -> float | None:
    """Return what a GPU can do of dense bfloat16 products, by the name that its driver gives; None if unknown."""
    if "MIG" in device_name:  # a slice of one
        return None
    for name, tflops in _PEAK_TFLOPS:
        if re.search(rf"(?<![\w-]){name}(?![\w-])", device_name):
            return tflops * 1e12
    return None


def _linear_parameters(shape: ModelShape) -> int:
    """Count the weights of one layer that a token is multiplied with."""
    hidden = shape.hidden_size
    attention = hidden * shape.qkv_size + shape.num_heads * shape.head_dim * hidden
    if not shape.num_experts:
        return attention + 3 * hidden * shape.ffn_hidden_size
    router = hidden * shape.num_experts
    return attention + router + shape.experts_per_token * 3 * hidden * shape.moe_ffn_hidden_size


def _adapter_parameters(shape: ModelShape, lora: LoraConfig, targets: Targets) -> int:
    """Count the weights of adapters that a token is multiplied with, in all layers."""
    return sum(
        lora.dim * sum(features(shape, module)) * (shape.experts_per_token if is_expert(module) else 1)
        for module in targets.modules
    )
