"""What are the linear layers called? Megatron's names, and the Hugging Face names of the parts that each one fuses."""

from __future__ import annotations

# Megatron's short name -> the Hugging Face layers that it holds.
FUSED: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL_LINEAR = "all-linear"
MODULE_NAMES: tuple[str, ...] = (*FUSED, *(part for parts in FUSED.values() for part in parts), ALL_LINEAR)
# Layers whose output is split over tensor parallel processes (the others split their input).
COLUMN_PARALLEL = frozenset({"linear_qkv", "linear_fc1"})
