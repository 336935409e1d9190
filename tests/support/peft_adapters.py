"""Adapters as Hugging Face PEFT saves them, and changed in every way that they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_peft(directory: Path, model: Any, targets: list[str] | str = EVERY, **settings: Any) -> Path:
    """Let PEFT make and save an adapter with random matrices, and magnitudes that are off by a third."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": targets, "task_type": "CAUSAL_LM", **settings})
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + torch.randn(parameter.shape, generator=generator) / 3)
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(directory)
    return directory


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the tensors of an adapter that PEFT has saved."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, metadata={"format": "pt"})
    return directory


def share_a(tensors: dict[str, torch.Tensor]) -> None:
    """Give the parts of each fused layer one A."""
    for name in tensors:
        for part, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if f".{part}.lora_A" in name:
                tensors[name] = tensors[name.replace(part, first)].clone()


def change_config(directory: Path, **values: Any) -> Path:
    """Change adapter_config.json; None takes a key out."""
    path = directory / "adapter_config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def same_tensors(one: Path, other: Path) -> bool:
    """Tell whether two adapters have the same keys and the same bits."""
    before, after = (load_file(directory / "adapter_model.safetensors") for directory in (one, other))
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before
    )
