"""Sequence parallelism: between tensor parallel layers a process has a slice of the positions, not all of them.

What a weight learns from a slice is a share of its gradient. megatron-core sums the shares over the tensor parallel
processes where the weight says that it learns so: magnitudes of layers that split their input do. A and B see all
positions: their slices are gathered before the layers that split their output, here or by Megatron-Bridge.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import copy
from collections.abc import Callable, Iterable
from typing import Any

from megatron.bridge.peft.utils import AdapterAttributes, get_adapter_attributes_from_linear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn


def adapter_attributes(module: Any, *, is_expert: bool) -> AdapterAttributes:
    """Return what an adapter has to know of its layer, and let Transformer Engine's layers hand out slices.

    Unless it is told that adapters gather for themselves, Megatron-Bridge lets a layer that fuses a norm hand out the
    norm's output gathered (`return_layernorm_output_gathered`, megatron/bridge/peft/utils.py:611 of 0.6.2). Backwards,
    Transformer Engine 2.20 drops the gradient of what it gathered: it is neither added before the reduce-scatter, as
    earlier versions did (transformer_engine/pytorch/module/layernorm_linear.py:904), nor after it (:1134). So all that
    adapters give to the layers below is lost as soon as B is not zero, and losses leave those of one process at the
    third step. The gradient of a slice, which has no such way, it does add.
    """
    return get_adapter_attributes_from_linear(
        module, is_expert=is_expert, sequence_parallel_input_regather=not is_expert
    )


def take_over_gathering(adapters: Iterable[Any]) -> Any:
    """Let adapters of one layer not gather its slices: each would gather the same ones, and keep them for backwards.

    Returns:
        The process group over which to gather for them; None where they are given all positions, or need none.
    """
    group = None
    for adapter in adapters:
        if not (adapter.disable_sequence_parallel_comm or adapter.input_is_parallel or adapter.is_expert):
            adapter.disable_sequence_parallel_comm = True
            group = adapter.tp_group
    return group


def gather_slices(inputs: Tensor, group: Any) -> Tensor:
    """Return all positions, [tokens, 1, features], where there is a group to gather over; else what was given.

    Backwards, the shares of the gradient that the processes have are summed, and each gets those of its slice.
    """
    if group is None:
        return inputs
    whole: Tensor = gather_from_sequence_parallel_region(inputs, group=group)
    return whole


def learn_from_slices(weight: Any) -> None:
    """Have the gradients of a weight summed over tensor parallel processes: each has the share of its slice.

    megatron-core's finalize_model_grads goes by this mark, and only under sequence parallelism.
    """
    weight.sequence_parallel = True


def layers_of_slices(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker of the local layers that `build` makes, which takes slices where they are asked for."""

    def build_for(provider: Any) -> Any:
        spec = build(provider)
        if not provider.sequence_parallel:
            return spec
        if not isinstance(spec, TransformerBlockSubmodules):
            layers = [spec] * get_num_layers_to_build(provider)
            spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
        for holder in (spec, *(part for layer in spec.layer_specs for part in _norm_holders(layer))):
            for name, value in vars(holder).items():
                if value is WrappedTorchNorm:
                    setattr(holder, name, norm_of_slices)
        return spec

    return build_for


def _norm_holders(layer: Any) -> tuple[Any, ...]:
    """Return what a layer's specification names its norms in."""
    return layer.submodules, layer.submodules.self_attention.submodules


def norm_of_slices(config: Any, hidden_size: int, eps: float = 1e-5, **how: Any) -> nn.Module:
    """Make torch's norm, which megatron-core refuses under sequence parallelism: its weights learn from slices then.

    These are the base's, which do not learn; and a norm is of one position alone.
    """
    settings = copy.copy(config)
    settings.sequence_parallel = False
    norm: nn.Module = WrappedTorchNorm(settings, hidden_size, eps, **how)
    return norm
