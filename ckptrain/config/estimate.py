"""How much will it take? Bytes of a checkpoint, exactly, and bytes of memory, estimated from the shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from ckptrain.config.layout import Layout, batch_arithmetic
from ckptrain.config.linear import (
    MAGNITUDE_DTYPE,
    features,
    is_expert,
    is_magnitude,
    magnitude_name,
    magnitude_shape,
    weight_names,
)
from ckptrain.config.modules import COLUMN_PARALLEL
from ckptrain.config.schema import LoraConfig, RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import Targets

_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT32 = 4


@attrs.frozen(kw_only=True)
class CheckpointBytes:
    """Bytes of tensors in one checkpoint; file headers and the manifest come on top, some hundred bytes a tensor."""

    adapter: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.adapter + self.optimizer


@attrs.frozen(kw_only=True)
class Memory:
    """Estimated bytes on the process that holds most; what libraries, fragments and buffers take comes on top."""

    base_weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of them together, as if every term had its peak at once."""
        return sum(attrs.astuple(self))


def adapter_tensors(shape: ModelShape, lora: LoraConfig, targets: Targets) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every adapter tensor under its Megatron name.

    A (`linear_in.weight`) is `[dim, in_features]`, B (`linear_out.weight`) `[out_features, dim]`, the magnitudes of
    DoRA `[out_features]`. Every expert has an adapter of its own, as PEFT has it.
    """
    tensors: dict[str, tuple[int, ...]] = {}
    for module in targets.modules:
        in_features, out_features = features(shape, module)
        place, _, short = module.rpartition(".")
        names = [module]
        if is_expert(module):
            names = [f"{place}.local_experts.{expert}.{short}" for expert in range(shape.num_experts)]
        for lora_a, lora_b in map(weight_names, names):
            tensors[lora_a] = (lora.dim, in_features)
            tensors[lora_b] = (out_features, lora.dim)
        if lora.has_magnitudes:
            tensors[magnitude_name(module)] = magnitude_shape(module, shape)
    return tensors


def checkpoint_bytes(config: RunConfig, shape: ModelShape, targets: Targets) -> CheckpointBytes:
    """Count the bytes of the tensors in a checkpoint, over all processes.

    The adapter in its own type (magnitudes are float32); two float32 moments for each of its values, and a float32
    master where it is bfloat16.
    """
    tensors = adapter_tensors(shape, config.lora, targets)
    return _bytes_of({name: math.prod(size) for name, size in tensors.items()}, _adapter_dtype(config))


def memory_estimate(config: RunConfig, shape: ModelShape, layout: Layout, targets: Targets) -> Memory:
    """Estimate a process's memory while it trains, of the pipeline stage that needs most: first or last.

    With t, p, e the tensor, pipeline and expert sizes, T = micro_batch_size x sequence_length / context tokens, w bytes
    a value of the model's type, and L = layers / p:

    - base weights: w (L (dense / t + experts / e) + embedding / t on the first stage and on the last); a layer's norms
      are not split, and too small to tell apart here;
    - adapter: all of its tensors are split by t (see `layout_of`), experts' by e, but for magnitudes of layers that
      split their input; gradients are float32, and the optimizer holds two float32 moments and, for bfloat16, a master;
    - activations: those that the backward pass reads, for each of the min(m, p - stage) micro-batches in flight of the
      1F1B schedule, counted operator by operator as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4), for the
      gated MLP and without recomputation (`_layer_activation_values`);
    - logits: T V / t values in w bytes, in float32 for the softmax, and again in w as their gradient.

    An estimate: allocators round up, kernels have workspaces, and Transformer Engine keeps or fuses away copies.
    """
    stages = [_stage_memory(config, shape, layout, targets, stage) for stage in {0, layout.pipeline - 1}]
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(config: RunConfig, shape: ModelShape, layout: Layout, targets: Targets, stage: int) -> Memory:
    width = _BYTES[config.model.dtype]
    arithmetic = batch_arithmetic(config, layout)
    layers = shape.num_layers // layout.pipeline
    first, last = stage == 0, stage == layout.pipeline - 1
    tokens = arithmetic.tokens_per_micro_batch_max // layout.context
    embeddings = 1 if first != last or shape.tied_embeddings else 2
    weights = layers * (shape.dense_layer_parameters // layout.tensor + shape.expert_parameters // layout.expert)
    weights += embeddings * shape.embedding_parameters // layout.tensor
    own_layers = range(stage * layers, (stage + 1) * layers)
    values = _local_adapter_values(adapter_tensors(shape, config.lora, targets), layout, own_layers)
    adapter = _bytes_of(values, _adapter_dtype(config))
    in_flight = min(arithmetic.micro_batches_per_rank, layout.pipeline - stage)
    layer = _layer_activation_values(config, shape, layout, tokens)
    logits = tokens * shape.vocab_size // layout.tensor * (2 * width + _FLOAT32) if last else 0
    return Memory(
        base_weights=weights * width,
        adapter=adapter.adapter,
        gradients=sum(values.values()) * _FLOAT32,
        optimizer=adapter.optimizer,
        activations=in_flight * layers * layer * width,
        logits=logits,
    )


def _layer_activation_values(config: RunConfig, shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Count the values that one layer keeps for the backward pass of `tokens` tokens.

    Whole on each process (or split by t under sequence parallelism): the inputs of both norms and of both
    column-parallel layers, 4 x hidden. Split by t: q, k, v and the attention's output; gate, up, silu(gate) and their
    product, 4 x MLP width (each token visits `experts_per_token` experts). Attention keeps no scores, but for the
    families that `ModelShape.keeps_scores` names: two of every head and pair of tokens, of sequences as long as a row.
    """
    whole = 4 * shape.hidden_size
    attention = shape.qkv_size + shape.num_heads * shape.head_dim
    if shape.num_experts:
        # The dispatcher's copy of each token's hidden state, one for each expert that it visits.
        mlp = shape.experts_per_token * (4 * shape.moe_ffn_hidden_size + shape.hidden_size) * layout.tensor
    else:
        mlp = 4 * shape.ffn_hidden_size
    scores = 2 * shape.num_heads * config.data.sequence_length if shape.keeps_scores else 0
    whole_split = layout.tensor if config.parallel.sequence else 1
    return tokens * (whole // whole_split + (attention + mlp + scores) // layout.tensor)


def _adapter_dtype(config: RunConfig) -> str:
    return config.lora.lora_dtype or config.model.dtype


def _bytes_of(values: Mapping[str, int], dtype: str) -> CheckpointBytes:
    """Return the bytes of so many values of each adapter tensor, and those that the optimizer has for them.

    That is two moments, and a master for what is not float32 itself.
    """
    adapter = optimizer = 0
    for name, count in values.items():
        width = _BYTES[MAGNITUDE_DTYPE if is_magnitude(name) else dtype]
        adapter += count * width
        optimizer += count * (2 * _FLOAT32 + (_FLOAT32 if width < _FLOAT32 else 0))
    return CheckpointBytes(adapter=adapter, optimizer=optimizer)


def _local_adapter_values(tensors: Mapping[str, tuple[int, ...]], layout: Layout, layers: range) -> dict[str, int]:
    """Count the values of each adapter tensor that one process of a stage with these layers holds."""
    return {
        name: math.prod(size) // _split(name, layout)
        for name, size in tensors.items()
        if int(name.split(".")[2]) in layers
    }


def _split(name: str, layout: Layout) -> int:
    """Return over how many processes an adapter tensor is split."""
    if is_expert(name):
        return layout.expert
    # Where a layer splits its input, every process has all of its output.
    whole = is_magnitude(name) and not any(f".{layer}." in name for layer in COLUMN_PARALLEL)
    return 1 if whole else layout.tensor
