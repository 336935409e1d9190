"""How does a NeMo-RL config for supervised fine-tuning (examples/configs/sft.yaml there) read as one of ours?

Both of its backends are known: Megatron, with LoRA under `policy.megatron_cfg.peft`, and DTensor, with the older
`lora_cfg`, whose adapters are Hugging Face's.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from ckptrain.config.foreign import Foreign
from ckptrain.config.imported import Imported
from ckptrain.config.megatron_schedule import megatron_optimizer, megatron_schedule
from ckptrain.config.modules import ALL_LINEAR, FUSED
from ckptrain.config.presets import HUB_HOMES

_FORMATS = {
    "squad": "squad",
    "tulu3_sft_mixture": "tulu3_sft_mixture",
    "openmathinstruct2": "openmathinstruct2",
    "openmathinstruct-2": "openmathinstruct2",
    "gsm8k": "gsm8k",
}
_MESSAGES = ("openai_format", "openaiformatdataset")
_RESPONSES = ("responsedataset", "")
_HF_LAYERS = tuple(part for parts in FUSED.values() for part in parts)
_PLACE_OF_LORA = ("policy.megatron_cfg.peft", "policy.dtensor_cfg.lora_cfg", "policy.lora_cfg", "lora_cfg")
# Sections of settings that ckptrain decides by itself, or has no use for.
_SECTIONS = {
    "policy.generation": "about generating in reinforcement learning",
    "policy.megatron_cfg.distributed_data_parallel_config": "gradients of adapters are small, and reduced in float32",
    "policy.megatron_cfg.env_vars": "set them in the environment",
    "policy.dtensor_cfg.env_vars": "set them in the environment",
    "logger.gpu_monitoring": "memory and throughput are in metrics.jsonl",
    "logger.swanlab": "loggers are TensorBoard, Weights & Biases and MLflow",
}
_QUIET = (
    "policy.dtensor_cfg.enabled",
    "policy.dtensor_cfg._v2",
    "policy.megatron_cfg.enabled",
    "policy.tokenizer.name",
    "cluster",
    "logger.log_dir",
    "logger.tensorboard",
    "logger.monitor_gpus",
)


def is_nemo_rl(foreign: Foreign) -> bool:
    """Tell whether a file is of this kind."""
    return isinstance(foreign.look("policy"), dict)


def from_nemo_rl(foreign: Foreign) -> Imported:
    """Return our config for one of NeMo-RL."""
    found = Imported(form="NeMo-RL")
    megatron = bool(foreign.look("policy.megatron_cfg.enabled"))
    backend = "policy.megatron_cfg" if megatron else "policy.dtensor_cfg"
    other = "policy.dtensor_cfg" if megatron else "policy.megatron_cfg"
    _model(foreign, found)
    _lora(foreign, found, megatron=megatron)
    _layout(foreign, found, backend, megatron=megatron)
    _data(foreign, found)
    _train(foreign, found)
    if megatron:
        _megatron_optimizer(foreign, found)
    else:
        _torch_optimizer(foreign, found)
    _checkpoints(foreign, found)
    _log(foreign, found)
    for section, reason in _SECTIONS.items():
        found.leave(foreign, section, reason)
    for key in (*_QUIET, other, *(("policy.optimizer", "policy.scheduler") if megatron else ())):
        foreign.take(key)
    found.dropped = foreign.rest()
    return found


def _model(foreign: Foreign, found: Imported) -> None:
    found.set("model.pretrained", foreign.take("policy.model_name"), "policy.model_name")
    precision = foreign.take("policy.precision")
    if precision in ("bfloat16", "float32"):
        found.set("model.dtype", precision, "policy.precision")
    elif precision is not None:
        found.note("model.dtype", f"policy.precision is {precision}; here it is bfloat16 or float32")
    tokenizer = foreign.look("policy.tokenizer.name")
    if tokenizer not in (None, found.settings.get("model.pretrained")):
        found.note(
            "data.chat_template",
            f"the tokenizer was that of {tokenizer}; here it is the base's own, so take the"
            " chat template over as a file",
        )
    template = foreign.take("policy.tokenizer.chat_template")
    if template is None and foreign.look("policy.tokenizer") is not None:
        found.note(
            "data.chat_template",
            "there was no chat template there (turns were joined as they are); here the"
            " tokenizer's own is used, or a file",
        )
    elif isinstance(template, str) and template.endswith(".jinja"):
        found.set("data.chat_template", template, "policy.tokenizer.chat_template")
    elif isinstance(template, str) and template != "default":
        found.template = template


def _lora(foreign: Foreign, found: Imported, *, megatron: bool) -> None:
    places = _PLACE_OF_LORA if megatron else (*_PLACE_OF_LORA[1:], _PLACE_OF_LORA[0])
    place = next((one for one in places if isinstance(foreign.look(one), dict)), None)
    for one in _PLACE_OF_LORA:
        if one != place:
            foreign.take(one)
    if place is None or foreign.take(f"{place}.enabled") is False:
        found.note(
            "lora.dim",
            "the file trains the whole model; ckptrain trains adapters only, so rank, alpha and a"
            " learning rate for them are to be chosen",
        )
    if place is None:
        return
    for name in ("dim", "alpha", "dropout", "dropout_position", "a2a_experimental", "lora_dtype"):
        found.set(f"lora.{name}", foreign.take(f"{place}.{name}"), f"{place}.{name}")
    if place == _PLACE_OF_LORA[0]:
        for name in ("lora_A_init_method", "lora_B_init_method"):
            found.set(f"lora.{name}", foreign.take(f"{place}.{name}"), f"{place}.{name}")
        targets, excluded = foreign.take(f"{place}.target_modules"), foreign.take(f"{place}.exclude_modules")
        found.set("lora.target_modules", targets, f"{place}.target_modules")
        found.set("lora.exclude_modules", excluded or None, f"{place}.exclude_modules")
        return
    found.set("lora.kind", "canonical", place)
    found.note("lora.kind", "as Hugging Face's: q, k, v, gate and up have adapters of their own")
    method = {"xavier": "xavier", "uniform": "kaiming"}.get(foreign.take(f"{place}.lora_A_init", "xavier"))
    found.set("lora.lora_A_init_method", method, f"{place}.lora_A_init")
    _huggingface_targets(foreign, found, place)
    foreign.take(f"{place}.use_triton")


def _huggingface_targets(foreign: Foreign, found: Imported, place: str) -> None:
    """Take targets by Hugging Face's names, where wildcards are for the whole of a name."""
    targets = foreign.take(f"{place}.target_modules") or []
    excluded = foreign.take(f"{place}.exclude_modules") or []
    if foreign.take(f"{place}.match_all_linear", default=not targets):
        targets = [ALL_LINEAR]
    chosen: list[str] = []
    for key, names in (("target_modules", targets), ("exclude_modules", excluded)):
        layers: list[str] = []
        for name in names:
            last = str(name).rpartition(".")[2]
            matched = [ALL_LINEAR] if name == ALL_LINEAR else fnmatch.filter(_HF_LAYERS, last)
            if not matched:
                found.note(f"lora.{key}", f"{name} is none of {', '.join(_HF_LAYERS)}, and was left out")
            layers += matched
        if key == "target_modules":
            chosen = layers
        elif layers:
            base = list(_HF_LAYERS) if ALL_LINEAR in chosen else chosen
            chosen = [layer for layer in base if layer not in layers]
    found.set("lora.target_modules", list(dict.fromkeys(chosen)) or None, f"{place}.target_modules")


def _layout(foreign: Foreign, found: Imported, backend: str, *, megatron: bool) -> None:
    prefix = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    keys = {"tensor": prefix, "context": "context_parallel_size", "sequence": "sequence_parallel"}
    if megatron:
        keys |= {"pipeline": "pipeline_model_parallel_size", "expert": "expert_model_parallel_size"}
    for name, key in keys.items():
        found.set(f"parallel.{name}", foreign.take(f"{backend}.{key}"), f"{backend}.{key}")
    if found.settings.get("parallel.tensor") == 1:
        found.settings.pop("parallel.sequence", None)  # nothing to shard over
    if foreign.take(f"{backend}.activation_checkpointing"):
        found.set("train.recompute", "full", f"{backend}.activation_checkpointing")
    if megatron and foreign.take(f"{backend}.fp8_cfg.enabled"):
        found.note("model.fp8", "there it computed in fp8; here model.fp8=rowwise holds the frozen layers in 8 bits")
    foreign.take(f"{backend}.fp8_cfg")
    found.processes = int(foreign.look("cluster.gpus_per_node") or 1)
    if (nodes := foreign.look("cluster.num_nodes")) not in (None, 1):
        found.note("parallel.tensor", f"it ran on {nodes} nodes: start it by srun or torchrun")


def _train(foreign: Foreign, found: Imported) -> None:
    steps = foreign.take("sft.max_num_steps")
    if isinstance(steps, int) and steps > 0:
        found.set("train.steps", steps, "sft.max_num_steps")
    else:
        found.note("train.steps", "the file does not say how many; `ckptrain data` tells the rows of an epoch")
    if epochs := foreign.take("sft.max_num_epochs"):
        found.note(
            "train.steps", f"there it ended after {epochs} epoch(s), if that came first; here steps alone decide"
        )
    found.set("train.seed", foreign.take("sft.seed"), "sft.seed")
    for name in ("micro_batch_size", "global_batch_size"):
        found.set(f"train.{name}", foreign.take(f"policy.train_{name}"), f"policy.train_{name}")
    period = foreign.take("sft.val_period")
    if (
        period
        and period > 0
        and ("data.validation" in found.settings or "data.split_validation_size" in found.settings)
    ):
        found.set("train.eval_every_steps", period, "sft.val_period")
    for key in ("val_at_start", "val_at_end", "val_micro_batch_size", "val_batches", "val_global_batch_size"):
        foreign.take(f"sft.{key}")
    if foreign.take("policy.dynamic_batching.enabled"):
        found.note("data.packing", "dynamic batching is done by packing here")
    foreign.take("policy.dynamic_batching")
    packed = foreign.take("policy.sequence_packing.enabled")
    foreign.take("policy.sequence_packing")
    found.set("data.packing", False, "policy.train_global_batch_size")
    found.note(
        "data.packing",
        "a global batch is so many samples there, and so many rows here, each of one sample with"
        " packing: false. With true a row has several, which is faster: divide train.global_batch_size by the"
        f" samples in a row, which `ckptrain data` tells{' (it was packed there)' if packed else ''}",
    )
    found.set(
        "data.sequence_length", foreign.take("policy.max_total_sequence_length"), "policy.max_total_sequence_length"
    )
    foreign.take("data.max_input_seq_length")
    found.set("data.on_too_long", "drop", "what NeMo-RL does")
    found.note("data.on_too_long", "a sample that is too long is cut there, and not learnt from")
    if foreign.take("data.shuffle") is False:
        found.note("data.train", "data.shuffle is false; here samples are shuffled, by train.seed")


def _data(foreign: Foreign, found: Imported) -> None:
    old = foreign.look("data.dataset_name") is not None or foreign.look("data.train_data_path") is not None
    default = foreign.take("data.default") or {}
    for side in ("train", "validation"):
        said = foreign.take(f"data.{side}")
        origin = f"data.{side}"
        if old:
            said, origin = _old_source(foreign, side), "data"
        if not said:
            continue
        sources = [_source({**default, **one}, found, side) for one in (said if isinstance(said, list) else [said])]
        if None not in sources:
            found.set(f"data.{side}", sources[0] if len(sources) == 1 else sources, origin)
        size = said.get("split_validation_size") if isinstance(said, dict) else None
        if side == "train" and size and not foreign.look("data.validation"):
            found.set("data.split_validation_size", size, "data.train.split_validation_size")
            found.note("data.split_validation_size", "drawn by train.seed: other samples than there")
    if "data.validation" in found.settings:
        _limit_validation(foreign, found)
    for key in ("add_bos", "add_eos", "add_generation_prompt", "num_workers", "use_multiple_dataloader"):
        foreign.take(f"data.{key}")
    found.note(
        "data.train",
        "begin and end of a text are those of the chat template: look at some samples with"
        " `ckptrain data THIS_FILE --show 3`",
    )


def _old_source(foreign: Foreign, side: str) -> dict[str, Any]:
    """Return a source as older files say it, for both sides at once."""
    name = foreign.take("data.dataset_name", "")
    path = foreign.take("data.train_data_path" if side == "train" else "data.val_data_path")
    keys = ("input_key", "output_key", "chat_key", "system_key", "system_prompt", "split", "prompt_file")
    said = {key: foreign.take(f"data.{key}") for key in keys}
    split = foreign.take("data.train_split" if side == "train" else "data.val_split")
    known = _FORMATS.get(str(name).lower())
    if path is None and (known is None or (side == "validation" and HUB_HOMES[known].validation is None)):
        return {}
    if side == "validation":
        said.pop("split")
    return {"dataset_name": name, "data_path": path, **said, **({"split": split} if split else {})}


def _source(said: dict[str, Any], found: Imported, side: str) -> dict[str, Any] | None:
    """Return one of our sources, or None where it is of a kind that is not known here."""
    name, path = str(said.get("dataset_name") or "").lower(), said.get("data_path")
    source: dict[str, Any] = {} if path is None else {"path": path}
    columns: dict[str, Any] = {}
    if name in _FORMATS and path is None:
        source["format"] = _FORMATS[name]
    elif name in _MESSAGES or said.get("chat_key"):
        source["format"] = "messages"
        columns = {"messages": said.get("chat_key")}
    elif name in _RESPONSES and path is not None:
        source["format"] = "input_output"
        columns = {"input": said.get("input_key"), "output": said.get("output_key")}
    else:
        found.note(
            f"data.{side}",
            f"the dataset {said.get('dataset_name')!r} is not known here: give a path or a Hub id, and its format",
        )
        return None
    if path is not None and str(path).startswith(("/", ".")) is False:
        found.note(f"data.{side}", "a relative path is relative to this file here, to the working directory there")
    changed = {ours: theirs for ours, theirs in columns.items() if theirs not in (None, ours)}
    if changed:
        source["columns"] = changed
    for ours, theirs in (("name", "subset"), ("split", "split")):
        if said.get(theirs):
            source[ours] = said[theirs]
    for key in ("prompt_file", "system_prompt_file", "system_prompt", "system_key"):
        if said.get(key):
            found.note(f"data.{side}", f"{key} is {said[key]}: put it into the chat template, or into the rows")
    return source


def _limit_validation(foreign: Foreign, found: Imported) -> None:
    """Look at as many validation samples as there, where a slice can say so."""
    batches, size = foreign.look("sft.val_batches"), foreign.look("sft.val_global_batch_size")
    source = found.settings["data.validation"]
    if not isinstance(source, dict) or not isinstance(batches, int) or batches <= 0 or not isinstance(size, int):
        return
    home = HUB_HOMES.get(str(source.get("format")))
    split = source.get("split") or (home.validation if home is not None else None)
    if split and "[" not in split:
        source["split"] = f"{split}[:{batches * size}]"
        found.note(
            "data.validation", f"the first {batches * size} samples: sft.val_batches x sft.val_global_batch_size"
        )


def _megatron_optimizer(foreign: Foreign, found: Imported) -> None:
    place, scheduler = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    megatron_optimizer(foreign, found, place, foreign.take("policy.max_grad_norm"))
    megatron_schedule(foreign, found, scheduler, steps=foreign.look("sft.max_num_steps"))


def _torch_optimizer(foreign: Foreign, found: Imported) -> None:
    """Take torch's optimizer and schedulers, as the DTensor backend has them."""
    place = "policy.optimizer"
    name = foreign.take(f"{place}.name", "torch.optim.AdamW")
    if not str(name).endswith("AdamW"):
        found.note("optimizer.lr", f"{place}.name is {name}; here it is AdamW, which needs another learning rate")
    for key in ("lr", "weight_decay", "betas", "eps"):
        found.set(f"optimizer.{key}", foreign.take(f"{place}.kwargs.{key}"), f"{place}.kwargs.{key}")
    found.leave(foreign, place, "how torch computes it is ckptrain's matter")
    found.set("optimizer.clip_grad", foreign.take("policy.max_grad_norm"), "policy.max_grad_norm")
    found.set("optimizer.schedule", "constant", "policy.scheduler")
    schedulers = foreign.take("policy.scheduler") or []
    for one in schedulers if isinstance(schedulers, list) else [schedulers]:
        kind, options = str(one.get("name", "")).rpartition(".")[2], one.get("kwargs") or {}
        if kind == "LinearLR":
            found.set("optimizer.warmup_steps", options.get("total_iters"), "policy.scheduler")
            found.note(
                "optimizer.warmup_steps",
                f"it began at {options.get('start_factor', 1 / 3):g} of the rate; here it does at 0",
            )
        elif kind == "CosineAnnealingLR":
            found.set("optimizer.schedule", "cosine", "policy.scheduler")
            found.set("optimizer.min_lr", options.get("eta_min"), "policy.scheduler")
            found.note("optimizer.schedule", f"it went down over {options.get('T_max')} steps; here over train.steps")
        elif kind not in ("", "ConstantLR"):
            found.note("optimizer.schedule", f"{kind} is not here; the rate stays constant after the warm-up")


def _checkpoints(foreign: Foreign, found: Imported) -> None:
    found.set("checkpoint.every_steps", foreign.take("checkpointing.save_period"), "checkpointing.save_period")
    found.run_dir = foreign.take("checkpointing.checkpoint_dir")
    metric, kept = str(foreign.take("checkpointing.metric_name", "")), foreign.take("checkpointing.keep_top_k")
    by = {"val_loss": "val_loss", "loss": "loss"}.get(metric.rpartition(":")[2])
    lower = not foreign.take("checkpointing.higher_is_better")
    validated = "train.eval_every_steps" in found.settings
    if kept and by and lower and (by == "loss" or validated):
        found.set("checkpoint.keep_best", kept, "checkpointing.keep_top_k")
        found.set("checkpoint.metric", by, "checkpointing.metric_name")
        found.set("checkpoint.keep_last", 1, "checkpointing.keep_top_k")
        found.note("checkpoint.keep_last", "the newest is always kept here: a resume goes on from it")
    elif kept:
        found.set("checkpoint.keep_last", kept, "checkpointing.keep_top_k")
        if metric:
            found.note("checkpoint.keep_last", f"there the best by {metric} were kept, here the newest are")
    if foreign.take("checkpointing.enabled") is False:
        found.note("checkpoint.every_steps", "there nothing was saved; here the last step always is")
    if by_when := foreign.take("checkpointing.checkpoint_must_save_by"):
        parts = [int(part) for part in str(by_when).split(":") if part.isdigit()]
        minutes = sum(part * unit for part, unit in zip(reversed(parts), (1 / 60, 1, 60, 1440), strict=False))
        found.set("train.max_minutes", minutes or None, "checkpointing.checkpoint_must_save_by")


def _log(foreign: Foreign, found: Imported) -> None:
    found.set("log.tensorboard", foreign.take("logger.tensorboard_enabled"), "logger.tensorboard_enabled")
    wandb, mlflow = foreign.take("logger.wandb") or {}, foreign.take("logger.mlflow") or {}
    if foreign.take("logger.wandb_enabled"):
        found.set("log.wandb", wandb, "logger.wandb")
    if foreign.take("logger.mlflow_enabled"):
        names = {"experiment": "experiment_name", "run_name": "run_name", "tracking_uri": "tracking_uri"}
        found.set(
            "log.mlflow",
            {ours: mlflow[theirs] for ours, theirs in names.items() if mlflow.get(theirs)},
            "logger.mlflow",
        )
