"""From a checkpoint to a whole Hugging Face model: the adapter added to the base's weights, one file at a time.

The base is read from its safetensors files and never built, so memory goes with the largest file and not with the
model. W + (alpha / rank) B A, with its rows scaled to the magnitudes of DoRA, is computed in float32 and rounded once,
to the type that W is stored in.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ckptrain.config.base import read_json, weight_files
from ckptrain.config.linear import magnitude_name, weight_names
from ckptrain.convert.directory import MERGED, check_destination, published, write_json, write_provenance
from ckptrain.convert.gate import Gate, base_of, gate_record, pass_gate
from ckptrain.convert.source import AdapterSource, ReadLayer
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_peft import DTYPES, Effect, adapted_modules, check_whole, provenance
from ckptrain.convert.unfuse import Module, huggingface_layers, unfuse
from ckptrain.errors import ConfigError, ProblemsError, first_problems

_INDEX_NAME = "model.safetensors.index.json"
_CONFIG_NAME = "config.json"
# What a model directory has besides weights: configuration, generation settings, tokenizer, chat template.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")

type Update = tuple[Tensor, Tensor, Tensor | None]
"""A [rank, in_features], B [out_features, rank] and DoRA's magnitudes [out_features] of one Hugging Face layer."""


@attrs.frozen(kw_only=True)
class Merge:
    """A model that was written, and what is in it."""

    path: Path
    source: str
    """What it was made of."""
    base: str
    run_id: str
    step: int
    merged: int
    """How many weights the adapter changed."""
    files: int
    num_bytes: int
    """Size of the weight files."""
    dtype: str
    """Of the merged weights; `base` where each kept its own."""
    gate: Gate | None
    """What it was let through by; None where that was not looked at."""
    gate_reason: str


def merge_adapter(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | None = False,
    base: str | None = None,
) -> Merge:
    """Write the base with the adapter of a checkpoint in its weights, as `from_pretrained` loads it.

    Args:
        checkpoint: a checkpoint, a run, of which the newest is taken, or what else `open_source` knows.
        out: the directory to make; it is there complete or not at all.
        dtype: of all floating point weights; None keeps each in the type that the base stores it in.
        overwrite: replace an earlier merged model at `out`.
        verify: compare logits with those under Megatron first; None does where the base is small.
        base: the base model, for an adapter that does not say it.

    Raises:
        CheckpointNotFound: `checkpoint` is none.
        CheckpointDamaged: it is not what its manifest says.
        ConfigError: the dtype is unknown, or the base is not here, quantised, or not in safetensors files.
        ProblemsError: the base lacks a layer that is adapted, or a merged weight is not finite.
        AdapterMismatch: the merged model does not compute what was trained; nothing is written.
        CkptrainError: `out` is in the way, or cannot be written.
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError("cannot merge", [f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}"])
    source, out = open_source(checkpoint, base=base), out.resolve()
    with source.held():
        check_destination(MERGED, out, source.path, overwrite=overwrite)
        check_whole(source, "merge")
        base_directory = base_of(source)
        weights = _weights(base_directory)
        sizes = _sizes(source)
        _check_fit(sizes, weights, base_directory)
        wanted = None if dtype is None else getattr(torch, dtype)
        with published(out, overwrite=overwrite) as staging:
            with source.layers() as read:
                updates = _Updates(source, read)
                num_bytes, rounded = _write_weights(weights, staging, updates, wanted)
            updates.check()
            _copy_rest(base_directory, staging, wanted)
            gate, why = pass_gate(
                verify,
                source,
                lambda directory: _compare(source, directory, staging, rounded, has_effect=updates.effect.norm > 0),
            )
            facts = {"dtype": dtype or "base", "merged": len(sizes), "gate": gate_record(gate, why)}
            write_provenance(MERGED, staging, {**provenance(source), **facts})
    return Merge(
        path=out,
        source=str(source.path),
        base=source.base.name,
        run_id=source.run_id,
        step=source.step,
        merged=len(sizes),
        files=len(weights),
        num_bytes=num_bytes,
        dtype=dtype or "base",
        gate=gate,
        gate_reason=why,
    )


def _sizes(source: AdapterSource) -> dict[str, tuple[int, int]]:
    """Return [out_features, in_features] of every weight that the adapter changes, by Hugging Face name."""
    modules = adapted_modules(source)
    layers = {name: size for module in modules for name, size in huggingface_layers(module, source.shape).items()}
    return {f"{name}.weight": (out_features, in_features) for name, (in_features, out_features) in layers.items()}


class _Updates:
    """A and B by the name of the weight that they change, read a layer at a time: files hold whole layers mostly."""

    def __init__(self, source: AdapterSource, read: ReadLayer) -> None:
        self._source, self._read = source, read
        self._modules: dict[int, list[Module]] = {}
        for module in adapted_modules(source):
            self._modules.setdefault(module.layer, []).append(module)
        self._places = {
            f"{name}.weight": module.layer
            for modules in self._modules.values()
            for module in modules
            for name in huggingface_layers(module, source.shape)
        }
        self._layer: int | None = None
        self._held: dict[str, Update] = {}
        self._counted: set[int] = set()
        settings = source.facts.lora.settings
        self.effect = Effect(scale=settings.alpha / settings.dim, dtype=torch.float32)

    def get(self, name: str) -> Update | None:
        """Return what changes a weight; None where nothing does."""
        layer = self._places.get(name)
        if layer is None:
            return None
        if layer != self._layer:
            self._held, self._layer = self._of(layer), layer
        return self._held[name]

    def check(self) -> None:
        """See that what was read could be used.

        Raises:
            ProblemsError: a matrix is not finite.
        """
        if self.effect.problems:
            raise ProblemsError(f"cannot merge {self._source.path}", first_problems(self.effect.problems))

    def _of(self, layer: int) -> dict[str, Update]:
        matrices = self._read(layer)
        updates: dict[str, Update] = {}
        for module in self._modules[layer]:
            lora_a, lora_b = (matrices[name] for name in weight_names(module.name))
            magnitudes = matrices.get(magnitude_name(module.name))
            if layer not in self._counted:
                self.effect.add(module, lora_a, lora_b, magnitudes)
            updates |= {
                f"{name}.weight": (a, b, magnitudes)  # which only a module that is one Hugging Face layer has
                for name, a, b in unfuse(module, lora_a, lora_b, self._source.shape)
            }
        self._counted.add(layer)
        return updates


def _weights(base: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Return the shape of every weight of the base, by file.

    Raises:
        ConfigError: the base is quantised, or its weights are not in safetensors files.
    """
    if "quantization_config" in read_json(base / _CONFIG_NAME):
        raise ConfigError("cannot merge", [f"{base} is quantised: merge into the model that it was made of"])
    files = [path for path in weight_files(base) if path.suffix == ".safetensors"]
    if not files:
        raise ConfigError(
            "cannot merge",
            [f"{base} has no safetensors files: load it with transformers and save it with save_pretrained first"],
        )
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found[path] = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _check_fit(
    sizes: Mapping[str, tuple[int, int]], weights: Mapping[Path, Mapping[str, tuple[int, ...]]], base: Path
) -> None:
    """Refuse before anything is written what would leave a part of the adapter out.

    Raises:
        ProblemsError: a weight is missing from the base, or of another shape; they are listed.
    """
    shapes = {name: shape for file in weights.values() for name, shape in file.items()}
    problems = [f"{name} is adapted, and the base has no such weight" for name in sizes if name not in shapes]
    problems += [
        f"{name} is {list(shapes[name])} in the base, and the adapter is for {list(expected)}"
        for name, expected in sizes.items()
        if name in shapes and shapes[name] != expected
    ]
    if problems:
        raise ProblemsError(f"cannot merge into {base}", first_problems(problems))


def _write_weights(
    weights: Mapping[Path, Mapping[str, Any]],
    staging: Path,
    updates: _Updates,
    dtype: torch.dtype | None,
) -> tuple[int, torch.dtype]:
    """Write every weight file again; returns their bytes and the type that merged weights were rounded to."""
    total, rounded = 0, torch.float32
    for path in weights:
        tensors = {}
        for name, tensor in _stored(path):
            update = updates.get(name)
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if update is not None:
                tensor = merged(tensor, *update, scale=updates.effect.scale)  # noqa: PLW2901
                rounded = target
                if not tensor.to(target).isfinite().all():
                    raise ProblemsError("cannot merge", [f"{name} is not finite in {target} with the adapter in it"])
            tensors[name] = tensor.to(target).contiguous()
        save_file(tensors, staging / path.name, metadata={"format": "pt"})
        total += (staging / path.name).stat().st_size
    if len(weights) > 1:
        places = {name: path.name for path, names in weights.items() for name in names}
        write_json(staging / _INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})
    return total, rounded


def _stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dictionary
            yield name, file.get_tensor(name)


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitudes: Tensor | None = None, *, scale: float) -> Tensor:
    """Return W + scale B A in float32, each row scaled to its magnitude where there are such.

    Args:
        weight: W, [out_features, in_features], of any floating point type.
        lora_a: A, [rank, in_features].
        lora_b: B, [out_features, rank].
        magnitudes: [out_features].
        scale: alpha / rank.
    """
    directions = torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)
    if magnitudes is None:
        return directions
    return directions * (magnitudes.float() / torch.linalg.norm(directions, dim=1))[:, None]


def _copy_rest(base: Path, staging: Path, dtype: torch.dtype | None) -> None:
    """Copy what a model directory has besides weights, with the type of the weights as it is now."""
    for pattern in _COPIED:
        for path in sorted(base.glob(pattern)):
            if not path.name.endswith(".index.json") and not (staging / path.name).exists():
                shutil.copyfile(path, staging / path.name)
    if dtype is not None:
        config = read_json(staging / _CONFIG_NAME)
        config.pop("torch_dtype", None)  # the name before transformers 5
        write_json(staging / _CONFIG_NAME, {**config, "dtype": str(dtype).removeprefix("torch.")})


def _compare(source: AdapterSource, base: Path, written: Path, dtype: torch.dtype, *, has_effect: bool) -> Gate:
    from ckptrain.convert.compare import check_merged  # needs Megatron, which a merge does not

    return check_merged(source, base, written, dtype=dtype, has_effect=has_effect)
