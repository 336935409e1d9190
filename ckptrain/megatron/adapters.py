"""LoRA adapters as named, sharded tensors: where they go, what they start from, which piece this process holds.

Megatron-Bridge builds the adapter modules. Which modules get one is decided here, on global layer numbers (its own
matcher counts layers from the start of each pipeline stage), and so are the initial values: they depend on an adapter's
global name and the seed alone, so every layout starts from the same bits.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import contextlib
import hashlib
import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import attrs
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor, nn

from ckptrain.checkpoint.ranks import together
from ckptrain.config.linear import adapter_name, is_magnitude
from ckptrain.config.modules import SPLIT
from ckptrain.config.schema import LoraConfig
from ckptrain.config.targets import Targets
from ckptrain.errors import ConfigError, RestoreMismatch
from ckptrain.megatron.dora import DoRALinear, dora
from ckptrain.megatron.split_lora import SplitLoRALinear, split_lora

# Every expert of a layer has an adapter of its own; a configuration selects them together.
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
# megatron-core stacks their weights in one tensor, and names the module within the module.
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.")


@dataclass
class SelectedLoRA(LoRA):
    """Megatron-Bridge's LoRA on exactly the modules that the configuration resolved to, by global name."""

    targets: Targets = field(default_factory=lambda: Targets(modules=()))
    first_layer: int = 0
    with_magnitudes: bool = False

    def match(self, _: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        """Return (pattern, full name) for a selected module, as the base class does; None leaves it alone."""
        local_name = f"{prefix}.{name}" if prefix else str(name)
        return (local_name, local_name) if self._adapted(local_name) else None

    def transform(self, module: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        """Return a selected module with its adapter, or with those of its parts; any other as it is."""
        local_name = f"{prefix}.{name}" if prefix else str(name)
        parts = self._adapted(local_name)
        if self.with_magnitudes:
            return dora(module, local_name, parts, self) if parts and not isinstance(module, DoRALinear) else module
        if not any(part in SPLIT for part in parts):
            adapted: nn.Module = super().transform(module, name, prefix)
            return adapted
        if isinstance(module, SplitLoRALinear):
            return module
        return split_lora(module, local_name, parts, self, is_expert=bool(_LOCAL_EXPERT.search(local_name)))

    def _adapted(self, local_name: str) -> tuple[str, ...]:
        return self.targets.adapted(_global_name(local_name, self.first_layer))


def _global_name(local_name: str, first_layer: int) -> str:
    return _LOCAL_EXPERT.sub(".experts.", _with_global_layer(local_name, first_layer))


def _with_global_layer(local_name: str, first_layer: int) -> str:
    """Turn a stage's `decoder.layers.0.` into the model's `decoder.layers.<first_layer>.`."""
    parts = local_name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(int(parts[2]) + first_layer)
    return ".".join(parts)


def attach_adapters(model: Any, lora: LoraConfig, targets: Targets) -> LoRA:
    """Freeze the model and give the selected modules of this stage an adapter, with whatever values; collective.

    The base's weights are in the model already: DoRA goes by their rows.

    Raises:
        ConfigError: a module was selected that this model does not have, or that this kind cannot adapt.
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
        sequence_parallel_input_regather=True,  # why: `ckptrain.megatron.sequence.adapter_attributes`
        targets=targets,
        first_layer=first_layer,
        with_magnitudes=lora.has_magnitudes,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # with train.recompute it tells of its own way to give gradients
        peft(model, training=True)
    if lora.has_magnitudes:
        together(lambda: _check_rows(model, first_layer))
    adapted = {
        _global_name(name, first_layer)
        for name, module in model.named_modules()
        if isinstance(module, ParallelLinearAdapter)
    }
    here = range(first_layer, first_layer + len(layers))
    missing = [
        name for name in targets.modules if int(name.split(".")[2]) in here and adapter_name(name) not in adapted
    ]
    if missing:
        raise ConfigError(
            "lora.target_modules selects modules that this model does not have under Megatron",
            [f"{name} was to be adapted" for name in missing[:10]],
        )
    return peft


def _check_rows(model: Any, first_layer: int) -> None:
    """Look for rows of the base that DoRA would divide by the length of, and that have none.

    Raises:
        ConfigError: there are such; they are listed.
    """
    problems = [
        f"{_global_name(name, first_layer)} ({within or 'whole'}): {count} rows of its weight are zero"
        for name, module in model.named_modules()
        if isinstance(module, DoRALinear)
        for within, count in module.empty_rows().items()
    ]
    if problems:
        remedy = "leave these modules out (lora.target_modules), or set lora.kind=canonical"
        raise ConfigError("DoRA divides by the lengths of the base's rows", [*problems[:10], remedy])


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a whole tensor that this process holds."""

    shape: tuple[int, ...]
    """Of the whole: [out_features, in_features], after an expert axis where there are experts; [out_features]."""
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
    """One adapter weight of this process, a matrix or magnitudes, and how it lies in the whole.

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
def initialise_adapters(model: Any, adapters: Sequence[AdapterParameter], lora: LoraConfig, seed: int) -> None:
    """Fill every adapter from its global name and the seed; collective.

    The whole matrix is drawn in float32 on the CPU and this process keeps its piece, so tensor parallelism changes
    neither the values nor, as per-shard initialisation does, their scale. Magnitudes follow from the matrices.
    """
    for adapter in adapters:
        if is_magnitude(adapter.name):
            continue
        method = lora.lora_A_init_method if ".linear_in." in adapter.name else lora.lora_B_init_method
        pieces = adapter.cut(adapter.parameter.data)
        whole = draw_matrix(method, pieces[0].shape, adapter.name, seed)
        for piece in pieces:
            piece.data.copy_(whole[piece.place])
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.start()


@torch.no_grad()
def fill_adapters(adapters: Sequence[AdapterParameter], read_layer: Callable[[int], Mapping[str, Tensor]]) -> int:
    """Fill every adapter of this process with its pieces of whole tensors, one layer at a time; returns how many.

    Args:
        adapters: of this process.
        read_layer: gives matrices and magnitudes of a layer by the names of `ckptrain.config.linear`.

    Raises:
        RestoreMismatch: there is no such tensor, or it is of another shape; adapters before it are filled already.
    """
    ordered = sorted(adapters, key=_layer_number)
    for layer, of_layer in itertools.groupby(ordered, key=_layer_number):
        matrices = read_layer(layer)
        for adapter in of_layer:
            whole = matrices.get(_STACKED_EXPERTS.sub(".experts.", adapter.name))
            pieces = adapter.cut(adapter.parameter.data)
            if whole is None or tuple(whole.shape) != pieces[0].shape:
                found = "is missing" if whole is None else f"is {list(whole.shape)}"
                raise RestoreMismatch(f"{adapter.name} {found} in the adapter, expected {list(pieces[0].shape)}")
            for piece in pieces:
                piece.data.copy_(whole[piece.place])
    return len(ordered)


def _layer_number(adapter: AdapterParameter) -> int:
    return int(adapter.name.split(".")[2])


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
