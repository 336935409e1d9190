"""The state of a LoRA run, for bench_checkpoint.py: real modules with memory for adapters and moments alone.

megatron-core's layers with Megatron-Bridge's adapters, and megatron-core's Adam. The base is never filled, so it takes
address space but no memory. All numbers are drawn from the names of tensors, so that others can hold the same ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from torch import Tensor

from ckptrain.convert.parity import BaseParity
from ckptrain.megatron.adapters import adapter_parameters, attach_adapters, draw_matrix
from ckptrain.megatron.model import build_model, open_bridge, torch_dtype
from ckptrain.megatron.optimizer import (
    adam_states,
    build_optimizer,
    optimizer_tensors,
    set_step_count,
    wrap_for_training,
)
from ckptrain.megatron.state import AdapterStore
from ckptrain.training.setup import ModelSetup
from ckptrain.training.start import Survey

WEIGHT = "weight"


def draw(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of one whole tensor: the weight or a moment of the adapter weight `name`."""
    return draw_matrix("kaiming", shape, f"{kind}.{name}", seed=0)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of every tensor's numbers."""
    return {name: hashlib.sha256(buffer_of(tensor)).hexdigest() for name, tensor in tensors.items()}


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy."""
    return memoryview(tensor.detach().numpy()).cast("B")


class LoraState:
    """What a LoRA run has to save on this rank."""

    def __init__(self, survey: Survey) -> None:
        """Build it for the layout whose groups are open; collective."""
        config = survey.config
        assert survey.base.path is not None
        bridge = open_bridge(survey.base.path, survey.shape.architecture)
        with contextlib.redirect_stdout(None):  # it tells of the vocabulary's padding
            model = build_model(bridge, config, survey.layout, "local")
        model.requires_grad_(requires_grad=False)
        attach_adapters(model, config.lora, survey.targets)
        adapters = tuple(adapter_parameters(model))
        wrapped = wrap_for_training(model, deterministic=False)
        self.survey, self.model = survey, model
        self.setup = ModelSetup(
            model=wrapped,
            adapters=adapters,
            store=AdapterStore(adapters, survey.shape.num_layers),
            optimizer=build_optimizer(wrapped, config.optimizer, torch_dtype(config.model.dtype)),
            parity=BaseParity(checked=False, reason="the base is never filled"),
        )
        states = adam_states(self.setup.optimizer)
        set_step_count(self.setup.optimizer, 1)
        self.tensors: dict[str, Tensor] = {}
        for adapter in adapters:
            kinds = {WEIGHT: adapter.parameter.data, **optimizer_tensors(states, adapter)}
            for kind, tensor in kinds.items():
                pieces = adapter.cut(tensor)
                whole = draw(kind, adapter.name, pieces[0].shape)
                for piece in pieces:
                    piece.data.copy_(whole[piece.place])
                self.tensors[f"{kind}.{adapter.name}"] = tensor
