"""Between Megatron's layers and the Hugging Face layers that they hold: names and rows of LoRA matrices, no model.

Megatron computes q, k and v in one layer and gate and up in another. An adapter of a fused layer has one A for all of
its parts and a B whose rows are theirs, so each part gets a copy of A and its own rows of B; nothing is computed, and
the result has the same bits. The way back needs parts that agree on A. Where the parts have adapters of their own, only
names differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ckptrain.config.linear import features
from ckptrain.config.modules import FUSED, PARTS, fused_name, split_names
from ckptrain.config.shape import ModelShape

_EXPERTS = "mlp.experts"  # in both notations
# (place in a layer, Megatron's short name of the whole layer) -> the place in a Hugging Face layer.
_HF_PLACES = {
    ("self_attention", "linear_qkv"): "self_attn",
    ("self_attention", "linear_proj"): "self_attn",
    ("mlp", "linear_fc1"): "mlp",
    ("mlp", "linear_fc2"): "mlp",
    (_EXPERTS, "linear_fc1"): _EXPERTS,
    (_EXPERTS, "linear_fc2"): _EXPERTS,
}
_MODULE = re.compile(r"decoder\.layers\.(\d+)\.([\w.]+)\.(\w+)", re.ASCII)


@attrs.frozen(kw_only=True)
class Module:
    """What can carry an adapter in Megatron, by its global name, and what it is called in Hugging Face models."""

    name: str
    layer: int
    place: str
    short: str

    @property
    def is_expert(self) -> bool:
        """Tell whether it stands for all experts of its layer."""
        return self.place == _EXPERTS

    def parts(self, expert: int | None = None) -> tuple[str, ...]:
        """Return the full Hugging Face names of the layers that it holds, in the order of `unfuse_rows`."""
        place = _HF_PLACES[self.place, fused_name(self.short)] + ("" if expert is None else f".{expert}")
        return tuple(f"model.layers.{self.layer}.{place}.{part}" for part in PARTS[self.short])

    def experts(self, shape: ModelShape) -> Sequence[int | None]:
        """Return the numbers of the experts that it stands for; a single None where there are none."""
        return range(shape.num_experts) if self.is_expert else (None,)


def parse_module(name: str) -> Module | None:
    """Return what a global Megatron name means, or None where Hugging Face has no layer for it."""
    found = _MODULE.fullmatch(name)
    if found is None or found[3] not in PARTS or (found[2], fused_name(found[3])) not in _HF_PLACES:
        return None
    return Module(name=name, layer=int(found[1]), place=found[2], short=found[3])


def huggingface_layers(module: Module, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of each Hugging Face layer that a module holds, by full name."""
    place = module.name.removesuffix(module.short)
    names = split_names(module.short) if module.short in FUSED else {PARTS[module.short][0]: module.short}
    sizes = [features(shape, place + names[part]) for part in PARTS[module.short]]
    return {
        layer: size for expert in module.experts(shape) for layer, size in zip(module.parts(expert), sizes, strict=True)
    }


def missing_beside(modules: Sequence[Module], shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return experts' layers that PEFT expects to be adapted where any are, as `huggingface_layers` does.

    It adapts the stacked experts of all layers or of none, keeps down's adapter outside that of gate and up, and joins
    those two: where one is not there, the others are dropped on loading, with no more than a warning
    (peft.utils.transformers_weight_conversion, build_peft_weight_mapping). Adapters of zeros go in their place.
    """
    adapted = {layer for module in modules if module.is_expert for layer in huggingface_layers(module, shape)}
    if not adapted:
        return {}
    every: dict[str, tuple[int, int]] = {}
    for layer in range(shape.num_layers):
        for short in ("linear_fc1", "linear_fc2"):
            name = f"decoder.layers.{layer}.{_EXPERTS}.{short}"
            every |= huggingface_layers(Module(name=name, layer=layer, place=_EXPERTS, short=short), shape)
    return {layer: size for layer, size in every.items() if layer not in adapted}


def unfuse_rows(short: str, matrix: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Split the rows of a layer's matrix into those of its parts.

    linear_qkv has a block of rows for each key-value head: the query heads that share it, then its key, then its value
    (megatron-core's SelfAttention.get_query_key_value_tensors); linear_fc1 has gate, then up.

    Args:
        short: the layer's Megatron name without its place.
        matrix: [out_features, columns].
        shape: of the model.

    Returns:
        [rows of the part, columns] each, in the order of `PARTS`; views where the rows of a part lie together.
    """
    if short == "linear_qkv":
        columns, shared = matrix.shape[1], shape.num_heads // shape.num_kv_heads
        blocks = matrix.view(shape.num_kv_heads, shared + 2, shape.head_dim, columns)
        return tuple(part.reshape(-1, columns) for part in blocks.split([shared, 1, 1], dim=1))
    return tuple(matrix.chunk(len(PARTS[short])))


def fuse_rows(short: str, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Put the rows of a layer's parts together: the inverse of `unfuse_rows`.

    Args:
        short: the layer's Megatron name without its place.
        parts: [rows of the part, columns] each, in the order of `PARTS`.
        shape: of the model.

    Returns:
        [out_features, columns], a copy where there are several parts.
    """
    if short == "linear_qkv":
        blocks = [part.view(shape.num_kv_heads, -1, part.shape[1]) for part in parts]
        return torch.cat(blocks, dim=1).reshape(-1, parts[0].shape[1])
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def unfuse(module: Module, lora_a: Tensor, lora_b: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, A, B) of each Hugging Face layer that a module holds; A may be the same tensor in several.

    Args:
        module: the adapted module.
        lora_a: [rank, in_features]; of experts [experts, rank, in_features].
        lora_b: [out_features, rank]; of experts [experts, out_features, rank].
        shape: of the model.
    """
    for expert in module.experts(shape):
        a, b = (lora_a, lora_b) if expert is None else (lora_a[expert], lora_b[expert])
        for part, rows in zip(module.parts(expert), unfuse_rows(module.short, b, shape), strict=True):
            yield part, a, rows


def fuse(module: Module, halves: Mapping[str, tuple[Tensor, Tensor]], shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return A and B of a module from those of the Hugging Face layers that it holds: the inverse of `unfuse`.

    Args:
        module: the module; where it holds several parts, they must have the same A.
        halves: (A, B) by full Hugging Face name.
        shape: of the model.
    """
    fused = []
    for expert in module.experts(shape):
        parts = [halves[part] for part in module.parts(expert)]
        fused.append((parts[0][0], fuse_rows(module.short, [b for _, b in parts], shape)))
    if not module.is_expert:
        return fused[0]
    return torch.stack([a for a, _ in fused]), torch.stack([b for _, b in fused])


def target_modules(modules: Sequence[Module], shape: ModelShape) -> tuple[str, ...]:
    """Return what PEFT is to adapt: short names where all layers have the adapter, otherwise every full name.

    PEFT adapts every layer whose name ends with a target, so a short name would give the layers that were left out
    adapters too, which have no weights to load.
    """
    layers: dict[tuple[str, str], set[int]] = {}
    for module in modules:
        layers.setdefault((module.place, module.short), set()).add(module.layer)
    beside = list(missing_beside(modules, shape))
    if all(len(adapted) == shape.num_layers for adapted in layers.values()):
        short = {part for _, short in layers for part in PARTS[short]}
        return tuple(sorted(short | {name.rpartition(".")[2] for name in beside}))
    return tuple(sorted([name for module in modules for name in huggingface_layers(module, shape)] + beside))
