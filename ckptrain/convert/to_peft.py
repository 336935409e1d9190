"""From a checkpoint to a Hugging Face PEFT adapter, without the base's weights and without Megatron.

A checkpoint holds whole matrices under global names, whatever layout wrote them, so the export is renaming and cutting
rows: memory and time go with the size of the adapter, not of the base. Of the base only the dimensions are needed, and
the manifest has them.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import ckptrain
from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY
from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file, verify_files
from ckptrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.sharded import load_tensors, read_metadata, stored_tensors
from ckptrain.convert.directory import (
    EXPORT,
    WEIGHTS_NAME,
    check_destination,
    published,
    write_peft_directory,
    write_provenance,
)
from ckptrain.convert.gate import Gate, gate_record, pass_gate
from ckptrain.convert.unfuse import (
    Module,
    adapter_problems,
    by_layer,
    fill_in_experts,
    pair_up,
    parse_module,
    target_modules,
    unfuse,
)
from ckptrain.errors import CheckpointDamaged, ConfigError, ProblemsError

DTYPES = ("float32", "bfloat16", "float16")

_PEFT_PREFIX = "base_model.model."
_MOST_PROBLEMS = 20
_PACKAGES = ("peft", "safetensors", "torch", "transformers")


@attrs.frozen(kw_only=True)
class Export:
    """A PEFT directory that was written, and what is in it."""

    path: Path
    tensors: int
    """How many matrices: an A and a B for each adapted Hugging Face layer."""
    num_bytes: int
    """Size of the weights file."""
    dtype: str
    base: str
    """The base model as the run named it; PEFT loads it from there where it is not given."""
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    run_id: str
    step: int
    effect: float
    """The sum over adapted modules of the Frobenius norm of (alpha / rank) B A; 0 for an adapter that does nothing."""
    gate: Gate | None
    """What it was let through by; None where that was not looked at."""
    gate_reason: str
    warning: str | None


def export_adapter(
    checkpoint: Path, out: Path, *, dtype: str = "float32", overwrite: bool = False, verify: bool | None = False
) -> Export:
    """Write the adapter of a checkpoint as a directory that `peft.PeftModel.from_pretrained` loads.

    Args:
        checkpoint: a checkpoint, or a run, of which the newest is taken.
        out: the directory to make; it is there complete or not at all.
        dtype: of the matrices: float32 holds what was trained exactly, whichever type it was trained in.
        overwrite: replace an earlier export at `out`.
        verify: compare logits under Hugging Face and Megatron first; None does where the base is at hand and small.

    Raises:
        AdapterMismatch: they differ; nothing is written.
        CheckpointNotFound: `checkpoint` is none.
        CheckpointDamaged: it is not what its manifest says, or holds adapters that Hugging Face has no layers for.
        ConfigError: the dtype is unknown.
        ProblemsError: a weight is not finite, or too large for the dtype.
        CkptrainError: `out` is in the way, or cannot be written.
    """
    if dtype not in DTYPES:
        raise ConfigError("cannot export", [f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}"])
    source, out = resolve_checkpoint(checkpoint), out.resolve()
    check_destination(EXPORT, out, source.path, overwrite=overwrite)
    manifest = source.manifest
    modules, adapter = read_adapter(source)
    tensors, effect = huggingface_matrices(modules, adapter, manifest, getattr(torch, dtype))
    config = _peft_config(manifest, modules)
    with published(out, overwrite=overwrite) as staging:
        write_peft_directory(staging, {_PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, config)
        num_bytes = (staging / WEIGHTS_NAME).stat().st_size
        gate, why = pass_gate(verify, source, lambda base: _compare(source, base, staging, effect))
        facts = {"dtype": dtype, "tensors": len(tensors), "effect": effect, "gate": gate_record(gate, why)}
        write_provenance(EXPORT, staging, {**provenance(source), **facts})
    return Export(
        path=out,
        tensors=len(tensors),
        num_bytes=num_bytes,
        dtype=dtype,
        base=manifest.base.name,
        rank=manifest.lora.settings.dim,
        alpha=manifest.lora.settings.alpha,
        target_modules=tuple(config["target_modules"]),
        run_id=manifest.run_id,
        step=manifest.step,
        effect=effect,
        gate=gate,
        gate_reason=why,
        warning=None if effect else "the adapter changes nothing: B A is 0 in every module that it adapts",
    )


def _compare(source: CommittedCheckpoint, base: Path, written: Path, effect: float) -> Gate:
    from ckptrain.convert.compare import check_adapter  # needs Megatron, which an export does not

    return check_adapter(source, base, written, has_effect=effect > 0)


def read_adapter(source: CommittedCheckpoint) -> tuple[dict[str, Module], dict[str, Tensor]]:
    """Return the adapted modules and the adapter's tensors, by global name, after a check that they belong together.

    Raises:
        CheckpointDamaged: a file is not what the manifest says, or the adapter is none for the base.
    """
    if problems := verify_files(source):
        raise CheckpointDamaged(f"cannot export {source.path}: it is damaged", problems[:_MOST_PROBLEMS])
    directory, lora = source.path / ADAPTER_DIRECTORY, source.manifest.lora
    # Whole tensors, of the type that they were saved in: a single process reads all shards of whatever layout.
    stored = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in stored_tensors(read_metadata(directory)).items()
    }
    adapter = by_layer(stored)
    if problems := adapter_problems(adapter, lora.modules, lora.settings.dim, source.manifest.shape):
        raise CheckpointDamaged(
            f"cannot export {source.path}: its adapter is not what its manifest says", problems[:_MOST_PROBLEMS]
        )
    load_tensors(stored, directory)  # in place, so that the views of single layers are filled too
    found = {name: parse_module(name) for name in lora.modules}
    modules = {name: module for name, module in found.items() if module is not None}
    return fill_in_experts(modules, adapter, lora.settings.dim, source.manifest.shape)


def huggingface_matrices(
    modules: Mapping[str, Module], adapter: Mapping[str, Tensor], manifest: Manifest, dtype: torch.dtype
) -> tuple[dict[str, Tensor], float]:
    """Return A and B of every Hugging Face layer, by its name and `lora_A.weight` or `lora_B.weight`, and the effect.

    Raises:
        ProblemsError: a weight is NaN or infinite, or becomes so in `dtype`.
    """
    settings = manifest.lora.settings
    tensors: dict[str, Tensor] = {}
    effect, problems = 0.0, []
    for name, (lora_a, lora_b) in pair_up(adapter).items():
        effect += settings.alpha / settings.dim * _product_norm(lora_a, lora_b)
        for half, tensor in (("linear_in", lora_a), ("linear_out", lora_b)):
            largest = max(abs(extreme.item()) for extreme in tensor.aminmax())
            if not math.isfinite(largest):
                problems.append(f"{name}.adapter.{half}.weight holds NaN or infinity: export an earlier checkpoint")
            elif not torch.tensor(largest, dtype=dtype).isfinite():
                problems.append(f"{name}.adapter.{half}.weight is too large for {dtype}: export as float32")
        for part, tensor in unfuse(modules[name], lora_a, lora_b, manifest.shape):
            # A copy for each layer: safetensors stores no tensor twice, and PEFT trains each A on its own.
            tensors[part] = tensor.to(dtype, copy=True).contiguous()
    if problems:
        raise ProblemsError(f"cannot export step {manifest.step} of {manifest.run_id}", problems[:_MOST_PROBLEMS])
    return tensors, effect


def _product_norm(lora_a: Tensor, lora_b: Tensor) -> float:
    """Return the Frobenius norm of B A without forming it: its square is the sum of (B^T B) * (A A^T), [rank, rank]."""
    a, b = lora_a.double(), lora_b.double()
    square = ((b.mT @ b) * (a @ a.mT)).sum().item()
    return math.sqrt(max(square, 0.0))


def _peft_config(manifest: Manifest, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return adapter_config.json as this version of PEFT would write it, with its sets in order."""
    from peft import LoraConfig

    settings = manifest.lora.settings
    # PEFT has no dropout on stacked experts and would refuse to load; it is of no use without training either.
    dropout = 0.0 if any(module.is_expert for module in modules.values()) else settings.dropout
    config = LoraConfig(
        r=settings.dim,
        lora_alpha=settings.alpha,
        lora_dropout=dropout,
        target_modules=list(target_modules(list(modules.values()), manifest.shape)),
        base_model_name_or_path=manifest.base.name,
        revision=manifest.base.revision,
        task_type="CAUSAL_LM",
        inference_mode=True,
        bias="none",
    )
    document: dict[str, Any] = config.to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in document.items()}


def provenance(source: CommittedCheckpoint) -> dict[str, Any]:
    """Return where something comes from: enough to find the checkpoint again, and to tell it from another."""
    manifest = source.manifest
    return {
        "run_id": manifest.run_id,
        "step": manifest.step,
        "created": manifest.created,
        "manifest_sha256": hash_file(source.path / MANIFEST_NAME).sha256,
        "base": attrs.asdict(manifest.base),
        "lora": attrs.asdict(manifest.lora),
        "trained_with": dict(manifest.versions),
        "exported_with": {
            "ckptrain": ckptrain.__version__,
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }
