"""Whether a checkpoint fits what a run is asked to be now, and what is worth saying where it does.

Identity is compared by fingerprints and resolved names, never by paths: a base model that was moved is the same base,
and another one under the old name is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.schedule import learning_rate
from ckptrain.config.schema import OptimizerConfig, RunConfig
from ckptrain.lifecycle.drift import SCHEDULE_KEYS, Difference, Kind
from ckptrain.lifecycle.facts import AdapterFacts, CheckpointFacts, DataIdentity, LoraSpec, ProgramParts, RunFacts

_NEW_RUN = "use a new --run-dir"


def identity_problems(run: RunFacts, checkpoint: CheckpointFacts) -> list[str]:
    """Return what makes going on from `checkpoint` another training: its base, modules, loss, tokenizer or data."""
    problems = _base_problems(run.base, checkpoint.base.name, checkpoint.base.fingerprint)
    if run.lora.settings.kind == checkpoint.lora.settings.kind:  # otherwise the modules have other names, and more
        problems += _module_problems(run.lora, checkpoint.lora)
    problems += _program_problems(run.program, checkpoint.program)
    if checkpoint.data is None or checkpoint.tokenizer_fingerprint is None:
        problems.append(
            "it was not saved by a training, so it has no data position; give it as model.adapter in a new --run-dir"
        )
        return problems
    if run.tokenizer_fingerprint != checkpoint.tokenizer_fingerprint:
        problems.append(
            f"the tokenizer or its chat template is {_short(checkpoint.tokenizer_fingerprint)} there and"
            f" {_short(run.tokenizer_fingerprint)} now, so the same text gives other tokens; restore the base model's"
            f" tokenizer files, and the file that data.chat_template names if it does, or {_NEW_RUN}"
        )
    if run.program.samples != checkpoint.program.samples:  # told already; data of another kind is other data
        return problems
    return problems + data_problems(run.data, checkpoint.data)


def warm_start_problems(run: RunFacts, source: AdapterFacts) -> list[str]:
    """Return why an adapter from elsewhere cannot be the start of this run."""
    problems = []
    if source.base_fingerprint not in (None, run.base.fingerprint):
        problems += _base_problems(run.base, str(source.base_name), str(source.base_fingerprint))
    there, here = source.lora.settings, run.lora.settings
    if there.kind != here.kind:
        problems.append(
            f"lora.kind is {there.kind} there and {here.kind} in the config:"
            f" {_kind_differs(there.kind, here.kind)}; set lora.kind={there.kind} or auto"
        )
    elif there_only := _module_problems(run.lora, source.lora):
        problems += there_only
    for key in ("dim", "alpha"):
        theirs, ours = getattr(there, key), getattr(here, key)
        if theirs != ours:
            problems.append(f"lora.{key} is {theirs} there and {ours} in the config; set lora.{key}={theirs}")
    return [f"model.adapter {source.path}: {problem}" for problem in problems]


_KIND_DIFFERS = {
    "dora": "it has magnitudes beside A and B, which only DoRA holds",
    "canonical": "parts of a fused layer have an A of their own, which one shared A cannot hold",
    "lora": "parts of a fused layer share an A",
}


def _kind_differs(there: str, here: str) -> str:
    """Say what an adapter of one kind has or lacks that one of another does not."""
    return "it has no magnitudes" if here == "dora" else _KIND_DIFFERS[there]


def warm_start_notes(run: RunFacts, source: AdapterFacts) -> tuple[str, ...]:
    """Return what differs between an adapter's origin and this run without standing in the way."""
    notes = list(source.notes)
    if source.base_fingerprint is None and source.base_name is not None and source.base_name != run.base.name:
        notes.append(
            f"the adapter says that its base is {source.base_name}, and the base here is {run.base.name}: only its"
            " names and shapes could be compared"
        )
    if source.tokenizer_fingerprint not in (None, run.tokenizer_fingerprint):
        notes.append(f"the adapter in {source.path.name} was trained with another tokenizer or chat template")
    if source.dtype != run.adapter_dtype:
        notes.append(f"the adapter's matrices are {source.dtype}: they are converted to {run.adapter_dtype}")
    return tuple(notes)


def resume_notes(
    config: RunConfig, run: RunFacts, checkpoint: CheckpointFacts, changes: Sequence[Difference]
) -> tuple[str, ...]:
    """Return everything that a resume does otherwise than the uninterrupted run would have."""
    notes = []
    if config.model.adapter is not None:
        notes.append(f"model.adapter is not used: {checkpoint.path.name} of this run goes before it")
    if not config.restore.optimizer:
        notes.append("restore.optimizer is false: the moments of the optimizer start from zero")
    if not config.restore.rng:
        notes.append("restore.rng is false: the random number generators are seeded from (seed, step, rank)")
    notes += [f"{change}: it {change.rule.effect}" for change in changes if change.rule.kind is Kind.NOTED]
    notes += _learning_rate_note(config, checkpoint, changes)
    notes += _layout_notes(config, run, checkpoint)
    if checkpoint.data is not None and run.data.validation_fingerprint != checkpoint.data.validation_fingerprint:
        notes.append("the validation data changed: val_loss cannot be compared with that of the steps before")
    notes += [
        f"{name} was {checkpoint.versions[name]} and is {run.versions[name]} now"
        for name in sorted(checkpoint.versions.keys() & run.versions.keys())
        if checkpoint.versions[name] != run.versions[name]
    ]
    return tuple(notes)


def _base_problems(here: BaseIdentity, name: str, fingerprint: str) -> list[str]:
    then, now = _short(fingerprint), _short(here.fingerprint)
    if here.fingerprint == fingerprint:
        return []
    if here.name == name:
        problem = (
            f"the base model {name} is no longer the same: its fingerprint is {then} there and {now} now; restore"
            f" its files (a Hub id: pin model.revision) or {_NEW_RUN}"
        )
    else:
        problem = (
            f"the base model is {name} ({then}) there and {here.name} ({now}) in the config;"
            f" set model.pretrained={name} or {_NEW_RUN}"
        )
    return [problem]


def _module_problems(here: LoraSpec, there: LoraSpec) -> list[str]:
    then, now = set(there.modules), set(here.modules)
    if then == now:
        return []
    settings = there.settings
    problem = (
        f"lora.target_modules and lora.exclude_modules select {len(then)} modules there and {len(now)} in the config"
        f"{_only('there', then - now)}{_only('in the config', now - then)};"
        f" set lora.target_modules=[{','.join(settings.target_modules)}]"
        f" lora.exclude_modules=[{','.join(settings.exclude_modules)}] or {_NEW_RUN}"
    )
    return [problem]


_BROUGHT = {
    "loss": ("the loss is", "cross-entropy", "Loss"),
    "samples": ("the samples are made by", "nobody, but read from data.train", "Samples"),
}
"""What a program may bring: how it is called, what is there without it, and the class that it is given in."""


def _program_problems(here: ProgramParts, there: ProgramParts) -> list[str]:
    """Compare the names of what programs brought; of what the functions compute a name is all that is known."""
    problems = []
    for part, (said, without, kind) in _BROUGHT.items():
        now, then = getattr(here, part), getattr(there, part)
        if now == then:
            continue
        if then is None:
            problems.append(f"{said} {without} there and {now!r} now; leave out `{part}`, or {_NEW_RUN}")
        elif now is None:
            problems.append(
                f"{said} {then!r} there, a function of the program that trained it, and {without} now; go on by that"
                f" program, which gives ckptrain.Trainer {part}=ckptrain.{kind}(function, name={then!r}): the command"
                f" line cannot have it; or {_NEW_RUN}"
            )
        else:
            problems.append(
                f"{said} {then!r} there, a function of the program that trained it, and {now!r} now; give the function"
                f" of that name, or {_NEW_RUN}"
            )
    return problems


def _only(where: str, names: set[str], shown: int = 2) -> str:
    if not names:
        return ""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f", only {where}: {', '.join(sorted(names)[:shown])}{more}"


def data_problems(here: DataIdentity, there: DataIdentity) -> list[str]:
    """Return what makes the samples of two runs, or their order, differ; counts once both sides know them."""
    if here.fingerprint != there.fingerprint:
        problem = (
            f"the training data is {_short(there.fingerprint)} there and {_short(here.fingerprint)} now, so the samples"
            " after the checkpoint would be others; set data.train to the files of that run, with its format, columns,"
            f" split and weights, or {_NEW_RUN}"
        )
        return [problem]
    counts = (("samples", there.num_samples, here.num_samples), ("rows", there.num_rows, here.num_rows))
    return [
        f"the training data gives {then} {what} there and {now} now, so the order of the samples would be another;"
        f" resume with the version of ckptrain that saved the checkpoint or {_NEW_RUN}"
        for what, then, now in counts
        if None not in (then, now) and then != now
    ]


def _learning_rate_note(config: RunConfig, checkpoint: CheckpointFacts, changes: Sequence[Difference]) -> list[str]:
    """Say what a changed schedule does to the very next step, which is where a surprise would show."""
    old = checkpoint.config
    if not any(change.key in SCHEDULE_KEYS for change in changes) or not old.keys() >= set(SCHEDULE_KEYS):
        return []
    step = checkpoint.step + 1
    now = learning_rate(config.optimizer, config.train.steps, step)
    if step > old["train.steps"]:
        return [f"the learning rate at step {step} is {now:.4g}; the old settings ended at step {old['train.steps']}"]
    then = learning_rate(_old_optimizer(config, old), old["train.steps"], step)
    return [f"the learning rate at step {step} is {now:.4g}; under the old settings it would be {then:.4g}"]


def _old_optimizer(config: RunConfig, old: Mapping[str, Any]) -> OptimizerConfig:
    keys = [key.removeprefix("optimizer.") for key in SCHEDULE_KEYS if key.startswith("optimizer.")]
    return attrs.evolve(config.optimizer, **{key: old[f"optimizer.{key}"] for key in keys})


def _layout_notes(config: RunConfig, run: RunFacts, checkpoint: CheckpointFacts) -> list[str]:
    if checkpoint.layout == run.layout:
        return []
    change = f"the parallel layout was {layout_text(checkpoint.layout)} and is {layout_text(run.layout)} now"
    notes = [f"{change}: tensors are redistributed bit for bit, the arithmetic that follows may round otherwise"]
    if config.lora.dropout > 0:
        notes.append("lora.dropout is on, so under another layout its masks are not those of the uninterrupted run")
    return notes


def layout_text(layout: Layout) -> str:
    """Return the layout in words, such as `tensor 2 x pipeline 1 x data 4`, leaving out what is always 1."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "expert": layout.expert}
    always = {"tensor", "pipeline"}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name in always]
    return " x ".join([*parts, f"data {layout.data}"])


def _short(fingerprint: str) -> str:
    """Return enough of a fingerprint to tell two apart by eye."""
    return fingerprint[:12]
