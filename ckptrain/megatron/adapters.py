"""LoRA adapters as named, sharded tensors: where they go, what they start from, which piece this process holds.

Megatron-Bridge builds the adapter modules. Which modules get one is decided here, on global layer numbers (its own
matcher counts layers from the start of each pipeline stage), and so are the initial values: they depend on an adapter's
global name and the seed alone, so every layout starts from the same bits.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor, nn

from ckptrain.config.schema import LoraConfig
from ckptrain.config.targets import Targets
from ckptrain.errors import ConfigError

# Every expert of a layer has an adapter of its own; a configuration selects them together.
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")


@dataclass
class SelectedLoRA(LoRA):
    """Megatron-Bridge's LoRA on exactly the modules that the configuration resolved to, by global name."""

    selects: Callable[[str], bool] = lambda _: False
    first_layer: int = 0

    def match(self, _: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        """Return (pattern, full name) for a selected module, as the base class does; None leaves it alone."""
        local_name = f"{prefix}.{name}" if prefix else str(name)
        if self.selects(_LOCAL_EXPERT.sub(".experts.", _with_global_layer(local_name, self.first_layer))):
            return local_name, local_name
        return None


def _with_global_layer(local_name: str, first_layer: int) -> str:
    """Turn a stage's `decoder.layers.0.` into the model's `decoder.layers.<first_layer>.`."""
    parts = local_name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(int(parts[2]) + first_layer)
    return ".".join(parts)


def attach_adapters(model: Any, lora: LoraConfig, targets: Targets) -> LoRA:
    """Freeze the model and give the selected modules of this stage an adapter, with whatever values.

    Raises:
        ConfigError: a module was selected that this model does not have.
    """
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1
    peft = SelectedLoRA(
        target_modules=[],
        dim=lora.dim,
        alpha=lora.alpha,
        dropout=lora.dropout,
        dropout_position=lora.dropout_position,
        lora_A_init_method=lora.lora_A_init_method,
        lora_B_init_method=lora.lora_B_init_method,
        a2a_experimental=lora.a2a_experimental,
        selects=targets.selects,
        first_layer=first_layer,
    )
    peft(model, training=True)
    adapted = {
        _LOCAL_EXPERT.sub(".experts.", _with_global_layer(name.removesuffix(".adapter"), first_layer))
        for name, _ in model.named_modules()
        if name.endswith(".adapter")
    }
    here = range(first_layer, first_layer + len(layers))
    missing = [name for name in targets.modules if int(name.split(".")[2]) in here and name not in adapted]
    if missing:
        raise ConfigError(
            "lora.target_modules selects modules that this model does not have under Megatron",
            [f"{name} was to be adapted" for name in missing[:10]],
        )
    return peft


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a whole tensor that this process holds."""

    shape: tuple[int, ...]
    """Of the whole: [out_features, in_features], after an expert axis where there are experts."""
    offset: tuple[int, ...]
    data: Tensor
    """A view, with as many axes as `shape`."""
    is_main: bool
    """Whether this process is the one, of all that hold this piece, that saves it."""

    @property
    def place(self) -> tuple[slice, ...]:
        """Return where in the whole the piece lies."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.data.shape, strict=True))


@attrs.frozen(kw_only=True)
class AdapterParameter:
    """One adapter weight of this process and how it lies in the whole.

    `cut` gives the pieces of a tensor that is laid out like the parameter: moments and masters are cut the same way.
    """

    name: str
    """megatron-core's global one, with the layer's number in the whole model. Experts of a layer share a name."""
    parameter: nn.Parameter
    cut: Callable[[Tensor], list[Piece]]


def adapter_parameters(model: Any) -> list[AdapterParameter]:
    """Return the adapter weights of an unwrapped model, sorted by name (`decoder.layers.3...linear_in.weight`)."""
    metadata = {
        "non_homogeneous_layers": True,  # a key for every layer, not one over all layers
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = model.sharded_state_dict(metadata=metadata)
    found = [
        AdapterParameter(name=entry.key, parameter=entry.data, cut=_cutter(entry))
        for entry in state.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and ".adapter." in entry.key
    ]
    return sorted(found, key=lambda adapter: adapter.name)


def _cutter(entry: ShardedTensor | ShardedTensorFactory) -> Callable[[Tensor], list[Piece]]:
    if isinstance(entry, ShardedTensorFactory):

        def cut_by_factory(tensor: Tensor) -> list[Piece]:
            built = entry.build_fn(entry.key, tensor, entry.replica_id, entry.flattened_range)
            return [_piece(part, part.data) for part in (built.values() if isinstance(built, dict) else built)]

        return cut_by_factory
    return lambda tensor: [_piece(entry, tensor)]


def _piece(sharded: ShardedTensor, data: Tensor) -> Piece:
    return Piece(
        shape=tuple(sharded.global_shape),
        offset=tuple(sharded.global_offset),
        data=data.view(*[1] * sharded.prepend_axis_num, *data.shape),
        is_main=is_main_replica(sharded.replica_id),
    )


@torch.no_grad()
def initialise_adapters(adapters: list[AdapterParameter], lora: LoraConfig, seed: int) -> None:
    """Fill every adapter from its global name and the seed.

    The whole matrix is drawn in float32 on the CPU and this process keeps its piece, so tensor parallelism changes
    neither the values nor, as per-shard initialisation does, their scale.
    """
    for adapter in adapters:
        method = lora.lora_A_init_method if ".linear_in." in adapter.name else lora.lora_B_init_method
        pieces = adapter.cut(adapter.parameter.data)
        whole = draw_matrix(method, pieces[0].shape, adapter.name, seed)
        for piece in pieces:
            piece.data.copy_(whole[piece.place])


def draw_matrix(method: str, shape: tuple[int, ...], name: str, seed: int) -> Tensor:
    """Draw an initial adapter matrix.

    The formulas are those of torch.nn.init, with the fans of the whole matrix: `xavier` is xavier_normal_,
    `kaiming` is kaiming_uniform_(a=sqrt(5)), `normal` has Megatron-Bridge's deviation of 0.2.

    Args:
        method: xavier, normal, kaiming or zero.
        shape: [out_features, in_features], after any leading expert axis.
        name: the parameter's global name.
        seed: the run's seed.

    Returns:
        float32 on the CPU, of that shape.
    """
    if method == "zero":
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    fan_out, fan_in = shape[-2:]
    if method == "kaiming":
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (1.0 + 5.0)) / math.sqrt(fan_in)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    deviation = 0.2 if method == "normal" else math.sqrt(2.0 / (fan_in + fan_out))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
