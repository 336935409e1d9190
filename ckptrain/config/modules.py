"""What are the linear layers called? Megatron's names, and the Hugging Face names of the parts that each one fuses."""

from __future__ import annotations

import attrs

# Megatron's short name -> the Hugging Face layers that it holds.
FUSED: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


@attrs.frozen(kw_only=True)
class Split:
    """A part of a fused layer that has an adapter of its own, as Megatron-Bridge's CanonicalLoRA names it."""

    layer: str
    """Megatron's short name of the fused layer."""
    part: str
    """The Hugging Face layer."""
    adapter: str
    """What its adapter is called within that of the fused layer."""


# Short name -> what it is, in the order of the fused layers' parts.
SPLIT: dict[str, Split] = {
    "linear_q": Split(layer="linear_qkv", part="q_proj", adapter="adapter_q"),
    "linear_k": Split(layer="linear_qkv", part="k_proj", adapter="adapter_k"),
    "linear_v": Split(layer="linear_qkv", part="v_proj", adapter="adapter_v"),
    "linear_fc1_gate": Split(layer="linear_fc1", part="gate_proj", adapter="adapter_gate"),
    "linear_fc1_up": Split(layer="linear_fc1", part="up_proj", adapter="adapter_up"),
}
# Short name of whatever can be adapted -> the Hugging Face layers that it stands for.
PARTS: dict[str, tuple[str, ...]] = {**FUSED, **{name: (split.part,) for name, split in SPLIT.items()}}
ALL_LINEAR = "all-linear"
MODULE_NAMES: tuple[str, ...] = (
    *FUSED,
    *SPLIT,
    *(part for parts in FUSED.values() for part in parts),
    ALL_LINEAR,
)
# Layers whose output is split over tensor parallel processes (the others split their input).
COLUMN_PARALLEL = frozenset({"linear_qkv", "linear_fc1", *SPLIT})


def split_names(fused: str) -> dict[str, str]:
    """Return the short name of each part of a layer, by Hugging Face name; the layer's own where it has one part."""
    if len(FUSED[fused]) == 1:
        return dict.fromkeys(FUSED[fused], fused)
    return {split.part: name for name, split in SPLIT.items() if split.layer == fused}


def fused_name(short: str) -> str:
    """Return the short name of the layer that an adapted module lies in."""
    return SPLIT[short].layer if short in SPLIT else short
