"""How does a run_config.yaml, which Megatron-Bridge leaves in every checkpoint, read as a config of ours?

It has every key of Megatron-Bridge's config, at its default or not, so what is listed as having no counterpart is
limited to the sections that say how a run learns, and to what is not off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptrain.config.foreign import Foreign
from ckptrain.config.imported import Imported
from ckptrain.config.megatron_schedule import megatron_optimizer, megatron_schedule
from ckptrain.config.presets import HUB_HOMES

_KINDS = {"LoRA": "lora", "CanonicalLoRA": "canonical", "DoRA": "dora"}
_LAYOUT = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "sequence": "sequence_parallel",
}
_HUB_NAMES = {home.path: name for name, home in HUB_HOMES.items()}
# Sections that say how a run is computed, not how it learns.
_SECTIONS = {
    "model": "the base's shape and kernels: ckptrain takes them from the base, and chooses",
    "ddp": "gradients of adapters are small, and reduced in float32",
    "dist": "process groups are ckptrain's matter",
    "comm_overlap": "ckptrain decides what overlaps",
    "mixed_precision": "model.dtype says it",
    "rerun_state_machine": "a run that diverges stops",
    "ft": "a run is resumed by starting it again",
    "straggler": "not watched",
    "nvrx_straggler": "not watched",
    "inprocess_restart": "a run is resumed by starting it again",
    "profiling": "train.profile=3 profiles three steps",
    "tensor_inspect": "not there",
    "optimizer_config_override_provider": "not there",
    "env_vars": "set them in the environment",
}
_OFF = (False, 0, -1)
_OF_TRAIN = ("_target_", "train_iters", "train_samples")
"""What its section `train` has and ours has not."""


def is_bridge(foreign: Foreign) -> bool:
    """Tell whether a file is of this kind."""
    train = foreign.look("train")
    has_both = isinstance(foreign.look("model"), dict) and isinstance(train, dict)
    return has_both and not train.keys().isdisjoint(_OF_TRAIN)


def from_bridge(foreign: Foreign) -> Imported:
    """Return our config for one of Megatron-Bridge."""
    found = Imported(form="Megatron-Bridge")
    _model(foreign, found)
    _lora(foreign, found)
    _data(foreign, found)
    _train(foreign, found)
    megatron_optimizer(foreign, found, "optimizer")
    megatron_schedule(foreign, found, "scheduler", steps=foreign.look("train.train_iters"))
    _checkpoints(foreign, found)
    _log(foreign, found)
    for section, reason in _SECTIONS.items():
        found.leave(foreign, section, reason)
    rest = foreign.rest()
    found.dropped = {
        key: value
        for key, value in rest.items()
        if value not in _OFF and not any(part.startswith("_") for part in key.split("."))
    }
    return found


def _model(foreign: Foreign, found: Imported) -> None:
    named = (
        ("checkpoint.hf_source_path", foreign.look("checkpoint.hf_source_path")),
        ("model.hf_model_id", foreign.look("model.hf_model_id")),
        ("tokenizer.tokenizer_model", foreign.look("tokenizer.tokenizer_model")),
    )
    origin, name = next(((origin, name) for origin, name in named if name), ("", None))
    found.set("model.pretrained", name, origin)
    if origin.startswith("tokenizer"):
        found.note("model.pretrained", "the file names no base: this is what it has the tokenizer of")
    found.set("model.revision", foreign.look("model.hf_model_revision"), "model.hf_model_revision")
    found.leave(foreign, "tokenizer", "the tokenizer is the base's")
    half = any(foreign.look(key) for key in ("model.bf16", "optimizer.bf16")) or "bf16" in str(
        foreign.look("mixed_precision")
    )
    found.set("model.dtype", "bfloat16" if half else "float32", "mixed_precision, model.bf16")
    if foreign.look("model.fp16") or foreign.look("model.fp8"):
        found.note(
            "model.dtype", "float16 and fp8 of Megatron are not here (model.fp8=rowwise holds frozen layers in 8 bits)"
        )
    for ours, theirs in _LAYOUT.items():
        value = foreign.look(f"model.{theirs}")
        if value is None:
            value = foreign.look(f"model.transformer.{theirs}")
        found.set(f"parallel.{ours}", value or None, f"model.{theirs}")
    granularity = foreign.look("model.recompute_granularity")
    if granularity in ("full", "selective"):
        found.set("train.recompute", granularity, "model.recompute_granularity")
        if granularity == "selective":
            found.note("train.recompute", "there it recomputes what model.recompute_modules lists, here the MLPs")


def _lora(foreign: Foreign, found: Imported) -> None:
    if not foreign.look("peft"):
        found.note(
            "lora.dim",
            "the file trains the whole model; ckptrain trains adapters only, so rank, alpha and a"
            " learning rate for them are to be chosen",
        )
        return
    target = str(foreign.take("peft._target_", "")).rpartition(".")[2]
    if target in _KINDS:
        found.set("lora.kind", _KINDS[target], "peft._target_")
    else:
        found.note("lora.kind", f"{target or 'the kind of adapter'} is not here: lora, canonical or dora")
    names = (
        "dim",
        "alpha",
        "dropout",
        "dropout_position",
        "lora_A_init_method",
        "lora_B_init_method",
        "a2a_experimental",
    )
    for name in names:
        found.set(f"lora.{name}", foreign.take(f"peft.{name}"), f"peft.{name}")
    dtype = foreign.take("peft.lora_dtype")
    name = str(dtype.get("_target_") if isinstance(dtype, dict) else dtype).removeprefix("torch.")
    found.set("lora.lora_dtype", name if dtype is not None else None, "peft.lora_dtype")
    found.set("lora.target_modules", foreign.take("peft.target_modules"), "peft.target_modules")
    found.set("lora.exclude_modules", foreign.take("peft.exclude_modules") or None, "peft.exclude_modules")
    foreign.take("peft.canonical_mapping")  # made from target_modules
    foreign.take("peft.params_to_save")


def _data(foreign: Foreign, found: Imported) -> None:
    length = (
        foreign.take("dataset.seq_length")
        or foreign.take("dataset.sequence_length")
        or foreign.look("model.seq_length")
    )
    found.set("data.sequence_length", length, "dataset.seq_length")
    root = foreign.take("dataset.dataset_root")
    if root:
        for side, name in (("train", "training"), ("validation", "validation")):
            path = Path(str(root)) / f"{name}.jsonl"
            if side == "train" or foreign.look("dataset.do_validation") is not False:
                found.set(f"data.{side}", {"path": str(path), "format": "auto"}, "dataset.dataset_root")
        found.note(
            "data.train",
            "there a prompt template joins input and output (dataset.dataset_kwargs); here the chat"
            " template does, with the input as the user's turn",
        )
    else:
        for side, keys in (
            ("train", ("source", "hf_dataset")),
            ("validation", ("validation_source", "hf_validation_dataset")),
        ):
            for key in keys:
                _hub(foreign, found, f"dataset.{key}", side)
        if "data.train" not in found.settings:
            _hub(foreign, found, "dataset", "train")
    if "data.train" not in found.settings:
        found.note("data.train", "the file names no data that is known here: give a path or a Hub id, and its format")
    share = foreign.take("dataset.hf_validation_proportion") or foreign.take("dataset.val_proportion")
    if share and "data.validation" not in found.settings:
        found.set("data.split_validation_size", share, "dataset.hf_validation_proportion")
        found.note("data.split_validation_size", "drawn by train.seed: other samples than there")
    packed = any(
        foreign.take(f"dataset.{key}")
        for key in (
            "enable_offline_packing",
            "offline_packing_specs",
            "packed_sequence_specs",
            "enable_in_batch_packing",
        )
    )
    found.set("data.packing", packed, "dataset.*packing*")
    if not packed:
        found.note(
            "data.packing",
            "each sample has a row of its own, as there; true is faster, and makes the global batch"
            " larger: it counts rows",
        )
    for key in (
        "_target_",
        "do_validation",
        "do_test",
        "seed",
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "dataloader_type",
        "data_sharding",
        "memmap_workers",
    ):
        foreign.take(f"dataset.{key}")


def _hub(foreign: Foreign, found: Imported, place: str, side: str) -> None:
    path = foreign.take(f"{place}.path_or_dataset") or foreign.take(f"{place}.dataset_name")
    if not isinstance(path, str):
        return
    source: dict[str, Any] = {"path": path}
    form = _HUB_NAMES.get(path) or (path if path in HUB_HOMES else None)
    if form is not None:
        source = {"format": form}
    for ours, theirs in (("name", "subset"), ("split", "split")):
        if isinstance(value := foreign.take(f"{place}.{theirs}"), str):
            source[ours] = value
    if foreign.take(f"{place}.process_example_fn") or foreign.take(f"{place}.schema_adapter"):
        found.note(f"data.{side}", "a function made samples of the rows there; here data.format and columns do")
    found.set(f"data.{side}", source, place)


def _train(foreign: Foreign, found: Imported) -> None:
    batch = foreign.take("train.global_batch_size")
    steps = foreign.take("train.train_iters")
    samples = foreign.take("train.train_samples")
    if steps is None and samples and batch:
        steps = samples // batch
    found.set("train.steps", steps, "train.train_iters")
    if steps is None:
        found.note("train.steps", "the file does not say how many; `ckptrain data` tells the rows of an epoch")
    found.set("train.global_batch_size", batch, "train.global_batch_size")
    found.set("train.micro_batch_size", foreign.take("train.micro_batch_size"), "train.micro_batch_size")
    if foreign.take("train.rampup_batch_size"):
        found.note("train.global_batch_size", "there it grew to this (train.rampup_batch_size); here it is constant")
    found.set("train.max_minutes", foreign.take("train.exit_duration_in_mins"), "train.exit_duration_in_mins")
    found.set("train.seed", foreign.take("rng.seed"), "rng.seed")
    every = foreign.take("validation.eval_interval") or foreign.take("train.eval_interval")
    batches = foreign.take("validation.eval_iters") or foreign.take("train.eval_iters")
    if every and ("data.validation" in found.settings or "data.split_validation_size" in found.settings):
        found.set("train.eval_every_steps", every, "validation.eval_interval")
        if batches:
            found.note(
                "train.eval_every_steps", f"there {batches} batches were looked at; here all validation samples are"
            )
    for key in (
        "_target_",
        "manual_gc",
        "manual_gc_eval",
        "manual_gc_interval",
        "exit_signal",
        "empty_unused_memory_level",
        "check_optimizer_step_success",
    ):
        foreign.take(f"train.{key}")
    found.leave(foreign, "rng", "one seed is all there is")
    found.leave(foreign, "validation", "all of data.validation is looked at, each time")


def _checkpoints(foreign: Foreign, found: Imported) -> None:
    found.set("checkpoint.every_steps", foreign.take("checkpoint.save_interval"), "checkpoint.save_interval")
    kept = foreign.take("checkpoint.most_recent_k")
    if isinstance(kept, int) and kept > 0:
        found.set("checkpoint.keep_last", kept, "checkpoint.most_recent_k")
    elif kept == -1:
        found.note(
            "checkpoint.keep_last", "there every checkpoint was kept; here keep_last are, and those of keep_every"
        )
    found.set(
        "checkpoint.keep_every", foreign.take("checkpoint.save_retain_interval"), "checkpoint.save_retain_interval"
    )
    found.set("checkpoint.asynchronous", foreign.take("checkpoint.async_save"), "checkpoint.async_save")
    found.run_dir = foreign.take("checkpoint.save")
    if load := foreign.take("checkpoint.load"):
        found.note("model.adapter", f"there it went on from {load}; model.adapter={load} starts from its adapter")
    if base := foreign.take("checkpoint.pretrained_checkpoint"):
        found.note(
            "model.pretrained", f"there the base was read from {base}, in Megatron's form; here from Hugging Face's"
        )
    found.leave(foreign, "checkpoint", "format, loading and how it is written are ckptrain's own")


def _log(foreign: Foreign, found: Imported) -> None:
    found.set("log.every_steps", foreign.take("logger.log_interval"), "logger.log_interval")
    found.set("log.tensorboard", foreign.take("logger.tensorboard_dir") is not None, "logger.tensorboard_dir")
    if project := foreign.take("logger.wandb_project"):
        names = {
            "project": project,
            "name": foreign.take("logger.wandb_exp_name"),
            "entity": foreign.take("logger.wandb_entity"),
        }
        found.set("log.wandb", {name: value for name, value in names.items() if value}, "logger.wandb_project")
    if experiment := foreign.take("logger.mlflow_experiment"):
        names = {
            "experiment": experiment,
            "run_name": foreign.take("logger.mlflow_run_name"),
            "tracking_uri": foreign.take("logger.mlflow_tracking_uri"),
        }
        found.set("log.mlflow", {name: value for name, value in names.items() if value}, "logger.mlflow_experiment")
    found.leave(foreign, "logger", "what is measured is in RUN/metrics.jsonl")
