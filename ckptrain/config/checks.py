"""Does the config contradict itself? What can be told before the base model's shape and the processes are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from ckptrain.config.base import is_url
from ckptrain.config.modules import MODULE_NAMES
from ckptrain.config.schema import RunConfig
from ckptrain.config.sources import source_problems
from ckptrain.config.values import suggestion


@attrs.frozen(kw_only=True)
class Contradiction:
    """Keys that do not go together; the first is the one to look at."""

    keys: tuple[str, ...]
    text: str


def unproven(config: RunConfig) -> list[str]:
    """Return what is asked for and understood, but does not give the numbers of a single process, or was not shown to.

    Such a run would train something else without a word, so it is refused until a test shows that it does not.
    """
    parallel = config.parallel
    found = []
    if parallel.sequence and config.model.backend != "local":
        found.append(
            "parallel.sequence=true: sequence parallel training has been compared with one process for the local"
            " layers, not for Transformer Engine's; set model.backend=local, or parallel.sequence=false"
        )
    if parallel.sequence and config.lora.a2a_experimental:
        found.append(
            "lora.a2a_experimental=true: under sequence parallelism it exchanges activations in a way that has not been"
            " compared with one process; set lora.a2a_experimental=false"
        )
    if parallel.context > 1 and config.model.backend != "local":
        found.append(
            f"parallel.context={parallel.context}: context parallel training has been compared with one process for the"
            " local layers, not for Transformer Engine's; set model.backend=local, or parallel.context=1"
        )
    if parallel.expert > 1:
        found.append(
            f"parallel.expert={parallel.expert}: expert parallel training has not been compared with one process; set"
            " parallel.expert=1"
        )
    return found


def config_problems(config: RunConfig, *, check_inputs: bool = True) -> list[str]:
    """Return what contradicts itself in a config, each with what to do; empty when nothing does."""
    return [found.text for found in contradictions(config, check_inputs=check_inputs)]


def contradictions(config: RunConfig, *, check_inputs: bool = True) -> list[Contradiction]:
    """Return the same as `config_problems`, with the keys; without `check_inputs` no file is looked for."""
    found = [
        *_model(config),
        *_fp8(config),
        *_lora(config),
        *_parallel(config),
        *_optimizer(config),
        *_validation(config),
    ]
    found += _sources(config, check_inputs=check_inputs)
    return [*found, *_inputs(config)] if check_inputs else found


def _model(config: RunConfig) -> Iterator[Contradiction]:
    model = config.model
    if model.revision is not None and model.pretrained.startswith(("/", "package:")):
        yield _contradiction(
            "model.revision, model.pretrained",
            f"model.revision is {model.revision!r}, but model.pretrained is local ({model.pretrained}) and has no"
            " revisions: remove model.revision",
        )


def _fp8(config: RunConfig) -> Iterator[Contradiction]:
    if config.model.fp8 is None:
        return
    if config.model.dtype != "bfloat16":
        yield _contradiction(
            "model.fp8, model.dtype",
            f"model.fp8={config.model.fp8} computes the frozen layers in 8 bits beside bfloat16, but model.dtype is"
            f" {config.model.dtype}: set model.dtype=bfloat16, or model.fp8=null",
        )
    if config.lora.fused == "never":
        yield _contradiction(
            "model.fp8, lora.fused",
            f"model.fp8={config.model.fp8} is computed by the fused layers, but lora.fused is never: set"
            " lora.fused=auto, or model.fp8=null",
        )


def _lora(config: RunConfig) -> Iterator[Contradiction]:
    lora = config.lora
    if not lora.enabled:
        yield _contradiction(
            "lora.enabled", "lora.enabled is false, but ckptrain trains adapters only: set it to true or remove it"
        )
    if lora.exclude_modules and lora.target_modules:
        yield _contradiction(
            "lora.exclude_modules, lora.target_modules",
            "lora.exclude_modules leaves modules out of all linear layers, but lora.target_modules already chooses"
            f" {', '.join(lora.target_modules)}: set lora.target_modules=[] too, or remove lora.exclude_modules",
        )
    if lora.has_magnitudes and lora.dropout:
        yield _contradiction(
            "lora.kind, lora.dropout",
            f"lora.kind is dora and lora.dropout is {lora.dropout}: PEFT then runs the base layer a second time, on"
            " what dropout leaves of its inputs, which is not done here; set lora.dropout=0, or lora.kind=canonical",
        )
    if lora.lora_A_init_method == lora.lora_B_init_method == "zero":
        yield _contradiction(
            "lora.lora_A_init_method, lora.lora_B_init_method",
            "lora.lora_A_init_method and lora.lora_B_init_method are both zero, so neither ever has a gradient: start"
            " one of them otherwise (A: xavier)",
        )
    if lora.lora_dtype is not None and lora.lora_dtype != config.model.dtype:
        yield _contradiction(
            "lora.lora_dtype, model.dtype",
            f"lora.lora_dtype={lora.lora_dtype} differs from model.dtype={config.model.dtype}: Megatron's parallel"
            " adapters have the model's type (the optimizer keeps float32 masters in either case); set"
            " lora.lora_dtype=null",
        )
    for key, names in (("lora.target_modules", lora.target_modules), ("lora.exclude_modules", lora.exclude_modules)):
        for name in names:
            # Wildcards and full names are matched against the base model's modules, once those are known.
            if name not in MODULE_NAMES and "*" not in name and "." not in name:
                yield _contradiction(
                    key,
                    f"{key}: unknown module {name!r}{suggestion(name, MODULE_NAMES)}; there are"
                    f" {', '.join(MODULE_NAMES)}, wildcards such as *.layers.0.*.linear_qkv, and full names",
                )


def _parallel(config: RunConfig) -> Iterator[Contradiction]:
    parallel, train = config.parallel, config.train
    if parallel.sequence and parallel.tensor == 1:
        yield _contradiction(
            "parallel.sequence, parallel.tensor",
            "parallel.sequence shards activations over the tensor parallel processes, but parallel.tensor is 1: set"
            " parallel.tensor to 2 or more, or parallel.sequence=false",
        )
    if train.global_batch_size % train.micro_batch_size:
        yield _contradiction(
            "train.global_batch_size, train.micro_batch_size",
            f"train.global_batch_size={train.global_batch_size} is not a multiple of"
            f" train.micro_batch_size={train.micro_batch_size}: change one of them",
        )
    if config.data.sequence_length % (2 * parallel.context) and parallel.context > 1:
        yield _contradiction(
            "data.sequence_length, parallel.context",
            f"data.sequence_length={config.data.sequence_length} is not a multiple of {2 * parallel.context}, twice"
            " parallel.context: samples are padded to a multiple of that, and none may become longer than a row",
        )


def _optimizer(config: RunConfig) -> Iterator[Contradiction]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.min_lr > optimizer.lr:
        yield _contradiction(
            "optimizer.min_lr, optimizer.lr",
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}: the cosine goes down from lr"
            " to min_lr",
        )
    if optimizer.schedule == "cosine" and optimizer.warmup_steps >= steps:
        yield _contradiction(
            "optimizer.warmup_steps, train.steps",
            f"optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of train.steps={steps} for the cosine: set"
            f" it below {steps}, or optimizer.schedule=constant",
        )


def _validation(config: RunConfig) -> Iterator[Contradiction]:
    data = config.data
    if data.validation is not None and data.split_validation_size is not None:
        yield _contradiction(
            "data.split_validation_size, data.validation",
            f"data.split_validation_size={data.split_validation_size} keeps training samples for validation, and"
            " data.validation names others: remove one of them",
        )
    if (size := data.split_validation_size) is not None and size > 1 and not size.is_integer():
        yield _contradiction(
            "data.split_validation_size",
            f"data.split_validation_size={data.split_validation_size} is neither a share below 1 nor a whole number",
        )
    if data.has_validation:
        return
    asked = {
        "checkpoint.keep_best": (
            config.checkpoint.metric == "val_loss" and config.checkpoint.keep_best,
            "compares val_loss",
        ),
        "train.eval_every_steps": (config.train.eval_every_steps, "says when to validate"),
        "log.sample_tokens": (config.log.sample_tokens, "answers a validation sample"),
    }
    for key, (value, use) in asked.items():
        if value:
            yield _contradiction(
                f"{key}, data.validation",
                f"{key}={value} {use}, but data.validation is null: give a validation file, or"
                f" data.split_validation_size, or remove {key}",
            )


def _sources(config: RunConfig, *, check_inputs: bool) -> Iterator[Contradiction]:
    for key, sources in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for text in source_problems(key, sources or (), check_inputs=check_inputs):
            yield _contradiction(key, text)


def _inputs(config: RunConfig) -> Iterator[Contradiction]:
    template = config.data.chat_template
    if template is not None and not Path(template).is_file():
        yield _contradiction("data.chat_template", f"data.chat_template: {template}: there is no such file")
    adapter = config.model.adapter
    if adapter is not None and not is_url(adapter) and not Path(adapter).is_dir():
        found = "it is a file" if Path(adapter).is_file() else "there is no such directory"
        yield _contradiction(
            "model.adapter",
            f"model.adapter: {adapter}: {found}, expected a run or a checkpoint of ckptrain, a PEFT directory, or a"
            " LoRA checkpoint of Megatron-Bridge; an adapter on the Hub is downloaded first: hf download NAME"
            " --local-dir DIR",
        )


def _contradiction(keys: str, text: str) -> Contradiction:
    return Contradiction(keys=tuple(keys.split(", ")), text=text)
