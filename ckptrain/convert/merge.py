"""From a checkpoint to a whole Hugging Face model: the adapter added to the base's weights, one file at a time.

The base is read from its safetensors files and never built, so memory goes with the largest file and not with the
model. W + (alpha / rank) B A is computed in float32 and rounded once, to the type that W is stored in.
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

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.config.base import read_json, weight_files
from ckptrain.convert.directory import MERGED, check_destination, published, write_json, write_provenance
from ckptrain.convert.gate import Gate, base_of, gate_record, pass_gate
from ckptrain.convert.to_peft import DTYPES, huggingface_matrices, provenance, read_adapter
from ckptrain.errors import ConfigError, ProblemsError

_INDEX_NAME = "model.safetensors.index.json"
_CONFIG_NAME = "config.json"
# What a model directory has besides weights: configuration, generation settings, tokenizer, chat template.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
_MOST_PROBLEMS = 20

type Update = tuple[Tensor, Tensor]
"""A [rank, in_features] and B [out_features, rank] of one Hugging Face layer, float32."""


@attrs.frozen(kw_only=True)
class Merge:
    """A model that was written, and what is in it."""

    path: Path
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
    checkpoint: Path, out: Path, *, dtype: str | None = None, overwrite: bool = False, verify: bool | None = False
) -> Merge:
    """Write the base with the adapter of a checkpoint in its weights, as `from_pretrained` loads it.

    Args:
        checkpoint: a checkpoint, or a run, of which the newest is taken.
        out: the directory to make; it is there complete or not at all.
        dtype: of all floating point weights; None keeps each in the type that the base stores it in.
        overwrite: replace an earlier merged model at `out`.
        verify: compare logits with those under Megatron first; None does where the base is small.

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
    source, out = resolve_checkpoint(checkpoint), out.resolve()
    check_destination(MERGED, out, source.path, overwrite=overwrite)
    updates, effect = _updates(source)
    base = base_of(source)
    weights = _weights(base)
    _check_fit(updates, weights, base)
    wanted = None if dtype is None else getattr(torch, dtype)
    with published(out, overwrite=overwrite) as staging:
        num_bytes, rounded = _write_weights(weights, staging, updates, _scale(source), wanted)
        _copy_rest(base, staging, wanted)
        gate, why = pass_gate(
            verify, source, lambda directory: _compare(source, directory, staging, rounded, has_effect=effect > 0)
        )
        facts = {"dtype": dtype or "base", "merged": len(updates), "gate": gate_record(gate, why)}
        write_provenance(MERGED, staging, {**provenance(source), **facts})
    return Merge(
        path=out,
        base=source.manifest.base.name,
        run_id=source.manifest.run_id,
        step=source.manifest.step,
        merged=len(updates),
        files=len(weights),
        num_bytes=num_bytes,
        dtype=dtype or "base",
        gate=gate,
        gate_reason=why,
    )


def _scale(source: CommittedCheckpoint) -> float:
    settings = source.manifest.lora.settings
    return settings.alpha / settings.dim


def _updates(source: CommittedCheckpoint) -> tuple[dict[str, Update], float]:
    """Return A and B by the name of the weight that they change, and the adapter's effect."""
    modules, adapter = read_adapter(source)
    matrices, effect = huggingface_matrices(modules, adapter, source.manifest, torch.float32)
    layers = sorted({name.removesuffix(".lora_A.weight") for name in matrices if name.endswith(".lora_A.weight")})
    updates = {
        f"{layer}.weight": (matrices[f"{layer}.lora_A.weight"], matrices[f"{layer}.lora_B.weight"]) for layer in layers
    }
    return updates, effect


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
    updates: Mapping[str, Update], weights: Mapping[Path, Mapping[str, tuple[int, ...]]], base: Path
) -> None:
    """Refuse before anything is written what would leave a part of the adapter out.

    Raises:
        ProblemsError: a weight is missing from the base, or of another shape; they are listed.
    """
    shapes = {name: shape for file in weights.values() for name, shape in file.items()}
    problems = [f"{name} is adapted, and the base has no such weight" for name in updates if name not in shapes]
    for name, (lora_a, lora_b) in updates.items():
        expected = (lora_b.shape[0], lora_a.shape[1])
        if name in shapes and shapes[name] != expected:
            problems.append(f"{name} is {list(shapes[name])} in the base, and the adapter is for {list(expected)}")
    if problems:
        raise ProblemsError(f"cannot merge into {base}", problems[:_MOST_PROBLEMS])


def _write_weights(
    weights: Mapping[Path, Mapping[str, Any]],
    staging: Path,
    updates: Mapping[str, Update],
    scale: float,
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
                tensor = merged(tensor, *update, scale)  # noqa: PLW2901
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


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A in float32.

    Args:
        weight: W, [out_features, in_features], of any floating point type.
        lora_a: A, [rank, in_features].
        lora_b: B, [out_features, rank].
        scale: alpha / rank.
    """
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)


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


def _compare(source: CommittedCheckpoint, base: Path, written: Path, dtype: torch.dtype, *, has_effect: bool) -> Gate:
    from ckptrain.convert.compare import check_merged  # needs Megatron, which a merge does not

    return check_merged(source, base, written, dtype=dtype, has_effect=has_effect)
