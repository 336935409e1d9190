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

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import ModuleDict
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter, get_adapter_attributes_from_linear
from torch import Tensor, nn

from ckptrain.config.modules import FUSED, SPLIT, split_names


class SplitLoRALinear(AdapterWrapper):
    """A fused layer and the adapters of its parts."""

    def __init__(
        self, to_wrap: nn.Module, adapters: Mapping[str, nn.Module], widths: Mapping[str, int], groups: int
    ) -> None:
        """Wrap a layer.

        Args:
            to_wrap: the layer; its output features are `groups` blocks, in each of which the parts lie side by side.
            adapters: of the parts that have one, by name.
            widths: output features of every part within one block, by its adapter's name, in order.
            groups: how many blocks this process has: its key-value heads for q, k and v, one for gate and up.
        """
        super().__init__(to_wrap, ModuleDict(adapters))
        self.widths, self.groups = dict(widths), groups

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with the adapters', [..., output features of this process], and its bias."""
        output, bias, inputs = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        blocks = [self._part(name, width, inputs, *args, **kwargs) for name, width in self.widths.items()]
        return output + torch.cat(blocks, dim=-1).flatten(-2), bias

    def _part(self, name: str, width: int, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return one part's change, [..., groups, width]; zeros where it has no adapter."""
        if name in self.adapter:
            output: Tensor = self.adapter_forward(self.adapter[name], inputs, *args, **kwargs)
            return output.unflatten(-1, (self.groups, width))
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], self.groups, width)


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
    found = get_adapter_attributes_from_linear(module, is_expert=is_expert)
    config = module.config
    size = 1 if is_expert else config.tensor_model_parallel_size
    if fused == "linear_qkv":
        groups = config.num_query_groups // size
        shared = config.num_attention_heads // config.num_query_groups
        in_block = [shared * config.kv_channels, config.kv_channels, config.kv_channels]
    else:
        groups, in_block = 1, [found.out_features // size // 2] * 2
    names = split_names(fused)
    widths = dict(zip((names[part] for part in FUSED[fused]), in_block, strict=True))
    adapters = {
        SPLIT[short].adapter: ParallelLinearAdapter(
            found.in_features,
            widths[short] * groups * size,
            lora.dim,
            # Bridge saves what has linear_fc1 in its name as gate and up in one; this is one of them.
            base_linear_name=f"{place}.{SPLIT[short].part}",
            activation="identity",
            column_init_method=lora.lora_A_init_method,
            row_init_method=lora.lora_B_init_method,
            dropout=lora.dropout,
            dropout_position=lora.dropout_position,
            model_parallel_config=config,
            alpha=lora.alpha,
            is_expert=is_expert,
            disable_tensor_parallel_comm=found.disable_tensor_parallel_comm,
            disable_sequence_parallel_comm=found.disable_sequence_parallel_comm,
            base_linear_is_parallel=found.base_linear_is_parallel,
        )
        for short in parts
    }
    return SplitLoRALinear(module, adapters, {SPLIT[short].adapter: width for short, width in widths.items()}, groups)
