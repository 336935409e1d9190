"""From Megatron's fused layers to the Hugging Face layers they hold: the names and rows of LoRA matrices, no model.

Megatron computes q, k and v in one layer and gate and up in another. An adapter of a fused layer has one A for all of
its parts and a B whose rows are theirs, so each part gets a copy of A and its own rows of B; nothing is computed, and
the result has the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ckptrain.config.modules import FUSED
from ckptrain.config.shape import ModelShape

_EXPERTS = "mlp.experts"  # in both notations
# (place in a layer, Megatron's short name) -> the place in a Hugging Face layer.
_HF_PLACES = {
    ("self_attention", "linear_qkv"): "self_attn",
    ("self_attention", "linear_proj"): "self_attn",
    ("mlp", "linear_fc1"): "mlp",
    ("mlp", "linear_fc2"): "mlp",
    (_EXPERTS, "linear_fc1"): _EXPERTS,
    (_EXPERTS, "linear_fc2"): _EXPERTS,
}
_MODULE = re.compile(r"decoder\.layers\.(\d+)\.([\w.]+)\.(\w+)", re.ASCII)
# A weight that every layer has is stored as one tensor, [layers, ...], under a name without a number.
_ALL_LAYERS = re.compile(r"decoder\.layers\.(?=[^.\d])")
# megatron-core stacks a layer's experts in one tensor, [experts, ...], and names the module within the module.
_STACKED_EXPERTS = re.compile(r"(?<=\.mlp)\.experts\.experts(?=\.)")
_ADAPTER = re.compile(r"(.+)\.adapter\.linear_(in|out)\.weight")


@attrs.frozen(kw_only=True)
class Module:
    """A Megatron layer that can carry an adapter, by its global name, and what it is called in Hugging Face models."""

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
        place = _HF_PLACES[self.place, self.short] + ("" if expert is None else f".{expert}")
        return tuple(f"model.layers.{self.layer}.{place}.{part}" for part in FUSED[self.short])

    def sizes(self, shape: ModelShape) -> tuple[int, int]:
        """Return (in_features, out_features) in a model of this shape."""
        ffn = shape.moe_ffn_hidden_size if self.is_expert else shape.ffn_hidden_size
        return {
            "linear_qkv": (shape.hidden_size, shape.qkv_size),
            "linear_proj": (shape.num_heads * shape.head_dim, shape.hidden_size),
            "linear_fc1": (shape.hidden_size, 2 * ffn),
            "linear_fc2": (ffn, shape.hidden_size),
        }[self.short]


def parse_module(name: str) -> Module | None:
    """Return the layer that a global Megatron name means, or None where Hugging Face has no layer for it."""
    found = _MODULE.fullmatch(name)
    if found is None or (found[2], found[3]) not in _HF_PLACES:
        return None
    return Module(name=name, layer=int(found[1]), place=found[2], short=found[3])


def by_layer(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint stores as tensors of one layer each, by global name; they are views."""
    layers: dict[str, Tensor] = {}
    for stored_name, tensor in stored.items():
        name = _STACKED_EXPERTS.sub(".experts", stored_name)
        if tensor.ndim and _ALL_LAYERS.match(name):
            layers |= {_ALL_LAYERS.sub(f"decoder.layers.{n}.", name): view for n, view in enumerate(tensor.unbind())}
        else:
            layers[name] = tensor
    return layers


def adapter_problems(adapter: Mapping[str, Tensor], modules: Sequence[str], rank: int, shape: ModelShape) -> list[str]:
    """Return why the tensors, by their names and shapes, are not LoRA of `rank` on exactly `modules`.

    Args:
        adapter: as `by_layer` gives it; the values are not looked at.
        modules: the global names of the adapted modules, as the manifest has them.
        rank: the rank of every adapter.
        shape: of the base model.
    """
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        return [f"the base has {shape.num_heads} heads, which {shape.num_kv_heads} key-value heads cannot share evenly"]
    problems: list[str] = []
    expected: dict[str, tuple[int, ...]] = {}
    for name in modules:
        module = parse_module(name)
        if module is None:
            problems.append(f"{name} is adapted, and Hugging Face has no layer that corresponds to it")
        elif module.layer >= shape.num_layers:
            problems.append(f"{name} is adapted, and the base has {shape.num_layers} layers")
        elif module.short in ("linear_fc1", "linear_fc2") and module.is_expert != bool(shape.num_experts):
            problems.append(f"{name} is adapted, and the base has {shape.num_experts} experts in a layer")
        else:
            expected |= _expected_shapes(module, rank, shape)
    problems += [f"{name} is missing" for name in expected if name not in adapter]
    problems += [
        f"{name} is {list(adapter[name].shape)}, expected {list(size)}"
        for name, size in expected.items()
        if name in adapter and tuple(adapter[name].shape) != size
    ]
    known = {f"{name}.adapter.linear_{half}.weight" for name in modules for half in ("in", "out")}
    problems += [f"{name} is not part of a LoRA adapter of the modules listed" for name in adapter if name not in known]
    return problems


def _expected_shapes(module: Module, rank: int, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    in_features, out_features = module.sizes(shape)
    experts = (shape.num_experts,) if module.is_expert else ()
    return {
        f"{module.name}.adapter.linear_in.weight": (*experts, rank, in_features),
        f"{module.name}.adapter.linear_out.weight": (*experts, out_features, rank),
    }


def fill_in_experts(
    modules: Mapping[str, Module], adapter: Mapping[str, Tensor], rank: int, shape: ModelShape
) -> tuple[dict[str, Module], dict[str, Tensor]]:
    """Add adapters of zeros for the experts' down_proj where only their gate_proj and up_proj are adapted.

    PEFT keeps the adapters of stacked experts one inside the other, and expects down's to be the outer: without it,
    those of gate and up are dropped on loading, with no more than a warning (peft.utils.transformers_weight_conversion,
    build_peft_weight_mapping).
    """
    experts = [module for module in modules.values() if module.is_expert]
    filled_modules, filled_adapter = dict(modules), dict(adapter)
    if any(module.short == "linear_fc2" for module in experts):
        return filled_modules, filled_adapter
    for beside in experts:
        down = attrs.evolve(beside, name=f"{beside.name.removesuffix(beside.short)}linear_fc2", short="linear_fc2")
        filled_modules[down.name] = down
        filled_adapter |= {name: torch.zeros(size) for name, size in _expected_shapes(down, rank, shape).items()}
    return filled_modules, filled_adapter


def unfuse_rows(short: str, matrix: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Split the rows of a fused layer's matrix into those of its parts.

    linear_qkv has a block of rows for each key-value head: the query heads that share it, then its key, then its value
    (megatron-core's SelfAttention.get_query_key_value_tensors); linear_fc1 has gate, then up.

    Args:
        short: the layer's Megatron name without its place.
        matrix: [out_features, columns].
        shape: of the model.

    Returns:
        [rows of the part, columns] each, in the order of `FUSED`; views where the rows of a part lie together.
    """
    if short == "linear_qkv":
        columns, shared = matrix.shape[1], shape.num_heads // shape.num_kv_heads
        blocks = matrix.view(shape.num_kv_heads, shared + 2, shape.head_dim, columns)
        return tuple(part.reshape(-1, columns) for part in blocks.split([shared, 1, 1], dim=1))
    return tuple(matrix.chunk(len(FUSED[short])))


def pair_up(adapter: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) by the global name of the module that they adapt, in order of layer and name."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        found = _ADAPTER.fullmatch(name)
        assert found is not None, name  # adapter_problems has seen to it
        halves.setdefault(found[1], {})[found[2]] = tensor
    order = sorted(halves, key=lambda name: (int(name.split(".")[2]), name))
    return {name: (halves[name]["in"], halves[name]["out"]) for name in order}


def unfuse(module: Module, lora_a: Tensor, lora_b: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield the LoRA matrices of the Hugging Face layers that a module holds, by name; A may be the same tensor in all.

    Args:
        module: the adapted module.
        lora_a: `linear_in`, [rank, in_features]; of experts [experts, rank, in_features].
        lora_b: `linear_out`, [out_features, rank]; of experts [experts, out_features, rank].
        shape: of the model.
    """
    if module.is_expert:
        cases = [(module.parts(expert), lora_a[expert], lora_b[expert]) for expert in range(shape.num_experts)]
    else:
        cases = [(module.parts(), lora_a, lora_b)]
    for parts, a, b in cases:
        for part, rows in zip(parts, unfuse_rows(module.short, b, shape), strict=True):
            yield f"{part}.lora_A.weight", a
            yield f"{part}.lora_B.weight", rows


def target_modules(modules: Sequence[Module], shape: ModelShape) -> tuple[str, ...]:
    """Return what PEFT is to adapt: short names where all layers have the adapter, otherwise every full name.

    PEFT adapts every layer whose name ends with a target, so a short name would give the layers that were left out
    adapters too, which have no weights to load.
    """
    layers: dict[tuple[str, str], set[int]] = {}
    for module in modules:
        layers.setdefault((module.place, module.short), set()).add(module.layer)
    if all(len(adapted) == shape.num_layers for adapted in layers.values()):
        return tuple(sorted({part for _, short in layers for part in FUSED[short]}))
    experts = range(shape.num_experts)
    names = [
        name
        for module in modules
        for name in ([part for e in experts for part in module.parts(e)] if module.is_expert else module.parts())
    ]
    return tuple(sorted(names))
