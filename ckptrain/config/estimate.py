"""How much will it take? Bytes of a checkpoint, exactly, and bytes of memory, estimated from the shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from ckptrain.config.activations import Ranks, angle_bytes, layer_memory, loss_bytes, padded
from ckptrain.config.fusion import AssumedLayers, assumed_layers
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
from ckptrain.config.modules import COLUMN_PARALLEL, FUSED, fused_name
from ckptrain.config.schema import LoraConfig, RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import Targets

_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT32 = 4
# Of cuBLAS on Hopper (4 to 8 MiB before), 32 MiB each: torch keeps one for a thread and stream, and the backward pass
# has a thread of its own (docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces); Transformer Engine has
# another (transformer_engine/pytorch/cpp_extensions/gemm.py, get_cublas_workspace_size_bytes).
_WORKSPACES = 3 * 32 * 2**20


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
    """Estimated bytes on the process that holds most, at the moment when they are most."""

    base_weights: int
    adapter: int
    adapter_copy: int
    """What fused layers hold beside the frozen weights (`ckptrain.megatron.fused.weight`)."""
    gradients: int
    optimizer: int
    activations: int
    """Those that the forward pass keeps for the backward pass."""
    logits: int
    """With the hidden states around them; 0 where the peak is not at the loss."""
    layer: int
    """What one layer takes for a moment; 0 where the peak is at the loss."""
    workspaces: int
    """Of libraries."""

    @property
    def total(self) -> int:
        """All of them together."""
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

    On a GPU with Transformer Engine, unless `model.backend` is local (`fusion.assumed_layers`); of micro-batches of
    full rows in which every token is learnt. It is what torch counts as allocated: its allocator reserves more, and
    what the driver and NCCL take is not known to it.

    What is there all the time, with t, p, e the tensor, pipeline and expert sizes, w bytes a value, L = layers / p:

    - base weights: w (L (dense / t + experts / e) + embedding / t on the first stage and on the last); with
      `model.fp8` the decoder's linear layers take one byte a value, and a float32 for each row and column;
    - adapter: all of its tensors are split by t (see `layout_of`), experts' by e, but for magnitudes of layers that
      split their input; gradients are float32, and the optimizer holds two float32 moments and, for bfloat16, a master;
      fused layers hold a copy of all A and B beside the weights, r (in + out) + r^2 values for a joint rank r.

    What the forward pass keeps, for each of the min(m, p - stage) micro-batches in flight of the 1F1B schedule, is in
    `activations`. On top of it comes either what the loss takes, on the last stage, or what one layer takes; the peak
    is where that is more. docs/memory.md has all of it beside what was measured.
    """
    layers = assumed_layers(config, shape, layout)
    stages = [_stage_memory(config, shape, layout, targets, layers, stage) for stage in {0, layout.pipeline - 1}]
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(
    config: RunConfig, shape: ModelShape, layout: Layout, targets: Targets, assumed: AssumedLayers, stage: int
) -> Memory:
    width = _BYTES[config.model.dtype]
    arithmetic = batch_arithmetic(config, layout)
    layers = shape.num_layers // layout.pipeline
    own_layers = range(stage * layers, (stage + 1) * layers)
    tokens = arithmetic.tokens_per_micro_batch_max // layout.context
    in_flight = min(arithmetic.micro_batches_per_rank, layout.pipeline - stage)
    values = _local_adapter_values(adapter_tensors(shape, config.lora, targets), layout, own_layers)
    adapter = _bytes_of(values, _adapter_dtype(config))
    ranks = {layer: found for layer, found in _ranks(config.lora, targets).items() if layer in own_layers}
    most = max(ranks.values(), key=lambda found: sum(found.values()), default={})
    of_layer = layer_memory(config, shape, layout, assumed, ranks=most, tokens=tokens, value=width)
    kept = in_flight * (_layers_that_learn(config, own_layers, targets) * of_layer.kept + angle_bytes(shape, tokens))
    # One layer's gradients are of the adapters' type until they are added to those of float32.
    momentary = of_layer.momentary + adapter.adapter // layers
    is_last = stage == layout.pipeline - 1
    loss = loss_bytes(shape, layout, assumed, tokens=tokens, value=width) if is_last else 0
    return Memory(
        base_weights=_base_bytes(config, shape, layout, stage),
        adapter=adapter.adapter,
        adapter_copy=_copy_bytes(shape, ranks, width, in_8_bits=_in_8_bits(config)) if assumed.choice.fused else 0,
        gradients=sum(values.values()) * _FLOAT32,
        optimizer=adapter.optimizer,
        activations=kept,
        logits=loss if loss >= momentary else 0,
        layer=momentary if loss < momentary else 0,
        workspaces=_WORKSPACES if assumed.gpu else 0,
    )


def _base_bytes(config: RunConfig, shape: ModelShape, layout: Layout, stage: int) -> int:
    first, last = stage == 0, stage == layout.pipeline - 1
    embeddings = 1 if first != last or shape.tied_embeddings else 2
    layers = shape.num_layers // layout.pipeline
    weights = layers * (shape.dense_layer_parameters // layout.tensor + shape.expert_parameters // layout.expert)
    weights += embeddings * shape.embedding_parameters // layout.tensor
    width = _BYTES[config.model.dtype]
    if not _in_8_bits(config):
        return weights * width
    sizes = [features(shape, name) for name in FUSED]
    linear = sum(inputs * outputs for inputs, outputs in sizes)
    scales = sum(inputs + outputs for inputs, outputs in sizes)
    return weights * width - layers * (linear * (width - 1) - scales * _FLOAT32)


def _in_8_bits(config: RunConfig) -> bool:
    return config.model.fp8 is not None


def _copy_bytes(shape: ModelShape, ranks: Mapping[int, Ranks], width: int, *, in_8_bits: bool) -> int:
    """Count what the fused layers hold beside the frozen weights; in 8 bits A and B are tensors of their own."""
    values = 0
    for found in ranks.values():
        for name in found:
            rank = padded(found, name)
            values += rank * (sum(features(shape, name)) + (0 if in_8_bits else rank))
    return values * width


def _ranks(lora: LoraConfig, targets: Targets) -> dict[int, Ranks]:
    """Return the joint rank of each adapted module, by layer and short name."""
    found: dict[int, dict[str, int]] = {}
    for module in targets.modules:
        ranks = found.setdefault(_layer_of(module), {})
        name = fused_name(module.rpartition(".")[2])
        ranks[name] = ranks.get(name, 0) + lora.dim
    return dict(found)


def _layers_that_learn(config: RunConfig, own_layers: range, targets: Targets) -> int:
    """Count a stage's layers that keep something: nothing has a gradient before the first adapter of the model.

    Where a layer is computed again, its input gets one in any case (`ckptrain.megatron.model`).
    """
    if config.train.recompute != "none":
        return len(own_layers)
    first = min(map(_layer_of, targets.modules))
    return sum(layer >= first for layer in own_layers)


def _layer_of(name: str) -> int:
    """Return the number of the layer that a module or its adapter lies in."""
    return int(name.split(".")[2])


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
        name: math.prod(size) // _split(name, layout) for name, size in tensors.items() if _layer_of(name) in layers
    }


def _split(name: str, layout: Layout) -> int:
    """Return over how many processes an adapter tensor is split."""
    if is_expert(name):
        return layout.expert
    # Where a layer splits its input, every process has all of its output.
    whole = is_magnitude(name) and not any(f".{layer}." in name for layer in COLUMN_PARALLEL)
    return 1 if whole else layout.tensor
