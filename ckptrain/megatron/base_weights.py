"""Fill a model with the base's weights: each read once, moved to the device once, and seen to have arrived.

Megatron-Bridge says which weights of Hugging Face a parameter is made of, and makes it. Its own loop opens the weight
file anew for every tensor and joins q, k and v on the CPU; here a file stays open, and what is joined is on the device
already. Under tensor parallelism it reads a weight on the first process of the group alone, cuts it there and
scatters the slices: the others read none of what is cut, since tensors of safetensors are mapped and not touched.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from ckptrain.checkpoint.ranks import together
from ckptrain.errors import ModelMismatch
from ckptrain.megatron.platform import enter_platform


class _Weights(Mapping[str, Tensor]):
    """The tensors of a directory's safetensors files, on a device; mapped, so that only what is used is read."""

    def __init__(self, directory: Path, file_of: Mapping[str, str], device: torch.device) -> None:
        self._directory = directory
        self._file_of = file_of
        self._device = device
        self._files: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        if file not in self._files:
            self._files[file] = self._open.enter_context(safe_open(self._directory / file, framework="pt"))
        weight: Tensor = self._files[file].get_tensor(name).to(self._device)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def fill_parameters(bridge: Any, model: Any) -> None:
    """Give every parameter its weights; collective.

    Raises:
        ModelMismatch: the base has none for a parameter, or NaN among them, or they have another shape.
    """
    conversion, pretrained = bridge._model_bridge, bridge.hf_pretrained
    tasks = [
        task
        for task in conversion.build_conversion_tasks(pretrained, [model])
        if task is not None and task.megatron_module is not None
    ]
    source = pretrained.state.source
    # Of a tensor parallel group the first process alone looks into what it reads; to the others it stays on disk.
    is_reader = parallel_state.get_tensor_model_parallel_rank() == 0
    device = enter_platform().device if is_reader else torch.device("cpu")
    largest: dict[int, Tensor] = {}
    mismatches: list[str] = []
    with _Weights(source.path, source.key_to_filename_map, device) as weights, torch.no_grad():
        for task, converted in _converted(conversion, tasks, weights):
            if converted.shape != task.param_weight.shape:
                shapes = f"{[*task.param_weight.shape]}, and of the base's weights it would be {[*converted.shape]}"
                mismatches.append(f"{task.param_name} under Megatron is {shapes}")
                continue
            task.param_weight.copy_(converted)
            largest[id(task.param_weight)] = task.param_weight.amax()
        rest = [parameter for parameter in model.parameters() if id(parameter) not in largest]
        for parameter in rest:
            parameter.fill_(torch.nan)
        conversion._broadcast_shared_embeddings([model])  # fills the output layer where that is another stage's
        largest |= {id(parameter): parameter.amax() for parameter in rest}
    torch.cuda.empty_cache()  # what was joined on the device
    together(lambda: _check_shapes(mismatches))
    together(lambda: _check_filled(model, largest))


def _check_shapes(mismatches: list[str]) -> None:
    if mismatches:
        raise ModelMismatch(
            f"config.json and the weights of the base are not of one model: {'; '.join(mismatches[:5])}"
        )


def _check_filled(model: Any, largest: Mapping[int, Tensor]) -> None:
    """Look for NaN: the largest of values is NaN where one of them is, and the device is asked once."""
    is_nan = torch.stack([value.float() for value in largest.values()]).isnan().tolist()
    bad = {parameter for parameter, found in zip(largest, is_nan, strict=True) if found}
    if unfilled := [name for name, parameter in model.named_parameters() if id(parameter) in bad]:
        raise ModelMismatch(
            f"the base has no weights, or NaN among them, for {len(unfilled)} parameters under Megatron:"
            f" {', '.join(unfilled[:5])}"
        )


def _converted(conversion: Any, tasks: list[Any], weights: _Weights) -> Iterator[tuple[Any, Tensor]]:
    """Yield what each parameter is to be; a tensor of all experts' weights is kept until the last has its own."""
    still_asked_for = Counter(str(task.mapping.hf_param) for task in tasks)
    kept: dict[str, Any] = {}
    for task in tasks:
        name = str(task.mapping.hf_param)
        found = kept.pop(name, None)
        if found is None:
            found = conversion.maybe_modify_loaded_hf_weight(task.mapping.hf_param, weights)
        still_asked_for[name] -= 1
        if still_asked_for[name]:
            kept[name] = found
        converted = task.mapping.hf_to_megatron(found, task.megatron_module)
        if converted is not None:
            yield task, converted
