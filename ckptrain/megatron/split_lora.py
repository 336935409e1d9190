"""LoRA with an adapter of its own for each part of a fused layer: q, k and v, gate and up, as Hugging Face PEFT has it.

Megatron-Bridge's CanonicalLoRA is for this, and what is saved has its names. Its layers put q, k and v together by the
whole model's number of heads, which is wrong on a tensor parallel process, and its gate and up are saved in an order
that depends on the layout; so its adapters are used, and the layers that hold them are ours.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import ModuleDict
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import AdapterAttributes, ParallelLinearAdapter
from torch import Tensor, nn

from ckptrain.config.modules import FUSED, SPLIT, split_names
from ckptrain.megatron.sequence import adapter_attributes, gather_slices, take_over_gathering


@attrs.frozen(kw_only=True)
class Parts:
    """How the parts of a layer lie in its output features on this process: in blocks, side by side within each."""

    widths: Mapping[str, int]
    """Output features of every part within one block, in order, by what its adapter is called."""
    groups: int
    """How many blocks there are: this process's key-value heads for q, k and v, one for gate and up."""

    def rows_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Return each part's rows of a weight, [groups * width, in_features]; views where there is one block."""
        blocks = weight.unflatten(0, (self.groups, -1)).split(tuple(self.widths.values()), dim=1)
        return {name: rows.flatten(0, 1) for name, rows in zip(self.widths, blocks, strict=True)}

    def split(self, output: Tensor) -> dict[str, Tensor]:
        """Return each part of the layer's output, [..., groups * width]; views where there is one block."""
        blocks = output.unflatten(-1, (self.groups, -1)).split(tuple(self.widths.values()), dim=-1)
        return {name: part.flatten(-2) for name, part in zip(self.widths, blocks, strict=True)}

    def join(self, changes: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the whole of the parts' changes, of `output`'s shape; zeros where a part has none."""
        if len(self.widths) == 1:
            [change] = changes.values()
            return change
        nothing = output.new_zeros(())
        blocks = [
            changes[name].unflatten(-1, (self.groups, width))
            if name in changes
            else nothing.expand(*output.shape[:-1], self.groups, width)
            for name, width in self.widths.items()
        ]
        return torch.cat(blocks, dim=-1).flatten(-2)


class SplitLoRALinear(AdapterWrapper):
    """A fused layer and the adapters of its parts."""

    def __init__(self, to_wrap: nn.Module, adapters: Mapping[str, nn.Module], parts: Parts) -> None:
        """Wrap a layer whose output features are `parts`; some of them have an adapter."""
        super().__init__(to_wrap, ModuleDict(adapters))
        self.parts = parts
        self._gathers_over = take_over_gathering(adapters.values())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with the adapters', [..., output features of this process], and its bias."""
        output, bias, inputs = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        whole = gather_slices(inputs, self._gathers_over)
        changes = {
            name: self.adapter_forward(adapter, whole, *args, **kwargs) for name, adapter in self.adapter.items()
        }
        return output + self.parts.join(changes, output), bias


def split_lora(module: Any, full_name: str, parts: Sequence[str], lora: LoRA, *, is_expert: bool) -> SplitLoRALinear:
    """Give parts of a fused layer an adapter each, with whatever values.

    Args:
        module: megatron-core's or Transformer Engine's layer, linear_qkv or linear_fc1.
        full_name: its name in this process's model.
        parts: what is adapted, by short name, such as linear_q.
        lora: rank, alpha, dropout.
        is_expert: whether it is a layer of one expert, which tensor parallelism does not split.
    """
    place, _, fused = full_name.rpartition(".")
    found = adapter_attributes(module, is_expert=is_expert)
    size = 1 if is_expert else module.config.tensor_model_parallel_size
    layout = fused_parts(module, fused, found.out_features, size)
    adapters = {
        SPLIT[short].adapter: ParallelLinearAdapter(
            found.in_features,
            layout.widths[SPLIT[short].adapter] * layout.groups * size,
            # Bridge saves what has linear_fc1 in its name as gate and up in one; this is one of them.
            base_linear_name=f"{place}.{SPLIT[short].part}",
            is_expert=is_expert,
            **adapter_settings(module, found, lora),
        )
        for short in parts
    }
    return SplitLoRALinear(module, adapters, layout)


def fused_parts(module: Any, fused: str, out_features: int, size: int) -> Parts:
    """Return how the parts of a fused layer lie on this process.

    Args:
        module: the layer.
        fused: its short name, linear_qkv or linear_fc1.
        out_features: of the whole layer.
        size: over how many processes they are split.
    """
    config = module.config
    if fused == "linear_qkv":
        groups = config.num_query_groups // size
        shared = config.num_attention_heads // config.num_query_groups
        in_block = [shared * config.kv_channels, config.kv_channels, config.kv_channels]
    else:
        groups, in_block = 1, [out_features // size // 2] * 2
    names = split_names(fused)
    adapters = (SPLIT[names[part]].adapter for part in FUSED[fused])
    return Parts(widths=dict(zip(adapters, in_block, strict=True)), groups=groups)


def adapter_settings(module: Any, found: AdapterAttributes, lora: LoRA) -> dict[str, Any]:
    """Return what Megatron-Bridge's adapter is told of a layer besides its name and dimensions."""
    return {
        "dim": lora.dim,
        "activation": "identity",
        "column_init_method": lora.lora_A_init_method,
        "row_init_method": lora.lora_B_init_method,
        "input_is_parallel": found.input_is_parallel,
        "dropout": lora.dropout,
        "dropout_position": lora.dropout_position,
        "model_parallel_config": module.config,
        "alpha": lora.alpha,
        "disable_tensor_parallel_comm": found.disable_tensor_parallel_comm,
        "disable_sequence_parallel_comm": found.disable_sequence_parallel_comm,
        "base_linear_is_parallel": found.base_linear_is_parallel,
    }
