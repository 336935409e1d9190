"""How wide is a linear layer, and what are the tensors of its adapter called? By its global Megatron name."""

from __future__ import annotations

from collections import Counter

from ckptrain.config.modules import SPLIT, fused_name
from ckptrain.config.shape import ModelShape

LORA_A, LORA_B = "linear_in", "linear_out"
MAGNITUDE = "magnitude"
MAGNITUDE_DTYPE = "float32"
"""Whatever type A and B have: the steps of a magnitude, which is as large as a row of the base, are small beside it."""


def features(shape: ModelShape, module: str) -> tuple[int, int]:
    """Return (in_features, out_features) of what a name such as `decoder.layers.0.mlp.linear_fc1` stands for."""
    ffn = shape.moe_ffn_hidden_size if is_expert(module) else shape.ffn_hidden_size
    heads, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "linear_qkv": (shape.hidden_size, shape.qkv_size),
        "linear_q": (shape.hidden_size, heads),
        "linear_k": (shape.hidden_size, key_value),
        "linear_v": (shape.hidden_size, key_value),
        "linear_proj": (heads, shape.hidden_size),
        "linear_fc1": (shape.hidden_size, 2 * ffn),
        "linear_fc1_gate": (shape.hidden_size, ffn),
        "linear_fc1_up": (shape.hidden_size, ffn),
        "linear_fc2": (ffn, shape.hidden_size),
    }[module.rpartition(".")[2]]


def is_expert(module: str) -> bool:
    """Tell whether a name stands for all experts of a layer."""
    return ".experts." in module


def adapter_name(module: str) -> str:
    """Return what Megatron calls the adapter of a module; that of a part lies within the fused layer's."""
    place, _, short = module.rpartition(".")
    within = f".{SPLIT[short].adapter}" if short in SPLIT else ""
    return f"{place}.{fused_name(short)}.adapter{within}"


def weight_names(module: str) -> tuple[str, str]:
    """Return the global names of a module's A and B."""
    adapter = adapter_name(module)
    return f"{adapter}.{LORA_A}.weight", f"{adapter}.{LORA_B}.weight"


def weight_shapes(module: str, rank: int, shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the global shapes of a module's A, [rank, in_features], and B, [out_features, rank].

    Those of experts have an axis for the experts before these.
    """
    in_features, out_features = features(shape, module)
    experts = (shape.num_experts,) if is_expert(module) else ()
    return (*experts, rank, in_features), (*experts, out_features, rank)


def magnitude_name(module: str) -> str:
    """Return the global name of a module's magnitudes, which it has where its adapter is DoRA."""
    return f"{adapter_name(module)}.{MAGNITUDE}"


def magnitude_shape(module: str, shape: ModelShape) -> tuple[int, ...]:
    """Return the global shape of a module's magnitudes, [out_features]."""
    return (features(shape, module)[1],)


def is_magnitude(name: str) -> bool:
    """Tell whether a tensor of an adapter is one of magnitudes, by its name."""
    return name.endswith(f".{MAGNITUDE}")


def short_names(modules: tuple[str, ...], shape: ModelShape) -> tuple[str, ...]:
    """Return how `lora.target_modules` names modules: short where all layers have them, otherwise every full name."""
    layers = Counter(module.rpartition(".")[2] for module in modules)
    return tuple(layers) if all(count == shape.num_layers for count in layers.values()) else modules
