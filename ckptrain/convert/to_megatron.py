"""From an adapter to a LoRA checkpoint that Megatron-Bridge and NeMo-RL load: megatron-core's names, torch's format.

What a checkpoint of ckptrain holds has megatron-core's names and form already, so the tensors are written as they are,
and beside them what Megatron-Bridge's loader looks for: which iteration is the latest, the LoRA settings, the common
state. Nothing of Megatron is needed for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
import yaml

from ckptrain.checkpoint.integrity import fsync_directory, fsync_file
from ckptrain.checkpoint.sharded import save_tensors
from ckptrain.config.linear import is_expert
from ckptrain.convert.checkpoint_source import stored_state, stored_weights
from ckptrain.convert.directory import Kind, check_destination, published, write_json, write_provenance
from ckptrain.convert.megatron_files import BACKEND_FILE, CANONICAL_TARGET, LORA_TARGET, RUN_CONFIG, TRACKER
from ckptrain.convert.megatron_layout import placement_problems
from ckptrain.convert.source import AdapterSource
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_peft import check_whole, provenance
from ckptrain.errors import ProblemsError

MEGATRON = Kind(
    verb="export",
    noun="export for Megatron",
    provenance_name="ckptrain_megatron.json",
    format="ckptrain-megatron-1",
)

# Megatron-Bridge's TrainState (training/state.py): what it does not find there it refuses to load.
_COUNTS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_FLAGS = ("do_train", "do_valid", "do_test")


@attrs.frozen(kw_only=True)
class MegatronExport:
    """A LoRA checkpoint of Megatron that was written."""

    path: Path
    """What `checkpoint.load` of Megatron-Bridge takes."""
    iteration: Path
    """The directory in it that holds the tensors."""
    tensors: int
    num_bytes: int
    """Size of the files that hold them."""
    dtype: str
    base: str
    kind: str
    rank: int
    alpha: int
    run_id: str
    """Empty where it is not known, as the step is 0."""
    step: int
    warnings: tuple[str, ...]
    """What loading it under Megatron-Bridge depends on."""


def export_megatron(checkpoint: Path, out: Path, *, overwrite: bool = False, base: str | None = None) -> MegatronExport:
    """Write an adapter as a LoRA checkpoint that Megatron-Bridge loads, in the type that it was trained in.

    Args:
        checkpoint: a checkpoint, a run, of which the newest is taken, or what else `open_source` knows.
        out: the directory to make; it is there complete or not at all.
        overwrite: replace an earlier one at `out`.
        base: the base model, for an adapter that does not say it.

    Raises:
        CheckpointNotFound: `checkpoint` is none.
        CheckpointDamaged: it is not what its manifest says, or not whole.
        ProblemsError: Megatron-Bridge would compute something else with it.
        ConfigError: the base is needed, and not on this machine.
        CkptrainError: `out` is in the way, or cannot be written.
    """
    source, out = open_source(checkpoint, base=base), out.resolve()
    name = f"iter_{source.step:07d}"
    stacked = is_stacked(source)
    with source.held():
        check_destination(MEGATRON, out, source.path, overwrite=overwrite)
        _check_meaning(source)
        check_whole(source, "export")
        with published(out, overwrite=overwrite) as staging:
            written = save_tensors(stored_state(source, stacked=stacked), staging / name)
            _write_beside(staging, name, source, stacked=stacked)
            facts = {"tensors": len(written.tensors), "iteration": source.step}
            write_provenance(MEGATRON, staging, {**provenance(source), **facts})
    settings = source.facts.lora.settings
    return MegatronExport(
        path=out,
        iteration=out / name,
        tensors=len(written.tensors),
        num_bytes=sum(digest.num_bytes for file, digest in written.files.items() if file.endswith(".distcp")),
        dtype=source.facts.dtype,
        base=source.base.name,
        kind=settings.kind,
        rank=settings.dim,
        alpha=settings.alpha,
        run_id=source.run_id,
        step=source.step,
        warnings=_warnings(source, stacked=stacked),
    )


def _check_meaning(source: AdapterSource) -> None:
    """Refuse an adapter with which Megatron-Bridge would compute something else.

    Raises:
        ProblemsError: it is such.
    """
    lora = source.facts.lora
    problems = placement_problems(lora.modules, source.shape)
    if lora.settings.has_magnitudes:
        problems.append("it is DoRA with an A for each part of a layer; Megatron-Bridge's has one for the whole layer")
    if problems:
        raise ProblemsError(f"cannot export {source.path} for Megatron-Bridge", problems)


def is_stacked(source: AdapterSource) -> bool:
    """Tell whether all that is adapted is so in every layer, so that megatron-core stacks it over the layers."""
    return all(stored.has_layer_axis for stored in stored_weights(source.facts.lora, source.shape).values())


def _write_beside(staging: Path, name: str, source: AdapterSource, *, stacked: bool) -> None:
    """Write what Megatron-Bridge's loader looks for besides the tensors (its training/checkpointing.py)."""
    directory, step = staging / name, source.step
    # The settings by which the loader lays out the model that it fills.
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not stacked:
        content["non_homogeneous_layers"] = True
    common = {"checkpoint_version": 3.0, "iteration": step, "content_metadata": content}
    torch.save(common, directory / "common.pt")
    write_json(
        directory / BACKEND_FILE,
        {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        },
    )
    (directory / RUN_CONFIG).write_text(yaml.safe_dump(_run_config(source, stacked=stacked)), encoding="utf-8")
    train_state = {
        "step": torch.tensor(step, dtype=torch.int64),
        **{count: torch.tensor(0, dtype=torch.int64) for count in _COUNTS},
        "floating_point_operations_so_far": torch.tensor(0.0, dtype=torch.float64),
        **{flag: torch.tensor(data=False) for flag in _FLAGS},
    }
    for path in (directory / "train_state.pt", staging / "latest_train_state.pt"):
        torch.save(train_state, path)
    (staging / TRACKER).write_text(str(step), encoding="utf-8")
    for file in directory.iterdir():
        fsync_file(file)
    fsync_directory(directory)


def _run_config(source: AdapterSource, *, stacked: bool) -> dict[str, Any]:
    """Return what Megatron-Bridge and those who read its checkpoints take from run_config.yaml."""
    settings, shape = source.facts.lora.settings, source.shape
    has_experts = any(map(is_expert, source.facts.lora.modules))
    model: dict[str, Any] = {
        "hf_model_id": source.base.name,
        **({"hf_model_revision": source.base.revision} if source.base.revision else {}),
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }
    if shape.num_experts:
        model |= {"num_moe_experts": shape.num_experts, "moe_ffn_hidden_size": shape.moe_ffn_hidden_size}
    peft: dict[str, Any] = {
        "_target_": CANONICAL_TARGET if settings.kind == "canonical" else LORA_TARGET,
        "target_modules": _target_modules(source.facts.lora.modules, stacked=stacked),
        "exclude_modules": [],
        "dim": settings.dim,
        "alpha": settings.alpha,
        "dropout": settings.dropout,
        "dropout_position": settings.dropout_position,
        **({"share_expert_adapters": False} if has_experts else {}),
    }
    checkpoint = {
        "ckpt_format": "torch_dist",
        "save_optim": False,
        "save_rng": False,
        "fully_parallel_save": False,
    }
    return {"checkpoint": checkpoint, "model": model, "peft": peft}


def _target_modules(modules: tuple[str, ...], *, stacked: bool) -> list[str]:
    """Return how Megatron-Bridge's LoRA chooses modules; an expert's name has `.local_experts.N` in it there."""
    if stacked:
        return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    return [f"*{module.removeprefix('decoder').replace('.experts.', '.experts*.')}" for module in modules]


def _warnings(source: AdapterSource, *, stacked: bool) -> tuple[str, ...]:
    lora = source.facts.lora
    found = []
    if source.facts.lora.settings.kind == "canonical":
        found.append("load it at tensor_model_parallel_size=1: beyond, Megatron-Bridge's CanonicalLoRA mixes up rows")
    if any(map(is_expert, lora.modules)):
        found.append(
            "each expert has an adapter of its own: set model.moe_grouped_gemm=false or"
            " peft.share_expert_adapters=false, or Megatron-Bridge loads the mean of those of each process"
        )
    if not stacked:
        found.append(
            "not every layer is adapted, so each layer's weights are stored apart: Megatron-Bridge finds that in the"
            " checkpoint; other loaders have to ask for non_homogeneous_layers"
        )
    return tuple(found)
