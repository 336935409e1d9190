"""Which configuration keys may differ between the run that saved a checkpoint and the run that resumes from it.

One table holds every key of `RunConfig`. A key is put where its effect on a resumed run puts it, not where its name
does; `effect` says why, and is what a person is shown. What a path leads to (the base model, the data, the modules that
a LoRA target selects) is compared by fingerprint in `start_plan`, so the path itself may change freely.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs


class Kind(enum.Enum):
    """What becomes of a resume when a key differs."""

    IDENTITY = "identity"
    """Refused: what is trained would be another thing."""
    ORDER = "order"
    """Refused: the samples after the checkpoint would not be those that an uninterrupted run sees."""
    NOTED = "noted"
    """Allowed and told: the run goes on, with other numbers than the uninterrupted one."""
    FREE = "free"
    """Allowed silently: nothing that is learnt depends on it."""


REFUSED = frozenset({Kind.IDENTITY, Kind.ORDER})


@attrs.frozen
class Rule:
    """How one key is treated, and why, in words that finish "because it ..."."""

    kind: Kind
    effect: str


def _identity(effect: str) -> Rule:
    return Rule(Kind.IDENTITY, effect)


def _order(effect: str) -> Rule:
    return Rule(Kind.ORDER, effect)


def _noted(effect: str) -> Rule:
    return Rule(Kind.NOTED, effect)


def _free(effect: str) -> Rule:
    return Rule(Kind.FREE, effect)


_START_ONLY = "only matters where adapters are initialised: a resume takes them from the checkpoint"
_LAYOUT = "changes the parallel layout: the same training up to rounding"
_BY_FINGERPRINT = "is compared by the fingerprint of what it leads to"
_BY_MODULES = "is compared by the modules it selects"
_SAVING = "is about what is kept, not about what is learnt"
_TELLING = "is about what is told, not about what is learnt"
_STOPPING = "is about when to stop or look, not about what is learnt"

RULES: Mapping[str, Rule] = {
    "model.pretrained": _free(_BY_FINGERPRINT),
    "model.revision": _free(_BY_FINGERPRINT),
    "model.adapter": _free("is where a first start comes from: a resume takes the adapter from the checkpoint"),
    "model.dtype": _identity("is the type of the base weights and decides whether the optimizer keeps float32 masters"),
    "model.fp8": _noted("rounds the frozen layers otherwise: adapters go on learning beside a slightly different base"),
    "model.backend": _noted("computes the same layers with other kernels: the same training up to rounding"),
    "model.verify": _free("is a check after loading"),
    "lora.enabled": _identity("decides whether there are adapters at all"),
    "lora.kind": _identity("decides whether the parts of a fused layer share an A, and whether there are magnitudes"),
    "lora.target_modules": _free(_BY_MODULES),
    "lora.exclude_modules": _free(_BY_MODULES),
    "lora.dim": _identity("is the shape of the adapters"),
    "lora.alpha": _identity("scales the adapters' output by alpha / dim: the same weights would be another function"),
    # Dropout and its position are not part of what the adapter is: without dropout, in evaluation and after export,
    # the function is the same. They regularise the steps to come, as weight decay does.
    "lora.dropout": _noted("regularises the steps to come; the adapters themselves stay what they are"),
    "lora.dropout_position": _noted("regularises the steps to come; the adapters themselves stay what they are"),
    "lora.lora_A_init_method": _noted(_START_ONLY),
    "lora.lora_B_init_method": _noted(_START_ONLY),
    "lora.a2a_experimental": _noted("exchanges the same activations in another way: the same training up to rounding"),
    "lora.fused": _noted("computes the same layers with other kernels: the same training up to rounding"),
    "lora.lora_dtype": _identity("is the type of the adapter weights and decides whether they have float32 masters"),
    "parallel.tensor": _noted(_LAYOUT),
    "parallel.pipeline": _noted(_LAYOUT),
    "parallel.context": _noted(_LAYOUT),
    "parallel.expert": _noted(_LAYOUT),
    "parallel.sequence": _noted(_LAYOUT),
    "data.train": _free(_BY_FINGERPRINT),
    "data.validation": _free(_BY_FINGERPRINT),
    "data.split_validation_size": _order("decides which samples there are"),
    "data.format": _order("decides how rows become samples"),
    "data.chat_template": _free(_BY_FINGERPRINT),
    "data.sequence_length": _order("decides which samples share a row"),
    "data.packing": _order("decides which samples share a row"),
    "data.loss_on": _identity("decides what is learnt from each sample"),
    "data.on_too_long": _order("decides which samples there are"),
    "data.workers": _free("is about how fast the data is there, not about what it is"),
    "optimizer.lr": _noted("changes the learning rate from here on"),
    "optimizer.min_lr": _noted("changes the learning rate from here on"),
    "optimizer.weight_decay": _noted("changes the decay from here on"),
    "optimizer.betas": _noted("changes how the restored moments decay from here on"),
    "optimizer.eps": _noted("changes the size of the steps from here on"),
    "optimizer.clip_grad": _noted("changes which gradients are clipped from here on"),
    "optimizer.schedule": _noted("changes the learning rate from here on"),
    "optimizer.warmup_steps": _noted("changes the learning rate from here on"),
    "train.steps": _noted("changes where training ends, and stretches the learning rate schedule"),
    "train.micro_batch_size": _noted(
        "cuts the same global batch into other portions: the same training up to rounding"
    ),
    "train.global_batch_size": _order("decides which samples belong to which step"),
    "train.seed": _order("decides the order of the samples"),
    "train.start": _free("is about the start itself"),
    "train.deterministic": _noted("selects other kernels: the same training up to rounding"),
    "train.recompute": _noted("computes again what would be kept: the same training up to rounding"),
    "train.max_minutes": _free(_STOPPING),
    "train.timeout_minutes": _free(_STOPPING),
    "train.eval_every_steps": _free(_STOPPING),
    "train.cuda_graphs": _noted("launches the same kernels over other padding: the same training up to rounding"),
    "train.profile": _free(_TELLING),
    "checkpoint.every_steps": _free(_SAVING),
    "checkpoint.keep_last": _free(_SAVING),
    "checkpoint.keep_every": _free(_SAVING),
    "checkpoint.keep_best": _free(_SAVING),
    "checkpoint.metric": _free(_SAVING),
    "checkpoint.asynchronous": _free(_SAVING),
    "checkpoint.on_damaged": _free(_SAVING),
    # What a resume leaves out is told by the plan itself, whatever the run before was told.
    "restore.optimizer": _free("is about this start alone"),
    "restore.rng": _free("is about this start alone"),
    "log.every_steps": _free(_TELLING),
    "log.tensorboard": _free(_TELLING),
    "log.wandb": _free(_TELLING),
    "log.mlflow": _free(_TELLING),
    "log.sample_tokens": _free(_TELLING),
}

SCHEDULE_KEYS = ("optimizer.lr", "optimizer.min_lr", "optimizer.schedule", "optimizer.warmup_steps", "train.steps")
"""The keys that the learning rate of a step is a function of."""

ABSENT = "(not a key there)"
"""Stands for the value of a key that one of the two configurations lacks: they are of different versions."""


def is_by_fingerprint(key: str) -> bool:
    """Tell whether what a key leads to is compared, and not its value: a path, which may be another on each host."""
    return RULES[key].effect == _BY_FINGERPRINT


@attrs.frozen(kw_only=True)
class Difference:
    """One key that two configurations do not agree on."""

    key: str
    old: Any
    new: Any
    rule: Rule

    @property
    def refused(self) -> bool:
        """Whether a resume is out of the question while this key differs."""
        return self.rule.kind in REFUSED

    @property
    def remedy(self) -> str:
        """What to do about a refused difference."""
        return f"set {self.key}={_shown(self.old)} or use a new --run-dir"

    def __str__(self) -> str:
        return f"{self.key} is {_shown(self.old)} there and {_shown(self.new)} in the config"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Return the keys that differ between two flattened configurations, in the order of the table.

    A key that only one side has comes from another version of ckptrain, which behaved in its own fixed way there; that
    is noted, not refused, because the keys of a checkpoint that decide its identity are in its manifest by themselves.
    """
    unknown = sorted((old.keys() | new.keys()) - RULES.keys())
    found = []
    for key in [*RULES, *unknown]:
        before, after = (_plain(side.get(key, ABSENT)) for side in (old, new))
        if before == after:
            continue
        in_both = key in old and key in new
        rule = (
            RULES[key] if key in RULES and in_both else _noted("is a key of only one of the two versions of ckptrain")
        )
        found.append(Difference(key=key, old=before, new=after, rule=rule))
    return found


def _plain(value: object) -> object:
    """Tuples become lists: one side has been through JSON."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: object) -> str:
    """Return the value as YAML writes it, for someone about to type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return str(value)
